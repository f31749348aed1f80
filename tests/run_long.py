"""Runs the tests marked `long` one after the other and records the result: `make test-long`.

Writes tests/long.json: a hash over the tested files, when and where they ran, and the outcome of each test.
"""

import json
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "tests" / "long.json"
TESTED = ("src", "jobs", "containers", "slurm", "tests", "conftest.py", "pyproject.toml", "Dockerfile")


def main() -> int:
    """Run the tests, write the result and return pytest's exit code; with --check, only describe the result."""
    if sys.argv[1:] == ["--check"]:
        print(describe_result())
        return 0
    if dirty := _git("status", "--porcelain", "--", *TESTED, f":!{RESULT.relative_to(ROOT)}"):
        print(f"Commit first, so that the result names what it ran on:\n{dirty}", file=sys.stderr)
        return 2
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        code = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "long", "-v", f"--junitxml={report}", *sys.argv[1:]], cwd=ROOT
        ).returncode
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes = {f"{case.get('classname')}::{case.get('name')}": describe_case(case) for case in cases}
    result = {
        "tree": hash_tested(),
        "commit": _git("rev-parse", "HEAD"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": _read_cpu(), "python": platform.python_version()},
        "exit_code": code,
        "seconds": round(time.monotonic() - started),
        "tests": outcomes,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{RESULT.relative_to(ROOT)} is written: commit it.")
    return code


def describe_result() -> str:
    """Return one line: when the long tests ran, how they ended, and whether the code has changed since."""
    if not RESULT.is_file():
        return "The long tests have no result. Type: make test-long"
    result = json.loads(RESULT.read_text())
    outcomes = [test["outcome"] for test in result["tests"].values()]
    counts = ", ".join(f"{outcomes.count(one)} {one}" for one in dict.fromkeys(outcomes))
    age = "on this code" if result["tree"] == hash_tested() else f"on other code ({result['commit'][:7]})"
    return f"Long tests: {counts}, {result['date']}, {age}."


def describe_case(case: ElementTree.Element) -> dict[str, object]:
    """Return outcome and seconds of one test; a skipped one has its reason."""
    for word in ("failure", "error", "skipped"):
        if (found := case.find(word)) is not None:
            return {"outcome": word, "reason": (found.get("message") or "")[:300]}
    return {"outcome": "passed", "seconds": round(float(case.get("time", 0)))}


def hash_tested(commit: str = "HEAD") -> str:
    """Return one hash over the tested files of a commit, the result itself left out."""
    listing = _git("ls-tree", "-r", commit, "--", *TESTED)
    kept = [line for line in listing.splitlines() if not line.endswith(f"\t{RESULT.relative_to(ROOT)}")]
    hashed = subprocess.run(
        ["git", "hash-object", "--stdin"], cwd=ROOT, input="\n".join(kept), capture_output=True, text=True, check=True
    )
    return hashed.stdout.strip()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _read_cpu() -> str:
    lines = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()]
    models = [line for line in lines if "CPU" in line or "EPYC" in line or "Processor" in line]
    return f"{lines.count(models[0]) if models else 0} x {models[0] if models else platform.machine()}"


if __name__ == "__main__":
    sys.exit(main())
