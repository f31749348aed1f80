"""Measures what grows with runs, data and ranks: the time and memory of each, at sizes that a person chooses.

Each case prepares its input once and is measured in new processes, so that memory is its own. Paths, files and ranks
are real; raw images, scores and weights are random numbers of the size asked for, because none of them is looked at.
"""

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from trainyard.errors import UserError
from trainyard.measure import Summary, find_free_path, format_table, write_results
from trainyard.tools.lifetime import end_with_parent, make_scratch
from trainyard.tools.scale_cases import CASES, Case, Number, Sizes

SUITE = "scale"
_TIMEOUT_S = 1200  # of one case


def parse_sizes(texts: Sequence[str], sizes: Sizes) -> Sizes:
    """Return sizes with those that a person typed, such as lines=100000.

    Raises:
        UserError: there is no such size, or its value is not a number above 0.
    """
    known = [field.name for field in fields(Sizes)]
    for text in texts:
        name, _, value = text.partition("=")
        if name not in known or not value.isdecimal() or not int(value):
            raise UserError(f"--size {text}: expected NAME=NUMBER, with one of {', '.join(known)}: --size lines=100000")
        sizes = replace(sizes, **{name: int(value)})
    return sizes


def run_scale(sizes: Sizes, *, rounds: int, only: Sequence[str], results: Path, header: Mapping[str, Any]) -> Path:
    """Measure every case `rounds` times, print a table, and return the result file.

    Args:
        only: names of cases; empty: all.
        header: the first line of the result file, to which the sizes are added.

    Raises:
        UserError: there is no such case, or one failed.
    """
    cases = [case for case in CASES if not only or case.name in only]
    if unknown := set(only) - {case.name for case in CASES}:
        raise UserError(f"--only {min(unknown)}: no such case. There are: {', '.join(case.name for case in CASES)}.")
    path = find_free_path(results, f"{SUITE}-{header['date'][:10]}")
    lines: list[dict[str, Any]] = [{**header, "sizes": asdict(sizes)}]
    for case in cases:
        with make_scratch(f"trainyard-{SUITE}-") as folder:
            case.prepare(folder, sizes)
            found = [_measure_case(case, folder, sizes) for _ in range(rounds)]
        own = [_summarize([numbers[i] for numbers in found]) for i in range(len(found[0]))]
        print(format_table(own), flush=True)
        lines += own
        write_results(path, lines)
    return path


def _measure_case(case: Case, folder: Path, sizes: Sizes) -> list[Number]:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(case.ranks)]
    meeting = f"{case.name}-{time.monotonic_ns()}"
    ranks = [
        context.Process(target=_measure_on_rank, args=(case, folder, sizes, rank, meeting, pipes[rank][1], os.getpid()))
        for rank in range(case.ranks)
    ]
    for process, (_, sender) in zip(ranks, pipes, strict=True):
        process.start()
        sender.close()  # so that nothing more can come once the process has ended
    numbers: list[Number] = []
    try:
        for receiver, _ in pipes:
            if not receiver.poll(_TIMEOUT_S):
                raise EOFError
            numbers += receiver.recv()
        for process in ranks:
            process.join()
    except EOFError:
        others = ", ".join(f"--only {one.name}" for one in CASES if one != case)
        raise UserError(
            f"bench scale: case '{case.name}' failed, or took over {_TIMEOUT_S} s; what it printed is above. "
            f"Others: {others}"
        ) from None
    finally:
        for process in ranks:
            process.kill()
    return numbers


def _measure_on_rank(case: Case, folder: Path, sizes: Sizes, rank: int, meeting: str, sender: Any, parent: int) -> None:
    end_with_parent(parent)
    if case.ranks > 1:
        from trainyard.train import distributed
        from trainyard.train.world import World

        world = World(rank, rank, case.ranks, case.ranks, rendezvous=meeting)
        distributed.join(world, folder, os.environ)
    sender.send(case.measure(folder, sizes, rank))
    if case.ranks > 1:
        distributed.barrier()
        distributed.leave()


def _summarize(numbers: Sequence[Number]) -> dict[str, Any]:
    one, values = numbers[0], [number.value for number in numbers]
    summary = asdict(Summary.from_values(values))
    return {
        "kind": "result",
        "name": one.name,
        "unit": one.unit,
        "note": one.note,
        "rounds": values,
        "summary": summary,
    }
