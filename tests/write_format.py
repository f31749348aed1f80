"""Writes one of each kind of stored files with today's code: `python -m tests.write_format` writes tests/format_1.

The folder is kept for tests/test_formats.py, which says when to write it again.
"""

import contextlib
import gzip
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.training import FAMILIES, train
from trainyard.config import compose as configs
from trainyard.data.prepare import prepare_data
from trainyard.runs.create import Origin, create_run
from trainyard.runs.sweep_file import FILE, FOLDER, Element, Sweep, encode_sweep

KEPT = Path(__file__).parent / "format_1"
RUN = Path("runs/stripes/done")
PACKED = Path("data/stripes")
_OPTIONS = (
    *("data.synthetic=20", "data.cache=data", "data.decode=cpu", "model.channels=1", "global_batch_size=6"),
    *("max_duration=4st", "eval_every=2st", "checkpoint.every=2st", "checkpoint.keep_last=2", "swa=true"),
)


def write_stored(folder: Path) -> None:
    """Write packed data, a finished run that read it, and a sweep; stored paths are relative to the folder."""
    folder.mkdir()
    with contextlib.chdir(folder), _hide_host():
        config = prepare_data(configs.compose("stripes", list(_OPTIONS), FAMILIES), FAMILIES)
        (packed,) = Path("data").glob("stripes-*/index.h5")
        packed.parent.rename(PACKED)
        config.data.path, config.data.synthetic = str(PACKED), 0
        run = create_run(Path("runs"), config, name=RUN.name, origin=Origin.collect(code=Path("/")))
        assert run == RUN and train(run) == 0
        sweep = Sweep(Path("runs", FOLDER, "rates"), "stripes", {"optimizer.lr": ["0.1"]}, ("swa=true",), [])
        sweep.elements.append(Element(0, ("optimizer.lr=0.1",), RUN))
        sweep.folder.mkdir(parents=True)
        (sweep.folder / FILE).write_text(encode_sweep(sweep, Path("runs")))


@contextlib.contextmanager
def _hide_host() -> Iterator[None]:
    """Write no name of this machine."""
    named = socket.gethostname
    socket.gethostname = lambda: "host"
    try:
        yield
    finally:
        socket.gethostname = named


def _keep(written: Path) -> None:
    """Replace what is kept, without what other tests read."""
    shutil.rmtree(KEPT, ignore_errors=True)
    for path in sorted(path for path in written.rglob("*") if path.is_file()):
        into = KEPT / path.relative_to(written)
        if path.name.startswith(".") or path.suffix in (".png", ".html") or path.name in ("log", "lock.guard"):
            continue
        into.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".h5":
            into.with_name(f"{into.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        else:
            shutil.copyfile(path, into)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        write_stored(Path(place) / "written")
        _keep(Path(place) / "written")
