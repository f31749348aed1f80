"""Says how many CPU cores decoding needs to keep a GPU busy, from what `trainyard gpu-check` measured on that card."""

import json
import math
from pathlib import Path
from typing import Any

_QUOTABLE_SPREAD = 0.1  # as everywhere: benchmarks/README.md


def describe_decoding(job: str, *, card: str, cores: int, results: Path) -> str:
    """Compare the cores of a rank with what decoding needs there; says so if that was not measured.

    Args:
        card: key of hardware.GPUS, or "cpu".
        results: folder of gpu-check's files, gpu-<card>-<date>.jsonl; numbers of another card are never used.
    """
    found = _find_measurement(job, card=card, results=results)
    if found is None:
        return f"{cores} cores per rank; how many {job} needs on {card} was not measured (trainyard gpu-check does)"
    line, file = found
    cores_needed = _count_cores(line)
    verdict = "enough" if cores_needed <= cores else "decoding limits the speed"
    return (
        f"{cores} cores per rank, {cores_needed} needed: {verdict}  ({file.name}: {line['compute_samples_per_s']:g} "
        f"samples/s of steps, {line['loader_samples_per_s']:g} of decoding on {line['threads']} cores)"
    )


def find_cores_needed(job: str, *, card: str, results: Path) -> tuple[int, str] | None:
    """Return how many cores a rank needs to decode as fast as it computes there, and the file that says so, if any."""
    found = _find_measurement(job, card=card, results=results)
    return None if found is None else (_count_cores(found[0]), found[1].name)


def _count_cores(line: dict[str, Any]) -> int:
    cores: float = line["threads"] * line["compute_samples_per_s"] / line["loader_samples_per_s"]
    return math.ceil(cores)


def _find_measurement(job: str, *, card: str, results: Path) -> tuple[dict[str, Any], Path] | None:
    """Return the newest quotable line that compares loader and steps of this job on this card, and its file."""
    for file in sorted(results.glob(f"gpu-{card}-[0-9]*.jsonl"), reverse=True):
        for text in file.read_text().splitlines():
            line: dict[str, Any] = json.loads(text)
            compares = line.get("step") == "overlap" and line.get("status") == "ok" and line.get("preset") == job
            if compares and max(line["loader_spread"], line["compute_spread"]) <= _QUOTABLE_SPREAD:
                return line, file
    return None
