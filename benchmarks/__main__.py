"""`python -m benchmarks`, in a checkout: compare our reader with h5py and plain files, or print a result file."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.read import Setting, run
from benchmarks.results import format_results, read_results
from trainyard.errors import UserError
from trainyard.measure import make_header


def main(argv: Sequence[str] | None = None) -> None:
    """Run what was typed, or print the table of a result file; exit with code 2 after a user's mistake."""
    default = Setting(Path("data/bench").absolute(), Path("benchmarks"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of a result file and stop")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="run these and ours; repeatable")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=default.seconds, help="of each in a round: %(default)s")
    parser.add_argument("--records", type=int, default=default.records, help="to generate; default: %(default)s")
    parser.add_argument("--data", type=Path, default=default.data, help="cache of generated data: %(default)s")
    parser.add_argument("--results", type=Path, default=default.results, help="folder of results: %(default)s")
    args = parser.parse_args(argv)
    for name, least in (("rounds", 1), ("seconds", 0.01), ("records", 64)):
        if not getattr(args, name) >= least:
            value, usual = getattr(args, name), getattr(default, name)
            parser.error(f"--{name} {value}: expected {least} or more: --{name} {usual}")
    try:
        if args.show:
            print(format_results(read_results(args.show)))
            return
        typed = {name: getattr(args, name) for name in ("results", "rounds", "seconds", "records")}
        setting = Setting(data=args.data.absolute(), only=tuple(args.only), **typed)
        run(setting, head=make_header("read", asdict(setting)))
    except UserError as error:
        parser.exit(2, f"{type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main()
