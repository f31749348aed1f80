"""The exceptions a user sees as a line of text instead of a traceback."""


class UserError(ValueError):
    """The user's input, files or machine make the request impossible.

    The message says what is wrong, where, what was expected, what was found, and what to type next. Raise it once,
    where the wrong value enters; the command line prints it and exits with code 2. Any other exception that escapes
    is our bug and keeps its traceback.
    """


class NotFinite(UserError):
    """The gradient is NaN or infinite, and loss scaling cannot help."""


class DiskFull(UserError):
    """A disk or quota is full, or a file system is read-only: the same command works once there is room.

    Raised where commands and attempts end (`files.report_full_disk`), with an exit code and a cause of its own.
    """


class Hung(Exception):
    """A rank makes no progress, or its process is stopped. Recorded, never raised: the rank cannot raise anything."""


class Killed(Exception):
    """A rank was killed by a signal. Recorded by whoever started it, never raised."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class NoDeterministicKernel(UserError):
    """An operator has no deterministic kernel, and the run computes as if every operator had one."""

    def __init__(self, operator: str, message: str) -> None:
        super().__init__(message)
        self.operator = operator
