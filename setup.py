"""Puts the families into the wheel, as `trainyard/jobs`: in a checkout they are at the top, for people to read."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithFamilies(build_py):
    """Also copies `jobs/` without its tests; an editable installation finds it in the checkout."""

    def run(self) -> None:
        """Build, then copy."""
        super().run()
        if not self.editable_mode:
            into = Path(self.build_lib) / "trainyard" / "jobs"
            shutil.rmtree(into, ignore_errors=True)
            unwanted = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "test_*.py", "conftest.py")
            shutil.copytree(Path(__file__).parent / "jobs", into, ignore=unwanted)


setup(cmdclass={"build_py": BuildWithFamilies})
