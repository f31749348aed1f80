"""Measures what grows with runs, data and ranks, with today's code and, if asked, with that of an earlier commit.

The cases are in `benchmarks/scale`. Each prepares its input once and is measured in new processes, so that memory is
its own. Paths, files and ranks are real; raw images, scores and weights are random numbers of the size asked for,
because none of them is looked at. With an earlier commit, both codes are measured in each round, in random order, and
ratios are computed within a round.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainyard.errors import UserError
from trainyard.measure import Summary, find_free_path, format_table, write_results
from trainyard.tools.bench_worker import WorkerError, require_scripts, run_worker
from trainyard.tools.lifetime import make_scratch

SUITE = "scale"
_TIMEOUT_S = 1200  # of one measurement


@dataclass
class _Side:
    """Today's code or an earlier one, and what its rounds found."""

    code: Path  # the folder of its `src`
    rounds: list[list[dict[str, Any]]] = field(default_factory=list)  # the numbers of each round
    word: str = ""  # "none" or "fails" if this code has no numbers
    reason: str = ""  # why


def parse_sizes(texts: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return sizes with those that a person typed, such as lines=100000.

    Raises:
        UserError: there is no such size, or its value is not a number above 0.
    """
    chosen = dict(sizes)
    for text in texts:
        name, _, value = text.partition("=")
        if name not in sizes or not value.isdecimal() or not int(value):
            raise UserError(f"--size {text}: expected NAME=NUMBER, with one of {', '.join(sizes)}: --size lines=100000")
        chosen[name] = int(value)
    return chosen


def run_scale(
    scripts: Path,
    *,
    sizes: Sequence[str],
    is_quick: bool = False,
    against: str = "",
    rounds: int,
    only: Sequence[str],
    results: Path,
    header: Mapping[str, Any],
) -> Path:
    """Measure every case `rounds` times, print a table, and return the result file.

    Args:
        scripts: the folder `benchmarks` of a checkout.
        sizes: those that a person typed; for `parse_sizes`. The others are usual ones, smaller with `against`.
        is_quick: sizes that show that everything runs, and measure nothing.
        against: the commit whose code is measured, too; "": none. Its failures are part of the result.
        only: names of cases; empty: all.
        header: the first line of the result file, to which sizes and commit are added.

    Raises:
        UserError: there is no such case, size or commit, or a case failed with today's code.
    """
    require_scripts(scripts)
    root = scripts.resolve().parent
    (known,) = _run_worker(root, root, "list")
    cases = [name for name in known["cases"] if not only or name in only]
    if unknown := set(only) - set(known["cases"]):
        raise UserError(f"--only {min(unknown)}: no such case. There are: {', '.join(known['cases'])}.")
    chosen = parse_sizes(sizes, known["sizes"]["quick" if is_quick else "comparable" if against else "usual"])
    path = find_free_path(results, f"{SUITE}-{header['date'][:10]}")
    with _extract_code(root, against) as (before, commit):
        lines: list[dict[str, Any]] = [{**header, "sizes": chosen} | ({"against": commit} if before else {})]
        for case in cases:
            today, earlier = _Side(root), None if before is None else _Side(before)
            _measure_case(case, [side for side in (today, earlier) if side], chosen, rounds=rounds, root=root)
            own = _summarize(today, earlier, against)
            print(format_table(own), flush=True)
            lines += own
            write_results(path, lines)
    return path


def _measure_case(case: str, sides: Sequence[_Side], sizes: Mapping[str, int], *, rounds: int, root: Path) -> None:
    """Add the rounds of a case to each side; the first is today's code."""
    typed = json.dumps(sizes)
    with make_scratch(f"trainyard-{SUITE}-") as folder:
        _run_worker(root, root, "prepare", case, str(folder), typed, str(root))
        for number in range(rounds):
            for side in random.Random(f"{case} {number}").sample(sides, len(sides)):
                if side.word:
                    continue
                try:
                    found = _run_worker(root, side.code, "measure", case, str(folder), typed, str(side.code))
                except WorkerError as error:
                    if side is sides[0]:
                        raise
                    side.word, side.reason = "fails", str(error).rstrip().splitlines()[-1].replace(f"{folder}/", "")
                else:
                    side.rounds.append(found)
                    if "absent" in found[0]:
                        side.word, side.reason = "none", found[0]["absent"]


def _run_worker(root: Path, code: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the worker of the cases with the code of a folder."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(code / "src"), str(root)])}
    command = [sys.executable, "-P", "-m", "benchmarks.scale.worker", *arguments]
    return run_worker(command, timeout_s=_TIMEOUT_S, environ=environ)


def _summarize(today: _Side, earlier: _Side | None, against: str) -> list[dict[str, Any]]:
    """Return a line for each number, with what the earlier code had instead."""
    lines = []
    for position, number in enumerate(today.rounds[0]):
        values = [found[position]["value"] for found in today.rounds]
        line = {"kind": "result", **{key: number[key] for key in ("name", "unit", "note")}, "rounds": values}
        line["summary"] = asdict(Summary.from_values(values))
        if earlier is not None:
            line |= _compare(values, number["name"], earlier, against)
        lines.append(line)
    return lines


def _compare(values: Sequence[float], name: str, earlier: _Side, against: str) -> dict[str, Any]:
    named = [[one["value"] for one in found if one.get("name") == name] for found in earlier.rounds]
    if earlier.word or not all(named):
        return {"before": {"word": earlier.word or "none", "reason": earlier.reason or f"{against} does not do this"}}
    before = [value for (value,) in named]
    found: dict[str, Any] = {"before": {"rounds": before, "summary": asdict(Summary.from_values(before))}}
    if all(before):
        ratios = [one / other for one, other in zip(values, before, strict=True)]
        found |= {"beside": against, "ratio": asdict(Summary.from_values(ratios))}
    return found


@contextmanager
def _extract_code(root: Path, revision: str) -> Iterator[tuple[Path | None, str]]:
    """Yield a temporary folder with the code of a commit, and its name; None without a revision.

    Raises:
        UserError: there is no git, no repository or no such commit.
    """
    if not revision:
        yield None, ""
        return
    commit = _run_git(root, revision, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    archive = _run_git(root, revision, "archive", commit.decode().strip(), "src", "jobs")
    with make_scratch(f"trainyard-{SUITE}-") as folder:
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield folder, commit.decode().strip()


def _run_git(root: Path, revision: str, *arguments: str) -> bytes:
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=True).stdout
    except FileNotFoundError:
        reason = "there is no git on this machine"
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.decode(errors="replace").strip() or "it has none of that name").splitlines()[0]
    raise UserError(
        f"--against {revision}: expected a commit of the repository {root}, but {reason}. List its commits: "
        "git log --oneline"
    )
