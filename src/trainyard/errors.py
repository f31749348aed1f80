"""The exceptions a user sees as a line of text instead of a traceback, and tracebacks of a family's code."""

import re
import resource
import traceback
from pathlib import Path

INTERFACE = Path(__file__).with_name("templates") / "INTERFACE.md"
"""The page about the interface of a family."""

SEE_INTERFACE = f" {INTERFACE} describes a family's interface."


class UserError(ValueError):
    """The user's input, files or machine make the request impossible.

    The message has the error, the place, the expected and the found value, and the next command. Raise it once,
    where the wrong value enters; the command line prints it and exits with code 2. Any other exception that escapes
    is our bug and keeps its traceback.
    """


class ContractError(UserError):
    """A family's code returns or does something else than training needs; the message ends with the page about that."""

    def __str__(self) -> str:  # not in __init__, which another process calls with the message when it unpickles this
        return f"{super().__str__().rstrip('.')}.{SEE_INTERFACE}"


class FormatError(UserError):
    """A stored file states another format number than this version of Trainyard reads."""


class NotFinite(UserError):
    """The gradient is NaN or infinite, and loss scaling cannot help."""


class DiskFull(UserError):
    """A disk or quota is full, or a file system is read-only: the same command works once there is room.

    Raised where commands and attempts end (`files.report_full_disk`), with a separate exit code and cause.
    """


class DiskError(UserError):
    """A disk, or the network to it, failed: no fault of the code. The same command works once that is repaired.

    Raised, with a separate exit code and cause, where `DiskFull` is.
    """


class Hung(Exception):
    """A rank makes no progress, or its process is stopped. Recorded, never raised: the rank cannot raise anything."""


class Killed(Exception):
    """A rank was killed by a signal. Recorded by whoever started it, never raised."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class PeerFailed(Exception):
    """Another rank has failed, so that this one cannot go on. Recorded, never raised: this one may be in a kernel."""


class Vanished(Exception):
    """A rank exited and recorded no error. Recorded by whoever started it, never raised."""


class NoDeterministicKernel(UserError):
    """An operator has no deterministic kernel, and the run computes as if every operator had one."""

    def __init__(self, operator: str, message: str) -> None:
        super().__init__(message)
        self.operator = operator


class OutOfDeviceMemory(UserError):
    """A GPU has no memory left for a rank's step."""

    def __init__(self, message: str, *, next_micro_batch_size: int | None = None, **details: object) -> None:
        """Make the error.

        Args:
            next_micro_batch_size: with which the run starts again; None: it cannot continue by itself.
            details: for the run's record, as JSON values.
        """
        super().__init__(message)
        self.next_micro_batch_size = next_micro_batch_size
        self.details = details


def list_family_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return where an exception passed through a family's code: code that is neither Trainyard's nor installed."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]


def find_place(error: BaseException) -> str:
    """Return file and line of the last frame of an exception in a family's code, or else of the last one at all."""
    place = (list_family_frames(error) or traceback.extract_tb(error.__traceback__))[-1]
    return f"{place.filename}:{place.lineno}"


def format_failure(error: BaseException) -> str:
    """Return the frames of a family's code and where the exception was raised; of any other, the whole traceback.

    Of a limit on memory that the shell set, a sentence.
    """
    if limit := explain_address_limit(error):
        return limit
    frames, last = list_family_frames(error), traceback.extract_tb(error.__traceback__)[-1:]
    if not frames:
        return "".join(traceback.format_exception(error)).rstrip()
    frames += [frame for frame in last if _OWN.search(frame.filename)]
    final = traceback.TracebackException.from_exception(error).format_exception_only()
    return "".join(["In the family's code:\n", *traceback.format_list(frames), *final]).rstrip()


def explain_address_limit(error: BaseException) -> str:
    """Explain that a limit on address space (`ulimit -v`) caused the lack of memory; "" if it did not."""
    limit, text = resource.getrlimit(resource.RLIMIT_AS)[0], f"{type(error).__name__}: {error}"
    if limit == resource.RLIM_INFINITY or not _NO_ADDRESS.search(text):
        return ""
    return (
        f"{text}: this shell allows a process {limit / 2**30:.1f} GiB of address space (ulimit -v), and training "
        "reserves more than it uses. Raise it: ulimit -v unlimited; or train where there is none: trainyard submit JOB"
    )


_NO_ADDRESS = re.compile(r"^MemoryError|an(no|')t allocate memory|failed to map segment|can't start new thread")


def is_library(path: str) -> bool:
    """Return whether a file in a traceback is of Python, of an installed package, or of Trainyard itself."""
    return bool(_INSTALLED.search(path) or _OWN.search(path))


_INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python3|^<")
_OWN = re.compile(r"/trainyard/(\w+\.py$|(cli|cluster|config|data|launch|node|plan|report|runs|tools|train)/)")


ALLOCATION_ERRORS = (RuntimeError, MemoryError)
"""Errors of torch and libraries when a GPU's memory is used up: C++'s `std::bad_alloc` arrives as a MemoryError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a GPU's memory is used up: torch's own does, and that of a library."""
    return isinstance(error, ALLOCATION_ERRORS) and bool(_OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}"))


_OUT_OF_MEMORY = re.compile(
    r"^OutOfMemoryError: |out of memory|(CUDNN|CUBLAS)_STATUS_ALLOC_FAILED"
    r"|CUDA allocation failed|Can't allocate \d+ bytes on device|nvImageCodec failure: '#1?5'"  # DALI's
)
"""Of nvImageCodec: NVIMGCODEC_STATUS_ALLOCATOR_FAILURE is 5, and 15 that of an extension."""


class ConfigError(UserError):
    """A preset, an override or a frozen configuration that the job does not accept. One line."""
