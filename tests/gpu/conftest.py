"""`make gpu-check`: pytest on this folder with options of its own, which writes each result down at once.

The result is `<results>/gpu-<card>-<date>.jsonl`: a header (machine, card, versions, commit, command), then one flat
line per check: `check`, `status` ("ok", "failed", "not run"), `seconds`, and its figures; a failed one has `error` and
`output`, one that did not run `reason`. benchmarks/README.md says what each check shows.
"""

import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.card import describe_device
from tests.gpu.check import SMALL, Figures, Sizes, run_in_process, run_in_time
from tests.training import FORKSERVER
from trainyard.config.families import find_jobs
from trainyard.errors import UserError
from trainyard.measure import find_free_path, make_header, write_results
from trainyard.text import cut

JOBS = Path(__file__).parents[2] / "jobs"
MINUTES = 10.0
OK, FAILED, NOT_RUN = "ok", "failed", "not run"
STATUS = {"passed": OK, "failed": FAILED, "skipped": NOT_RUN}

_DESCRIBE_S = 120.0  # for the first start of CUDA on a cold machine
_MOST_OUTPUT = 4000  # characters of a failed check's output that the result keeps: the last ones


# The command


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, which only `pytest tests/gpu` knows: elsewhere they have their defaults."""
    group = parser.getgroup("gpu-check")
    group.addoption("--cpu", action="store_true", help="without a GPU: what can run there, at small sizes")
    group.addoption("--results", type=Path, metavar="FOLDER", help="write gpu-CARD-DATE.jsonl there")
    group.addoption("--minutes", type=float, default=MINUTES, help="for everything together: 10")
    group.addoption("--jobs", type=Path, default=JOBS, metavar="FOLDER", help="families to check: jobs")


def pytest_configure(config: pytest.Config) -> None:
    """Find out what the card is, and begin the result file."""
    folder = config.getoption("results", default=None)
    if folder is None or hasattr(config, "workerinput"):
        return
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # without starting CUDA
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # checks exit without cleaning up, or are killed
    if config.getoption("cpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:  # whether loading DALI starts CUDA is its own affair, and a process that did cannot fork others
        FORKSERVER.set_forkserver_preload(["trainyard.node.rank_task", "trainyard.train.trainer"])
    try:
        card = describe_card(cpu=config.getoption("cpu"))
        name = str(card["key"]) or re.sub(r"[^a-z0-9]+", "-", str(card["card"]).lower().removeprefix("nvidia "))
        path = find_free_path(folder, f"gpu-{name.strip('-')}-{datetime.now(UTC):%Y-%m-%d}")
    except UserError as error:
        raise pytest.UsageError(str(error)) from None
    options = {name: config.getoption(name) for name in ("cpu", "minutes", "jobs", "keyword")}
    command = shlex.join(["pytest", *map(str, config.invocation_params.args)])
    config.pluginmanager.register(ResultFile(path, {**make_header("gpu-check", options), **card, "command": command}))


def describe_card(*, cpu: bool) -> Figures:
    """Return what the card is.

    Raises:
        UserError: there is none, and --cpu was not typed; or CUDA does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            work = partial(describe_device, dict(os.environ))
            card = run_in_process(work, limit_s=_DESCRIBE_S, log=Path(folder) / "log")
        except (pytest.fail.Exception, TimeoutError) as error:
            raise UserError(f"The GPU does not start: {str(error).strip()}\nAsk the driver: nvidia-smi") from None
    if card["device"] == "cpu" and not cpu:
        raise UserError(
            f"There is no GPU to check: {card['missing']} What can run without one, at small sizes: "
            "make gpu-check CPU=1"
        )
    return card


class ResultFile:
    """Writes the result file again after each check; a check that was not reached says so."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path, self.header = path, header
        self.lines: dict[str, dict[str, Any]] = {}
        self._write()

    def _write(self) -> None:
        write_results(self.path, [self.header, *self.lines.values()])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            line = {"kind": "result", "check": item.name.removeprefix("test_"), "status": NOT_RUN}
            self.lines[item.nodeid] = {**line, "seconds": 0.0, "reason": "it was not reached"}
        self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        line: dict[str, Any] = {"kind": "result", "check": self.lines[report.nodeid]["check"]}
        line |= {"status": STATUS[report.outcome], "seconds": round(report.duration, 2)}
        if report.outcome == "skipped":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            line["reason"] = reason.removeprefix("Skipped: ")
        elif report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            error = (crash.message if crash else report.longreprtext).removeprefix("Failed: ")
            line |= {"error": cut(error.splitlines()[0], 300), "output": report.longreprtext[-_MOST_OUTPUT:]}
        self.lines[report.nodeid] = line | dict(report.user_properties)
        self._write()

    def count(self, status: str) -> int:
        return sum(line["status"] == status for line in self.lines.values())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail if nothing was found out: what did not run has not passed."""
        if not self.count(OK) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        counts = ", ".join(f"{self.count(status)} {status}" for status in (OK, FAILED, NOT_RUN))
        terminalreporter.write_line(f"{self.header['card']}: {counts}. Figures, errors and reasons: {self.path}")


# What tests get


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests the families and presets by the names of their arguments."""
    jobs = metafunc.config.getoption("jobs", default=JOBS)
    small = metafunc.config.getoption("cpu", default=False) or not torch.cuda.is_available()
    families, presets = find_presets(jobs, small=small)
    values = {"family": families, "preset": presets}
    values["base_preset"] = [f"{name}_smoke" if small else name for name in families]
    for name in values.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, values[name])


def find_presets(jobs: Path, *, small: bool) -> tuple[list[str], list[str]]:
    """Return the families that have a smoke preset, and their presets: small ones first, then each family's base.

    Args:
        small: only smoke and demo presets; otherwise all but the smoke presets.
    """
    found = {preset: path.parent.name for preset, path in find_jobs(jobs).items()}
    families = sorted({family for family in found.values() if f"{family}_smoke" in found})
    presets = [preset for preset in sorted(found) if found[preset] in families]
    chosen = [name for name in presets if (name.endswith(SMALL) if small else not name.endswith("_smoke"))]
    return families, sorted(chosen, key=lambda name: (not name.endswith(SMALL), name not in families))


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """Return the device to check, or skip."""
    if pytestconfig.getoption("cpu", default=False):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine; make gpu-check CPU=1 runs what can run without one")
    return torch.device("cuda", 0)


@pytest.fixture
def needs_card(device: torch.device) -> None:
    """Skip where there is no card."""
    if device.type == "cpu":
        pytest.skip("only a card can answer this")


@pytest.fixture(scope="session")
def deadline(pytestconfig: pytest.Config) -> float:
    """Return when the time of all checks is over, from the first one on."""
    minutes: float = pytestconfig.getoption("minutes", default=MINUTES)
    return time.monotonic() + 60 * minutes


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu-check")


@pytest.fixture
def check(
    device: torch.device,
    deadline: float,
    data: Path,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, object], None],
) -> Callable[..., Figures]:
    """Return a function that runs a check in a process of its own on the device, and records its figures.

    A check may take a fifth of the whole time, and no less than a minute.
    """
    minutes = pytestconfig.getoption("minutes", default=MINUTES)
    longest_s = max(60.0, 60 * minutes / 5)
    jobs = pytestconfig.getoption("jobs", default=JOBS)
    sizes = Sizes(jobs, data, tmp_path, dict(os.environ), small=device.type == "cpu")

    def run(work: Callable[..., Figures], **options: Any) -> Figures:
        figures = run_in_time(
            partial(work, device, sizes, **options),
            left_s=deadline - time.monotonic(),
            longest_s=longest_s,
            over=f"the {minutes:g} minutes were over; --minutes gives more",
            log=tmp_path / "log",
        )
        for name, value in figures.items():
            record_property(name, value)
        return figures

    return run
