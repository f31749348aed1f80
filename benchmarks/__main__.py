"""`python -m benchmarks`, in a checkout: compare reading and decoding with the usual loaders."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.contract import SUITES, Setting
from benchmarks.results import format_results, read_results
from benchmarks.suite import run_suite
from trainyard.errors import UserError
from trainyard.hardware import count_cores
from trainyard.measure import make_header


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suites that were typed, or print the table of a result file; exit with code 2 after a user's mistake."""
    default = Setting(Path("data/bench").absolute(), Path("benchmarks"), count_cores())
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    parser.add_argument("suites", nargs="*", help=f"suites to run, from {', '.join(SUITES)} (default: these)")
    parser.add_argument("--quick", action="store_true", help="little data, one round: check that everything runs")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="run these and ours; repeatable")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of a result file and stop")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=default.seconds, help="minimum time of each: %(default)s")
    parser.add_argument("--threads", type=int, default=default.threads, help="for each; default: cores, %(default)s")
    parser.add_argument("--data", type=Path, default=default.data, help="cache of generated data: %(default)s")
    parser.add_argument("--results", type=Path, default=default.results, help="folder of results: %(default)s")
    args = parser.parse_args(argv)
    typed = {name: getattr(args, name) for name in ("rounds", "seconds", "threads", "results")}
    for name in ("rounds", "seconds", "threads"):
        if not typed[name] > 0:
            parser.error(f"--{name} {typed[name]}: expected a number above 0: --{name} {getattr(default, name)}")
    setting = replace(default, only=tuple(args.only), data=args.data.absolute(), **typed)
    if args.quick:
        setting = make_quick(setting)
    try:
        if args.show:
            print(format_results(read_results(args.show)))
            return
        # Once, before the first suite: its result file would make the checkout look modified to the second one.
        head = make_header("", asdict(setting))
        head["command"] = shlex.join(["python", "-m", "benchmarks", *(sys.argv[1:] if argv is None else argv)])
        for suite in args.suites or SUITES:
            run_suite(suite, setting, head={**head, "suite": suite})
    except UserError as error:
        parser.exit(2, f"{type(error).__name__}: {error}\n")


def make_quick(setting: Setting) -> Setting:
    """Return a copy with little data and one round: shows that everything runs, measures nothing."""
    return replace(setting, rounds=1, rgb=128, gray=128, warmup=64, samples=128, seconds=0.0)


if __name__ == "__main__":
    main()
