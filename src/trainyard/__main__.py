"""`python -m trainyard` is the command `trainyard`; a run listens to signals before anything slow is imported."""

from __future__ import annotations  # older Pythons read this file too, to say that they are too old

import sys

PYTHONS = ((3, 11), (3, 13))  # the oldest and the newest that the tests run on: make test-pythons


def main() -> int:
    """Run the command that was typed; return its exit code."""
    lack = check_python(sys.version_info[:2])
    if lack:
        print(lack, file=sys.stderr)
        if sys.version_info[:2] < PYTHONS[0]:
            return 2
    from trainyard.train.stop import exit_on_signals

    if sys.argv[1:2] in (["run"], ["resume"]):
        exit_on_signals()
    from trainyard.cli import main as run_command

    return run_command()


def check_python(version: tuple[int, int]) -> str:
    """Return a warning or an error about this version of Python, "" if it is a supported one."""
    (oldest, newest), given = (".".join(map(str, pair)) for pair in PYTHONS), ".".join(map(str, version))
    if version < PYTHONS[0]:
        return f"trainyard needs Python {oldest} to {newest}, and this is {given} ({sys.executable})."
    if version > PYTHONS[1]:
        return f"trainyard was tested on Python {oldest} to {newest}, not on {given}: install one of those if it fails."
    return ""


if __name__ == "__main__":
    sys.exit(main())
