"""The command that measures this machine: gpu-check."""

import argparse
import os

from trainyard.cli.verb import Verbs, add_verb
from trainyard.tools import gpu_check


def add_commands(verbs: Verbs) -> None:
    """Add the command."""
    doc = "check in ten minutes that this card trains every job right, and how fast; write down what it finds"
    gpu_check.add_arguments(add_verb(verbs, "gpu-check", _run_gpu_check, doc))


def _run_gpu_check(args: argparse.Namespace) -> int:
    return gpu_check.main(args, environ=os.environ)
