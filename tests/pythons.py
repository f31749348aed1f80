"""Sets up and runs the quick tests with every supported Python of this machine; behind `make test-pythons`.

    .venv/bin/python tests/pythons.py            # what containers/dev.lock pins
    .venv/bin/python tests/pythons.py --newest   # the newest releases that pyproject.toml allows: what pip gives people

Of several patch releases of a version the oldest runs: Debian 12's Python is 3.11.2. An environment takes 6 GiB and
about two minutes, and is deleted after its tests.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "containers"))

from machine import PYTHONS  # noqa: E402

QUICK = "not long and not slow and not cluster"
NEWEST = "test,onnx,completion,dali-cuda13"  # extras of pyproject.toml


class Python(NamedTuple):
    """An interpreter."""

    version: tuple[int, ...]
    path: str

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


class Outcome(NamedTuple):
    """How the quick tests ended with one interpreter."""

    code: int  # of pytest, or of the set-up if that failed
    counts: str
    set_up_s: float
    tests_s: float


def main(arguments: Sequence[str]) -> int:
    """Run the tests with each interpreter and print a table; return 0 if all passed, 2 if a version is missing."""
    parser = argparse.ArgumentParser(prog="tests/pythons.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--newest", action="store_true", help="the newest allowed releases instead of the lock")
    args = parser.parse_args(arguments)
    found = find_pythons(os.environ)
    missing = [f"3.{minor}" for minor in list_minors() if minor not in found]
    rows, failed = [("Python", "set-up", "tests", "result")], bool(missing)
    for minor in sorted(found):
        outcome = run_tests(found[minor], newest=args.newest)
        failed |= outcome.code != 0
        ended = "passed" if outcome.code == 0 else f"FAILED, code {outcome.code}"
        times = (f"{outcome.set_up_s:.0f} s", f"{outcome.tests_s:.0f} s")
        rows.append((str(found[minor]), *times, f"{ended}: {outcome.counts}"))
    print(f"\nThe quick tests, with {'the newest allowed releases' if args.newest else 'containers/dev.lock'}:")
    for row in rows:
        print("  {:9} {:>7} {:>7}  {}".format(*row))
    for version in missing:
        print(f"  {version:9} is not on this machine: not run")
    return 1 if failed else 0


def list_minors() -> list[int]:
    """Return N of each supported Python 3.N."""
    (_, oldest), (_, newest) = PYTHONS
    return list(range(oldest, newest + 1))


def find_pythons(environ: Mapping[str, str]) -> dict[int, Python]:
    """Return the oldest interpreter of each supported 3.N that is on PATH, or that uv or pyenv installed."""
    pyenv = Path(environ.get("PYENV_ROOT") or Path(environ.get("HOME", "/")) / ".pyenv") / "versions"
    places = [*sorted(map(str, pyenv.glob("*/bin"))), environ.get("PATH", os.defpath)]
    uv = [sys.executable, "-m", "uv", "--no-config", "python", "list", "--only-installed", "--output-format=json"]
    environ = {**environ, "PATH": os.pathsep.join(places)}
    listed = subprocess.run(uv, env=environ, capture_output=True, text=True, check=True)
    found: dict[int, Python] = {}
    for entry in json.loads(listed.stdout):
        version = tuple(entry["version_parts"][part] for part in ("major", "minor", "patch"))
        fits = entry["implementation"] == "cpython" and PYTHONS[0] <= version[:2] <= PYTHONS[1]
        if fits and (version[1] not in found or version < found[version[1]].version):
            found[version[1]] = Python(version, entry["path"])
    return found


def run_tests(python: Python, *, newest: bool) -> Outcome:
    """Make an environment for an interpreter, run the quick tests in it, and delete it."""
    print(f"\nPython {python}, {python.path}", flush=True)
    with tempfile.TemporaryDirectory(prefix=".venv-python-", dir=ROOT) as folder:
        started = time.monotonic()
        environment, report = Path(folder) / "venv", Path(folder) / "report.xml"
        for command in list_installs(python, environment, newest=newest):
            code = subprocess.run(command, cwd=ROOT).returncode
            if code:
                return Outcome(code, "the environment could not be made", time.monotonic() - started, 0)
        set_up_s = time.monotonic() - started
        tests = ["-m", "pytest", "-n", "auto", "--no-loadscope-reorder", "-m", QUICK, f"--junitxml={report}"]
        code = subprocess.run([str(environment / "bin" / "python"), *tests], cwd=ROOT).returncode
        return Outcome(code, count_tests(report), set_up_s, time.monotonic() - started - set_up_s)


def list_installs(python: Python, environment: Path, *, newest: bool) -> list[list[str]]:
    """Return the commands that make an environment."""
    if not newest:
        return [[python.path, "containers/make_venv.py", str(environment), "containers/dev.lock", "--editable", "."]]
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    return [[python.path, "-m", "venv", str(environment)], [*pip, "--editable", f".[{NEWEST}]"]]


def count_tests(report: Path) -> str:
    """Return how many tests passed, failed and were skipped, from a report in JUnit's format."""
    if not report.is_file():
        return "no tests ran"
    suite = next(ElementTree.parse(report).iter("testsuite"))
    ran, failed, skipped = int(suite.attrib["tests"]), int(suite.attrib["failures"]), int(suite.attrib["skipped"])
    failed += int(suite.attrib["errors"])
    return f"{ran - failed - skipped:,} passed, {failed} failed, {skipped} skipped"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
