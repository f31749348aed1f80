"""The processes that write shards share what they load, and end with packing, whatever ends it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.images import encode_image, list_descendants, make_import_environ, make_texture
from trainyard.data.pack import PackError, pack
from trainyard.data.shards import Sample
from trainyard.data.workers import write_shards

RESIZED = {"input": {"kind": "input-raw", "height_px": 32, "width_px": 32, "channels": 1, "fill": 255}}


def list_workers() -> list[int]:
    """Return the processes below this one that packing started."""
    return [one for one in list_descendants(os.getpid()) if "spawn_main" in _read_process(one, "cmdline")]


def _read_process(process: int, name: str) -> str:
    """Return a file about a process (proc(5)); "" if the process has ended."""
    try:
        return Path(f"/proc/{process}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def read_private_mib(process: int) -> float:
    """Return the memory that a process shares with no other (proc(5): smaps_rollup); 0 if it has ended."""
    lines = _read_process(process, "smaps_rollup").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


@pytest.mark.slow
def test_workers_share_what_resizing_loads_and_are_gone_when_packing_returns(tmp_path):
    before, private, have_torch = set(list_workers()), {}, set()

    def look(done: int) -> None:
        for one in set(list_workers()) - before:
            private[one] = read_private_mib(one)
            if "libtorch_cpu" in _read_process(one, "maps"):
                have_torch.add(one)

    data = {"image": encode_image(make_texture(0, 40, 40), "png")}
    samples = [Sample(f"row {i}", partial(_wait_and_load, 0.1, data)) for i in range(16)]
    packed = pack(iter(samples), tmp_path / "out", meta=RESIZED, workers=2, progress=look, shard_mib=8 * 1024 / 2**20)
    assert packed.count == 16 and set(list_workers()) == before
    assert len(private) == 3 and have_torch == set(private), "two workers, and who forked them"
    assert max(private.values()) < 60, "MiB, of which none is torch, because it was shared when last looked at"


def _wait_and_load(pause_s: float, data: dict[str, bytes]) -> dict[str, bytes]:
    time.sleep(pause_s)
    return data


def test_without_tasks_no_process_starts():
    before = list_workers()
    for _ in write_shards(iter(()), workers=2, resizes=True, progress=lambda done: list_workers() != before):
        raise AssertionError


def test_a_worker_that_is_killed_ends_packing_with_what_to_do(tmp_path):
    samples = [Sample("dies", partial(signal.raise_signal, signal.SIGKILL)), Sample("lives", partial(dict, i=1))]
    before = set(list_workers())
    with pytest.raises(PackError, match=r"was killed, most likely because memory ran out.*resume with --workers 1"):
        pack(iter(samples), tmp_path / "out", meta={}, workers=2)
    assert set(list_workers()) == before and not list((tmp_path / "out").iterdir())


class Unloadable:
    """A `load` that a worker cannot load."""

    def __reduce__(self):
        return int, ("this text is no number",)


def test_a_worker_that_ends_by_itself_is_not_called_killed(tmp_path, capfd):
    before = set(list_workers())
    with pytest.raises(PackError, match=r"ended with exit code 1, .* above\. .* run the same command again: finished"):
        pack(iter([Sample("one", Unloadable())]), tmp_path / "out", meta={}, workers=1)
    assert "this text is no number" in capfd.readouterr().err
    with pytest.raises(PackError, match="was ended by SIGSEGV, without a shard"):
        pack(iter([Sample("one", partial(signal.raise_signal, signal.SIGSEGV))]), tmp_path / "out", meta={}, workers=1)
    assert set(list_workers()) == before and not list((tmp_path / "out").iterdir())


def test_a_script_that_starts_itself_again_in_each_process_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from trainyard.data.pack import pack\nfrom trainyard.data.shards import Sample\n"
        "pack(iter([Sample('one', dict)]), __import__('pathlib').Path('out'), meta={}, workers=1)\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=make_import_environ(), capture_output=True)
    assert done.returncode == 1 and b"exit code 1, without a shard" in done.stderr
    assert b"if __name__ == '__main__':" in done.stderr


def test_an_error_in_a_worker_reaches_the_caller_with_its_traceback(tmp_path):
    before = set(list_workers())
    with pytest.raises(MemoryError) as raised:  # not of the sample: any other error is its bad record
        pack(iter([Sample("one", partial(bytearray, 1 << 62))]), tmp_path / "out", meta={}, workers=2)
    assert "in write_shard" in raised.value.__notes__[0]
    assert set(list_workers()) == before


def test_packing_that_is_interrupted_stops_its_workers_at_once_and_leaves_no_part_of_a_file(tmp_path):
    def interrupt(done: int) -> None:
        raise InterruptedError

    def listed() -> Iterator[Sample]:
        yield from (Sample(f"row {i}", partial(_wait_and_load, 60, {})) for i in range(4))

    begin, before = time.monotonic(), set(list_workers())
    with pytest.raises(InterruptedError):
        pack(listed(), tmp_path / "out", meta={}, workers=2, progress=interrupt)
    assert time.monotonic() - begin < 30 and set(list_workers()) == before and not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP])
def test_a_signal_to_the_whole_tree_while_workers_start_does_not_end_them(number, tmp_path):
    out = tmp_path / "out"
    work = (
        f"import signal; signal.signal({int(number)}, lambda *_: None)\n"
        f"from pathlib import Path; from functools import partial; from trainyard.data.pack import *\n"
        f"pack(iter([Sample('one', partial(dict, i=1))]), Path({str(out)!r}), meta={{}}, workers=1)"
    )
    packing = subprocess.Popen([sys.executable, "-c", work], env=make_import_environ(), start_new_session=True)
    while len(list_descendants(packing.pid)) < 2:  # a resource tracker comes first
        assert packing.poll() is None
    os.killpg(packing.pid, number)
    assert packing.wait() == 0 and (out / "index.h5").exists()
