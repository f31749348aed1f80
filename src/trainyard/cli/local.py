"""The commands for packed data, checkpoints and reports on this machine."""

import argparse
from pathlib import Path

from trainyard.cli.verb import Verbs, add_verb
from trainyard.config import compose as configs
from trainyard.config.families import format_families
from trainyard.errors import UserError
from trainyard.files import require_writable
from trainyard.runs import folder as runs
from trainyard.runs.manifest import list_checkpoints, verify
from trainyard.runs.state import ExitCode
from trainyard.terminal import say
from trainyard.text import format_override, quote_path


def add_commands(verbs: Verbs) -> None:
    verb = add_verb(verbs, "pack", _pack, "write raw files into shards, or finish writing them")
    verb.add_argument("job")
    verb.add_argument("raw", type=Path, help="folder of raw files")
    verb.add_argument("out", type=Path, help="folder of shards")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE")
    verb.add_argument("--workers", type=int, default=0, metavar="N", help="processes (default: the cores)")
    verb.add_argument("--shard-mib", type=int, default=128, metavar="MIB", help="target size of a shard")
    verb = add_verb(verbs, "verify", _verify, "read all packed data and name every damaged record")
    verb.add_argument("data", type=Path, help="folder of shards")
    verb = add_verb(verbs, "ckpt", _run_ckpt, "list or verify the checkpoints of a run")
    verb.add_argument("what", choices=("list", "verify"))
    verb.add_argument("run", help="its folder, or a job for that job's newest run")
    doc = "write a run's report: one HTML page and its plots; of several runs, one page that compares them"
    verb = add_verb(verbs, "report", _write_report, doc)
    verb.add_argument("run", nargs="+", help="its folder, or a job for that job's newest run")
    out = "the page of several runs; default: in the folder of runs"
    verb.add_argument("--out", type=Path, metavar="FILE", help=out)


def _pack(args: argparse.Namespace) -> int:
    from trainyard.data.prepare import pack_raw

    config = configs.compose(args.job, args.overrides, args.jobs)
    pack_raw(config, args.raw, args.out, args.jobs, workers=args.workers, shard_mib=args.shard_mib)
    data = format_override("data.path", str(args.out))
    say(f"next: trainyard run {args.job} {data}{format_families(args.job, args.jobs)}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from trainyard.data.shards import verify

    damaged = 0
    with tqdm(unit="B", unit_scale=True, desc=f"reading {args.data}", disable=None, leave=False) as bar:
        for damage in verify(args.data, bar.update):
            damaged += 1
            say(f"{damage.shard}: {damage.what}: {damage.reason}")
    say(f"{args.data}: {'all records are as they were packed' if not damaged else f'{damaged} damaged'}")
    return ExitCode.FAILED if damaged else 0


def _run_ckpt(args: argparse.Namespace) -> int:
    run = runs.resolve_run(args.run, args.runs)
    entries = list_checkpoints(run / "checkpoints")
    if not entries:
        raise UserError(f"{run}: no checkpoints yet.")
    damaged = 0
    for entry in entries:
        problem = verify(entry) if args.what == "verify" else entry.problem
        damaged += problem is not None
        best = " best" if (entry.meta.get("best") or {}).get("step") == entry.step else ""
        say(f"{entry.path.name}  {entry.bytes / 2**20:9.1f} MiB  {problem or 'ok'}{best}")
    return ExitCode.FAILED if damaged else 0


def _write_report(args: argparse.Namespace) -> int:
    from trainyard.report.compare_page import PAGE, write_comparison
    from trainyard.report.run_page import format_summary, write_report

    folders = list(dict.fromkeys(runs.resolve_run(name, args.runs) for name in args.run))
    if len(folders) > 1:
        page = args.out or args.runs / PAGE
        if page.is_dir():
            raise UserError(f"--out {page}: is a folder. Name the file: --out {page / PAGE}")
        require_writable(page.parent, flag="--out" if args.out else "--runs")
        page.parent.mkdir(parents=True, exist_ok=True)
        say(write_comparison(folders, page))
        say(f"next: open {quote_path(page)}")
        return 0
    (run,) = folders
    if args.out:
        raise UserError(f"--out {args.out}: is for the page of several runs; that of one run is {run}/report.html.")
    report = write_report(run)
    say(format_summary(run, next_commands=[f"open {quote_path(report)}"]))
    return 0
