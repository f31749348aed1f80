"""`make test-pythons`: which interpreters it finds, and that the quick tests pass with each."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("uv", reason="uv is not installed, as in container images")

from tests.pythons import ROOT, count_tests, find_pythons, list_installs, list_minors


def test_the_interpreter_of_these_tests_is_found_and_others_by_their_number():
    found = find_pythons(os.environ)
    assert sys.version_info.minor in found and set(found) <= set(list_minors())
    for minor, python in found.items():
        assert python.version[:2] == (3, minor)
        said = subprocess.run([python.path, "--version"], capture_output=True, text=True, check=True).stdout
        assert said.strip() == f"Python {python}"
    assert found[sys.version_info.minor].version <= sys.version_info[:3], "the oldest patch release runs"


def test_the_lock_is_installed_by_its_hashes_and_the_newest_releases_by_pip(tmp_path):
    python = find_pythons(os.environ)[sys.version_info.minor]
    ((*words, lock, _, _),) = list_installs(python, tmp_path / "venv", newest=False)
    assert words[1] == "containers/make_venv.py" and (ROOT / lock).is_file()
    _, install = list_installs(python, tmp_path / "venv", newest=True)
    assert install[-1].startswith(".[test,") and "containers/dev.lock" not in install


def test_tests_are_counted_from_the_report(tmp_path):
    report = tmp_path / "report.xml"
    assert count_tests(report) == "no tests ran"
    report.write_text('<testsuites><testsuite tests="2979" failures="1" errors="1" skipped="7"/></testsuites>')
    assert count_tests(report) == "2,970 passed, 2 failed, 7 skipped"


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("words", [(), ("--newest",)])
def test_the_quick_tests_pass_with_each_python(words, record_property):
    done = subprocess.run([sys.executable, "tests/pythons.py", *words], cwd=ROOT, capture_output=True, text=True)
    table = done.stdout.rpartition("\nThe quick tests, with ")[2]
    record_property("table", table)
    assert done.returncode == 0, done.stdout + done.stderr
