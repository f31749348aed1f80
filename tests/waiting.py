"""Waiting in tests: with a limit, and a failure that says for what the test waited."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def wait_until(
    is_true: Callable[[], object],
    what: str,
    *,
    limit_s: float = 60,
    process: "subprocess.Popen[bytes] | subprocess.Popen[str] | None" = None,
) -> None:
    """Wait until something is true.

    Args:
        what: what it waits for, for the failure.
        process: which makes it true; if it ends first, waiting ends at once.
    """
    deadline = time.monotonic() + limit_s
    while not is_true():
        if process is not None and process.poll() is not None and not is_true():
            errors = process.stderr.read() if process.stderr else ""
            raise AssertionError(f"waited for {what}; the process ended with {process.returncode}: {errors!s}")
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        time.sleep(0.02)


@contextmanager
def fail_after(seconds: int) -> Iterator[None]:
    """Raise instead of hanging."""

    def fail(number: int, frame: object) -> None:
        raise AssertionError(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
