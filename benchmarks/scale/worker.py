"""Lists, prepares or measures a case and prints JSON lines; `trainyard bench scale` starts this for each measurement.

The environment says whose code is measured: PYTHONPATH names its `src` first, then this checkout.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import trainyard
from benchmarks.scale import data, reading, runs, training, workers
from benchmarks.scale.contract import Absent, Sizes

CASES = {case.name: case for module in (runs, training, data, workers, reading) for case in module.CASES}


def main() -> None:
    """Do what the command line says: list, or (prepare, measure) CASE FOLDER SIZES CODE."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps what libraries print out of our lines
    command, *arguments = sys.argv[1:]
    lines = [describe()] if command == "list" else work(command, *arguments)
    output.writelines(json.dumps(line) + "\n" for line in lines)


def describe() -> dict[str, Any]:
    """Return the names of all cases, and the sizes to choose from."""
    usual = Sizes()
    sizes = {"usual": usual, "quick": usual.make_quick(), "comparable": usual.make_comparable()}
    return {"cases": list(CASES), "sizes": {name: asdict(one) for name, one in sizes.items()}}


def work(command: str, name: str, folder: str, sizes: str, code: str) -> list[dict[str, Any]]:
    """Prepare or measure a case; return what was found, or that the code has nothing of the kind."""
    assert trainyard.__file__ is not None and Path(trainyard.__file__).is_relative_to(code), trainyard.__file__
    case, chosen = CASES[name], Sizes(**json.loads(sizes))
    if command == "prepare":
        case.prepare(Path(folder), chosen)
        return []
    try:
        return [asdict(number) for number in case.measure(Path(folder), chosen)]
    except Absent as absent:
        return [{"absent": str(absent)}]


if __name__ == "__main__":
    main()
