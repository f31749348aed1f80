"""`python -m benchmarks.packing_pace`: what drawing and packing a sample of each family costs a core.

Two amounts are drawn and packed by one worker; the rate is that of what the second has more, so starting costs nothing.
"""

import resource
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainyard.config.compose import compose
from trainyard.config.families import find_own_families, load_family
from trainyard.data.prepare import pack_raw
from trainyard.measure import make_header, write_new

JOBS = find_own_families()
COUNTS = {
    "antispoof_demo": (300, 2100),
    "fingerprint_demo": (100, 500),
    "pricing_demo": (1000, 5000),
    "tinydet_demo": (100, 600),
    "twins_demo": (1000, 5000),
}


def measure_preset(name: str) -> dict[str, Any]:
    """Return the core-seconds of drawing, the seconds of packing with one worker, and the raw bytes of both amounts."""
    found: dict[str, list[float]] = {"draw_s": [], "pack_s": [], "raw_kb": []}
    for count in COUNTS[name]:
        with TemporaryDirectory() as folder:
            raw, out = Path(folder, "raw"), Path(folder, "packed")
            config = compose(name, [f"data.synthetic={count}", f"data.cache={folder}"], JOBS)
            synthesize = load_family(JOBS, config.family, "pack").synthesize
            found["draw_s"].append(_time(lambda: synthesize(raw, count=count, seed=0), _read_cpu_s))  # noqa: B023
            found["pack_s"].append(_time(lambda: pack_raw(config, raw, out, JOBS, workers=1), time.perf_counter))  # noqa: B023
            found["raw_kb"].append(sum(path.stat().st_size for path in raw.rglob("*") if path.is_file()) / 1e3)
    more = COUNTS[name][1] - COUNTS[name][0]
    rates = {what: (values[1] - values[0]) / more for what, values in found.items()}
    return {"kind": "result", "name": name, "per_sample": rates, "counts": COUNTS[name], "measured": found}


def _time(work: Callable[[], object], clock: Callable[[], float]) -> float:
    begin = clock()
    work()
    return clock() - begin


def _read_cpu_s() -> float:
    """Return the CPU time of this process and of the children that have ended, s."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    lines = [make_header("packing-pace", {"workers": 1}), *map(measure_preset, COUNTS)]
    for line in lines[1:]:
        print(line["name"], {what: round(value, 5) for what, value in line["per_sample"].items()})
    print(write_new(Path("benchmarks"), "packing-pace", lines))
