"""`python -m trainyard` is the command `trainyard`; a run listens to signals before anything slow is imported."""

import sys

from trainyard.train.stop import exit_on_signals


def main() -> int:
    """Run the command that was typed; return its exit code."""
    if sys.argv[1:2] in (["run"], ["resume"]):
        exit_on_signals()
    from trainyard.cli import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
