"""The commands that measure this machine: bench and gpu-check."""

import argparse
import os
import shlex

from trainyard.cli.verb import Verbs, add_verb
from trainyard.tools import bench, gpu_check


def add_commands(verbs: Verbs) -> None:
    """Add the commands."""
    verb = add_verb(verbs, "bench", _run_bench, "compare reading, decoding and training steps with the usual loaders")
    bench.add_arguments(verb)
    doc = "check in ten minutes that this card trains every job right, and how fast; write down what it finds"
    gpu_check.add_arguments(add_verb(verbs, "gpu-check", _run_gpu_check, doc))


def _run_bench(args: argparse.Namespace) -> int:
    bench.main(args, command=shlex.join(["trainyard", *args.typed]))
    return 0


def _run_gpu_check(args: argparse.Namespace) -> int:
    return gpu_check.main(args, environ=os.environ)
