"""The commands that measure a job on this machine: doctor, ablate."""

import argparse
import json
import os
import shlex
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from loguru import logger

from trainyard.cli.verb import Verbs, add_verb
from trainyard.config import compose as configs
from trainyard.errors import UserError
from trainyard.files import require_writable, write_atomically
from trainyard.hardware import show_own_mig_slice
from trainyard.measure import make_header, write_new
from trainyard.runs.create import Origin, create_run
from trainyard.runs.folder import CONFIG, resolve_run
from trainyard.terminal import say
from trainyard.text import quote_path
from trainyard.train.world import World, read_world

if TYPE_CHECKING:
    from trainyard.config.settings import TrainConfig
    from trainyard.tools.doctor import Diagnosis

_ANSWER = "diagnosis.json"


def add_commands(verbs: Verbs) -> None:
    doc = "measure what limits a job's training on this machine, and what fixing it would give"
    verb = add_verb(verbs, "doctor", _doctor, doc)
    verb.add_argument("job", nargs="?", default="")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE")
    verb.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks, one per GPU, or sharing the cores")
    seconds = "for the three rates: 15; more makes them steadier"
    verb.add_argument("--seconds", type=float, default=15.0, metavar="S", help=seconds)
    trace = "also write a trace of some steps, which ui.perfetto.dev opens, and name the most expensive operators"
    verb.add_argument("--trace", type=Path, metavar="FILE", help=trace)
    verb.add_argument("--results", type=Path, metavar="FOLDER", help="also write doctor-DATE.jsonl there")
    record = "break down a run's time from its record; measures nothing"
    verb.add_argument("--run", metavar="RUN", help=record)
    verb.add_argument("--as-rank", type=Path, default=None, help=argparse.SUPPRESS)
    doc = "measure the gain of each optimisation for a job on this machine: alone, and with all the others"
    verb = add_verb(verbs, "ablate", _ablate, doc)
    verb.add_argument("job")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE")
    minutes = "how long, which decides how many rounds: 10; never fewer than four"
    verb.add_argument("--minutes", type=float, default=10.0, metavar="M", help=minutes)
    only = "measure this switch alone, and others named so; default: all"
    verb.add_argument("--only", action="append", default=[], metavar="SWITCH", help=only)
    switch = "also measure options of the job as a switch: --switch 'shallow: model.blocks=6'"
    verb.add_argument("--switch", action="append", default=[], metavar="'NAME: OPTION=VALUE ...'", help=switch)
    results = "also write ablate-DATE.jsonl and a plot there"
    verb.add_argument("--results", type=Path, metavar="FOLDER", help=results)


def _doctor(args: argparse.Namespace) -> int:
    logger.remove()
    logger.add(sys.stderr, format="{message}", level="WARNING")
    if args.as_rank is not None:
        return _measure_as_rank(args)
    if bool(args.job) == bool(args.run):
        raise UserError("Name a job to measure, or a run: trainyard doctor JOB, or trainyard doctor --run RUN.")
    if args.run:
        from trainyard.tools.recorded_diagnosis import describe_record

        for line in describe_record(resolve_run(args.run, args.runs)):
            say(line)
        return 0
    from trainyard.data.prepare import prepare_data
    from trainyard.tools.doctor import decode_diagnosis, format_diagnosis

    if args.ranks < 1 or args.seconds <= 0:
        raise UserError(f"--ranks {args.ranks} --seconds {args.seconds:g}: expected a rank or more, and some seconds.")
    for flag, folder in (("--trace", args.trace and args.trace.parent), ("--results", args.results)):
        if folder is not None:
            require_writable(folder, flag=flag)
    config = prepare_data(configs.compose(args.job, args.overrides, args.jobs), args.jobs)
    with TemporaryDirectory(prefix="trainyard-doctor-") as scratch:
        run = create_run(Path(scratch), config, name="doctor", origin=Origin.collect(os.environ))
        code = _start_ranks(run, config, args)
        if code:
            return code
        answer = json.loads((run / _ANSWER).read_text())
    diagnosis = decode_diagnosis(answer)
    for line in [*format_diagnosis(args.job, diagnosis), *answer["operators"]]:
        say(line)
    if args.results:
        options = {"job": args.job, "overrides": args.overrides, "ranks": args.ranks, "seconds": args.seconds}
        say(f"written: {quote_path(write_new(args.results, 'doctor', [make_header('doctor', options), answer]))}")
    return 0


def _start_ranks(run: Path, config: "TrainConfig", args: argparse.Namespace) -> int:
    if args.ranks == 1:
        return _measure(run, config, args, World())
    from trainyard.node.ranks import run_ranks

    command = ["doctor", args.job, "--as-rank", str(run), "--jobs", str(args.jobs), "--seconds", str(args.seconds)]
    return run_ranks(command, args.ranks, environ=os.environ)


def _measure_as_rank(args: argparse.Namespace) -> int:
    """Measure as one of several ranks; `_doctor` has created the run."""
    from trainyard.train import distributed

    world = read_world(os.environ)
    show_own_mig_slice(os.environ, world.local_rank)
    config = configs.load_config(args.as_rank / CONFIG, args.jobs)
    distributed.join(world, args.as_rank, os.environ, deterministic=config.deterministic)
    code = _measure(args.as_rank, config, args, world)
    distributed.leave()
    return code


def _measure(run: Path, config: "TrainConfig", args: argparse.Namespace, world: World) -> int:
    from trainyard.tools.doctor import diagnose, encode_diagnosis, trace_steps
    from trainyard.tools.trial import prepare_trial

    with prepare_trial(run, config, args.jobs, world, os.environ) as trial:
        diagnosis: Diagnosis = diagnose(trial, seconds=args.seconds)
        operators = trace_steps(trial, args.trace) if args.trace and world.is_main else []
    if world.is_main:
        write_atomically(run / _ANSWER, json.dumps({**encode_diagnosis(diagnosis), "operators": operators}))
    return 0


def _ablate(args: argparse.Namespace) -> int:
    logger.remove()
    logger.add(sys.stderr, format="{message}", level="WARNING")
    if args.minutes <= 0:
        raise UserError(f"--minutes {args.minutes:g}: expected more than 0.")
    if args.results is not None:
        require_writable(args.results, flag="--results")
    own = dict(_parse_switch(text) for text in args.switch)
    from tqdm import tqdm

    from trainyard.data.prepare import prepare_data
    from trainyard.tools import ablate
    from trainyard.tools.naive_loop import LoopRunner
    from trainyard.tools.trial import open_trial

    compiles, recomputes = False, False
    with ExitStack() as stack:
        runners = {}
        for name, words in {"": [], **own}.items():
            config = prepare_data(configs.compose(args.job, [*args.overrides, *words], args.jobs), args.jobs)
            if not name:
                compiles, recomputes = config.compile in ("on", "graphs"), config.gradient_checkpointing
            plain = replace(config, compile="off", gradient_checkpointing=False)
            trial = stack.enter_context(open_trial(plain, args.jobs, os.environ))
            files = stack.enter_context(TemporaryDirectory(prefix="trainyard-ablate-"))
            runners[name] = LoopRunner(trial, Path(files))
        naive, full = ablate.build_loops(runners[""], compile=compiles, recompute=recomputes)
        switches = ablate.list_switches(runners[""], naive, full, os.environ)
        switches += [ablate.Switch(name, {}, same_work=False, job=name) for name in own]
        chosen = ablate.choose_switches(switches, args.only)
        missing = [switch for switch in chosen if switch.missing]
        ablation = ablate.Ablation(runners, naive, full, [s for s in chosen if not s.missing])
        with tqdm(total=100, unit="%", disable=None, leave=False) as bar:
            result = ablation.measure(args.minutes, progress=lambda share: bar.update(min(100, 100 * share) - bar.n))
    for line in ablate.format_result(args.job, result, missing):
        say(line)
    if args.results:
        options = {name: getattr(args, name) for name in ("job", "overrides", "minutes", "only", "switch")}
        lines = [make_header("ablate", options), *ablate.encode_result(result, missing)]
        path = write_new(args.results, "ablate", lines)
        write_atomically(path.with_suffix(".png"), ablate.draw_result(args.job, result))
        say(f"written: {quote_path(path)} and its plot {path.with_suffix('.png').name}")
    return 0


def _parse_switch(text: str) -> tuple[str, list[str]]:
    """Read "NAME: OPTION=VALUE ..."."""
    name, _, options = text.partition(":")
    try:
        words = shlex.split(options)
    except ValueError:
        words = []
    if not name.strip() or not words or any("=" not in word for word in words):
        raise UserError(f"--switch '{text}': expected a name and options, such as --switch 'shallow: model.blocks=6'.")
    return name.strip(), words
