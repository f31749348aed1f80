"""Runs what takes too long for every change, and records the result with the hash of the code it ran on.

`long` (make test-long) runs the tests marked `long` one after the other and writes tests/long.json; `coverage` (make
test-coverage) runs the other tests, measures which branches they take, child processes included, and writes
tests/coverage.json; `check` describes both files.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LONG, COVERAGE = ROOT / "tests" / "long.json", ROOT / "tests" / "coverage.json"
TESTED = ("src", "jobs", "containers", "slurm", "tests", "conftest.py", "pyproject.toml", "Dockerfile")


def main(command: str, arguments: list[str]) -> int:
    """Run a command of this file, with further arguments for pytest; return its exit code."""
    if command == "check":
        print(describe_long())
        print(describe_coverage())
        return 0
    results = [f":!{path.relative_to(ROOT)}" for path in (LONG, COVERAGE)]
    if dirty := _git("status", "--porcelain", "--", *TESTED, *results):
        print(f"Commit first, so that the result names what it ran on:\n{dirty}", file=sys.stderr)
        return 2
    run, path = {"long": (run_long, LONG), "coverage": (run_coverage, COVERAGE)}[command]
    started = time.monotonic()
    code, found = run(arguments)
    result = {
        "tree": hash_tested(),
        "commit": _git("rev-parse", "HEAD"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": _read_cpu(), "python": platform.python_version()},
        "exit_code": code,
        "seconds": round(time.monotonic() - started),
        **found,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{path.relative_to(ROOT)} is written: commit it.")
    return code


def run_long(arguments: list[str]) -> tuple[int, dict[str, Any]]:
    """Run the tests marked `long`; return pytest's exit code and the outcome of each test."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        code = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "long", "-v", f"--junitxml={report}", *arguments], cwd=ROOT
        ).returncode
        cases = list(ElementTree.parse(report).iter("testcase"))
    return code, {"tests": {f"{case.get('classname')}::{case.get('name')}": describe_case(case) for case in cases}}


def run_coverage(arguments: list[str]) -> tuple[int, dict[str, Any]]:
    """Run the tests that decide, measured; return pytest's exit code and what they cover, in percent."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "COVERAGE_FILE": f"{folder}/.coverage"}

        def call(*words: str) -> int:
            return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=environ).returncode

        code = call(
            "coverage", "run", "-m", "pytest", "-n", "auto", "--no-loadscope-reorder", "-m", "not long", *arguments
        )
        call("coverage", "combine", "--quiet")
        call("coverage", "report", "--sort=cover", "--skip-covered")
        totals = Path(folder) / "totals.json"
        call("coverage", "json", "--quiet", "-o", str(totals))
        return code, summarize_coverage(json.loads(totals.read_text()))


def summarize_coverage(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the percentage of lines and branches that were taken, in all and for each file that is below 100."""
    files = {name: file["summary"]["percent_covered"] for name, file in measured["files"].items()}
    below = sorted((percent, name) for name, percent in files.items() if percent < 100)
    return {
        "percent": round(measured["totals"]["percent_covered"], 1),
        "files": {name: round(percent, 1) for percent, name in below},
    }


def describe_long() -> str:
    """Return one line: when the long tests ran, how they ended, and whether the code has changed since."""
    if not LONG.is_file():
        return "The long tests have no result. Type: make test-long"
    result = json.loads(LONG.read_text())
    outcomes = [test["outcome"] for test in result["tests"].values()]
    counts = ", ".join(f"{outcomes.count(one)} {one}" for one in dict.fromkeys(outcomes))
    return f"Long tests: {counts}, {result['date']}, {_describe_age(result)}."


def describe_coverage() -> str:
    """Return one line: the branch coverage, when it was measured, and whether the code has changed since."""
    if not COVERAGE.is_file():
        return "The branch coverage was never measured. Type: make test-coverage"
    result = json.loads(COVERAGE.read_text())
    ended = "" if result["exit_code"] == 0 else " (some tests failed)"
    return f"Branch coverage: {result['percent']} %{ended}, {result['date']}, {_describe_age(result)}."


def describe_case(case: ElementTree.Element) -> dict[str, object]:
    """Return outcome and seconds of one test, and what it recorded; a skipped one has its reason."""
    for word in ("failure", "error", "skipped"):
        if (found := case.find(word)) is not None:
            return {"outcome": word, "reason": (found.get("message") or "")[:300]}
    properties = {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
    return {"outcome": "passed", "seconds": round(float(case.get("time", 0))), **properties}


def hash_tested(commit: str = "HEAD") -> str:
    """Return one hash over the tested files of a commit, the results themselves left out."""
    listing = _git("ls-tree", "-r", commit, "--", *TESTED)
    results = tuple(f"\t{path.relative_to(ROOT)}" for path in (LONG, COVERAGE))
    kept = [line for line in listing.splitlines() if not line.endswith(results)]
    hashed = subprocess.run(
        ["git", "hash-object", "--stdin"], cwd=ROOT, input="\n".join(kept), capture_output=True, text=True, check=True
    )
    return hashed.stdout.strip()


def _describe_age(result: Mapping[str, Any]) -> str:
    return "on this code" if result["tree"] == hash_tested() else f"on other code ({result['commit'][:7]})"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _read_cpu() -> str:
    lines = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()]
    models = [line for line in lines if "CPU" in line or "EPYC" in line or "Processor" in line]
    return f"{lines.count(models[0]) if models else 0} x {models[0] if models else platform.machine()}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
