"""`make gpu-check`: pytest on this folder with options of its own, which writes each result down at once.

The result is `<results>/gpu-<card>-<date>.jsonl`: a header (machine, card, versions, commit, command), then one flat
line per check: `check`, `status`, `seconds`, and its figures; a failed one has `error` and `output`, others that are
not ok a `reason`. The header's `trust` says in nine lines what the card can be trusted with. The exit code is 0 if all
that this machine can answer is ok, 1 if a check failed, and 6 if none failed but one did not run. benchmarks/README.md
says what each check shows.

With `--quick` the faults of tests/gpu/faults.py are planted instead, and what finds each is printed as a table.
"""

import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.card import describe_device
from tests.gpu.check import IMPOSSIBLE, Figures, Running, Sizes, cannot_answer, run_in_process, run_in_time, try_work
from tests.gpu.faults import NEEDS_CARD, NOT_FOUND
from tests.gpu.preset_steps import prepare_preset
from tests.gpu.trust import FAILED, NOT_RUN, OK, describe_trust
from tests.training import FORKSERVER
from trainyard.config.families import find_jobs
from trainyard.errors import UserError
from trainyard.hardware import count_cores
from trainyard.measure import find_free_path, make_header, write_results
from trainyard.text import cut

JOBS = Path(__file__).parents[2] / "jobs"
MINUTES, CPU_MINUTES = 8.0, 30.0
NOT_ALL_RAN = 6
"""Exit code, after those of pytest: nothing failed, but a check that this machine can answer did not run."""

STATUS = {"passed": OK, "failed": FAILED, "skipped": NOT_RUN}

_DESCRIBE_S = 120.0  # for the first start of CUDA on a cold machine
_CORES = 3  # of each of the checks that run at once: two ranks, and what loads and compiles
_MOST_OUTPUT = 4000  # characters of a failed check's output that the result keeps: the last ones


# The command


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, which only `pytest tests/gpu` knows: elsewhere they have their defaults."""
    group = parser.getgroup("gpu-check")
    group.addoption("--cpu", action="store_true", help="without a GPU: what can run there, at small sizes")
    group.addoption("--results", type=Path, metavar="FOLDER", help="write gpu-CARD-DATE.jsonl there")
    group.addoption("--quick", action="store_true", help="plant a fault for each check instead, on the CPU")
    group.addoption("--minutes", type=float, help="for everything together: 8, with --cpu 30")
    group.addoption("--jobs", type=Path, default=JOBS, metavar="FOLDER", help="families to check: jobs")


def pytest_configure(config: pytest.Config) -> None:
    """Find out what the card is, and begin the result file."""
    if config.getoption("quick", default=False):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        config.pluginmanager.register(FaultTable())
        return
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
    options = {name: config.getoption(name) for name in ("cpu", "minutes", "keyword")}
    options["jobs"] = "jobs" if (jobs := config.getoption("jobs")) == JOBS else jobs
    command = shlex.join(["pytest", *map(str, config.invocation_params.args)])
    config.pluginmanager.register(ResultFile(path, {**make_header("gpu-check", options), **card, "command": command}))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect either the checks or, with --quick, their faults."""
    ignored = "test_gpu.py" if config.getoption("quick", default=False) else "test_faults.py"
    return True if collection_path.name == ignored else None


def read_minutes(config: pytest.Config) -> float:
    """Return the minutes for all checks together."""
    stated: float | None = config.getoption("minutes", default=None)
    return stated or (CPU_MINUTES if config.getoption("cpu", default=False) else MINUTES)


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
        write_results(self.path, [{**self.header, "trust": self.describe()}, *self.lines.values()])

    def describe(self) -> list[str]:
        return describe_trust(list(self.lines.values()), sm=self.header.get("sm"))

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
            if line["reason"].startswith(IMPOSSIBLE):
                line |= {"status": IMPOSSIBLE, "reason": line["reason"].removeprefix(f"{IMPOSSIBLE}: ")}
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
        """Fail if a check did not run, or nothing was found out: what did not run has not passed."""
        if session.exitstatus != pytest.ExitCode.OK:
            return
        if self.count(NOT_RUN):
            session.exitstatus = NOT_ALL_RAN
        elif not self.count(OK):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self.describe():
            terminalreporter.write_line(line)
        counts = ", ".join(f"{self.count(status)} {status}" for status in (OK, FAILED, NOT_RUN, IMPOSSIBLE))
        terminalreporter.write_line(f"{self.header['card']}: {counts}. Figures, errors and reasons: {self.path}")
        missed = [line for line in self.lines.values() if line["status"] == NOT_RUN]
        if missed:
            reasons = "; ".join(sorted({line["reason"] for line in missed}))
            terminalreporter.write_line(f"{len(missed)} checks that can be answered here did not run: {reasons}")


class FaultTable:
    """Prints which fault was found by which check, and how."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = dict(report.user_properties)
        if report.when == "call" and row:
            self.rows.append((row["check"], row["fault"], row["found"]))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for row in [("check", "fault", "found"), *self.rows]:
            terminalreporter.write_line(" | ".join(cut(cell, 100) for cell in row))
        needs_card = sum(found.startswith(NEEDS_CARD) for *_, found in self.rows)
        lost = sum(found.startswith(NOT_FOUND) for *_, found in self.rows)
        found = len(self.rows) - needs_card - lost
        terminalreporter.write_line(f"{found} found, {lost} not found, {needs_card} need a card, which is no success")


# What tests get


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests the families and presets by the names of their arguments."""
    small = metafunc.config.getoption("cpu", default=False) or not torch.cuda.is_available()
    families = find_families(metafunc.config.getoption("jobs", default=JOBS))
    values = {"family": families, "base_preset": [f"{name}_smoke" if small else name for name in families]}
    for name in values.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, values[name])


def find_families(jobs: Path) -> list[str]:
    """Return the families that have a smoke preset."""
    presets = find_jobs(jobs)
    return sorted({path.parent.name for path in presets.values() if f"{path.parent.name}_smoke" in presets})


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
        cannot_answer("it needs a card")


@pytest.fixture(scope="session")
def deadline(pytestconfig: pytest.Config) -> float:
    """Return when the time of all checks is over, from the first one on."""
    return time.monotonic() + 60 * read_minutes(pytestconfig)


@pytest.fixture(scope="session")
def data(device: torch.device, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the folder of synthetic data; next to a card, all of it is drawn from now on, for the checks to come."""
    folder = tmp_path_factory.mktemp("gpu-check")
    if device.type == "cpu":
        yield folder
        return
    sizes = Sizes(pytestconfig.getoption("jobs"), folder, folder, dict(os.environ))
    drawing = Running(partial(draw_data, sizes), folder / "drawing.log")
    yield folder
    drawing.kill()


def draw_data(sizes: Sizes) -> Figures:
    """Draw and pack the data of each family's smoke and base presets; a check that needs them says what fails."""
    families = find_families(sizes.jobs)
    for preset in [*(f"{family}_smoke" for family in families), *families]:
        try_work(lambda preset=preset: {"path": prepare_preset(preset, [], sizes).data.path})  # type: ignore[misc]
    return {}


@pytest.fixture(scope="session")
def running() -> Iterator[dict[tuple[str, str, str], Running]]:
    """Return the checks that were started and that no test waits for yet: by test, function and family."""
    started: dict[tuple[str, str, str], Running] = {}
    yield started
    for one in started.values():
        one.kill()


@pytest.fixture
def check(
    device: torch.device,
    deadline: float,
    data: Path,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    request: pytest.FixtureRequest,
    running: dict[tuple[str, str, str], Running],
    record_property: Callable[[str, object], None],
) -> Callable[..., Figures]:
    """Return a function that runs a check in a process of its own on the device, and records its figures.

    A check of a family starts those of the next families, too, as far as there are cores. A check may take a quarter of
    the whole time, and no less than two minutes: some compile in several processes one after the other.
    """
    minutes = read_minutes(pytestconfig)
    longest_s = max(120.0, 60 * minutes / 4)
    jobs = pytestconfig.getoption("jobs", default=JOBS)
    sizes = Sizes(jobs, data, tmp_path, dict(os.environ), small=device.type == "cpu")
    test = request.node.originalname

    def start(work: Callable[..., Figures], options: Mapping[str, Any]) -> Running:
        if "family" not in options:
            return Running(partial(work, device, sizes, **options), tmp_path / "log")
        key = (test, work.__name__, options["family"])
        if key not in running:
            items = [item for item in request.session.items if getattr(item, "originalname", "") == test]
            families = [item.callspec.params["family"] for item in items]  # type: ignore[attr-defined]
            first, count = families.index(options["family"]), max(1, count_cores() // _CORES)
            for family in families[first : first + count]:
                own = replace(sizes, scratch=data / f"{test}-{work.__name__}-{family}")
                own.scratch.mkdir()
                planned = partial(work, device, own, **{**options, "family": family})
                running[test, work.__name__, family] = Running(planned, own.scratch / "log")
        return running.pop(key)

    def run(work: Callable[..., Figures], **options: Any) -> Figures:
        figures = run_in_time(
            partial(start, work, options),
            left_s=deadline - time.monotonic(),
            longest_s=longest_s,
            over=f"the {minutes:g} minutes were over; --minutes gives more",
        )
        for name, value in figures.items():
            record_property(name, value)
        return figures

    return run
