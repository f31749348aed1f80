"""What grows with the length of a run, the number of runs, of samples and of ranks keeps within bounds."""

import json
import os
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.test_data_parallel import run_on_ranks
from tests.training import FAMILIES, new_run, train
from trainyard.config import compose as configs
from trainyard.config.settings import AugmentSettings, ImageSettings, TrainConfig
from trainyard.data.loader import Loader
from trainyard.data.prepare import pack_raw
from trainyard.data.raw import list_files, list_once, recall_listing, remember_listing
from trainyard.data.shards import ShardSet
from trainyard.errors import UserError
from trainyard.report.run_story import RunStory
from trainyard.runs.events import read_events, read_last_lines, read_lines, read_thinned_metrics
from trainyard.runs.folder import CONFIG
from trainyard.scoring import (
    ErrorRates,
    Pairs,
    bootstrap,
    compute_error_rates,
    compute_operating_points,
    summarize_draws,
)
from trainyard.train import checkpoint, distributed
from trainyard.train.evaluate import gather_rows
from trainyard.train.module import Batch, TrainModule
from trainyard.train.recorder import Recorder
from trainyard.train.run_state import load_newest_checkpoint

# Metrics of long runs


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with 10,000 training lines and 4 evaluations."""
    run = tmp_path_factory.mktemp("runs") / "stripes" / "long"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("job: stripes\n")
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 10_001):
            line = {"step": step, "loss": 1 / step, "samples_per_s": 50.0, "compute_ms": 30.0, "idle_ms": 10.0}
            file.write(json.dumps({"kind": "train", **line, "elapsed_s": 0.05 * step}) + "\n")
            if step % 2_500 == 0:
                line = {"step": step, "split": "val", "eer": 1 / step, "seconds": 1.0, "elapsed_s": 0.05 * step}
                file.write(json.dumps({"kind": "eval", **line}) + "\n")
    (run / "events.jsonl").write_text("")
    return run


def measure_memory_mib(work: Callable[[], object]) -> float:
    """Return the most memory that Python and NumPy had taken at any time of some work."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def test_a_resume_keeps_no_line_of_a_long_run(long_run):
    size = (long_run / "metrics.jsonl").stat().st_size

    def resume() -> None:
        Recorder.rewind(long_run, size, step=10_000)
        with closing(Recorder(long_run, trackers=(), config={}, resume_at=10_000)) as recorder:
            recorder.log("event", 10_000, {"event": "resume"})

    assert measure_memory_mib(resume) < 1, "the file has a MiB, its lines as objects ten"
    (event,) = read_events(long_run)
    assert event["elapsed_s"] >= 500, "the time that the last line says"


def test_a_report_keeps_evenly_spaced_lines_of_a_long_run_and_says_so(long_run):
    assert measure_memory_mib(lambda: read_thinned_metrics(long_run, most=2_000)) < 6
    found = RunStory.read(long_run)
    steps = [line["step"] for line in found.train]
    assert len(steps) <= 2_000 and steps[0] == 1 and steps[-1] == found.step == 10_000
    assert set(np.diff(steps[:-1])) == {found.every} and found.every == 8
    assert [line["step"] for line in found.evals] == [2_500, 5_000, 7_500, 10_000]
    assert 500 <= found.elapsed_s < 600
    (said,) = (text for text in found.list_missing() if "8th training line" in text)
    assert said.startswith("Curves and rates")


def test_lines_are_thinned_only_where_there_are_more_than_asked_for(long_run):
    for most, every, count in ((10_000, 1, 10_000), (9_999, 2, 5_001), (2, 8_192, 3)):
        lines, found = read_thinned_metrics(long_run, most=most)
        train = [line for line in lines if line["kind"] == "train"]
        assert (found, len(train)) == (every, count), most
        assert lines == sorted(lines, key=lambda line: line["step"]) and len(lines) == count + 4


def test_the_last_lines_are_those_of_the_whole_file_and_a_damaged_one_has_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"kind": "train", "step": step}) + "\n" for step in range(5)) + '{"kind')
    for most in (1, 3, 5, 9):
        assert read_last_lines(path, most) == read_lines(path)[-most:]
    assert read_last_lines(tmp_path / "absent", 1) == []
    path.write_text('{"kind": "train", "step": 1}\n{"kind": 3}\n{"kind": "train", "step": 3}\n')
    assert [line["step"] for line in read_last_lines(path, 1)] == [3]
    for read in (read_lines, lambda path: read_last_lines(path, 2)):
        with pytest.raises(UserError, match=r"metrics.jsonl:2: expected a JSON object"):
            read(path)


# Evaluation and resume on several ranks


class Wide(TrainModule):
    """Returns 2 MiB for each sample."""

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        row = batch["sample_id"].float()[:, None].expand(-1, 2**19)
        return {"sample_id": batch["sample_id"], "row": row.contiguous()}


@pytest.mark.slow
def test_ranks_send_rows_to_rank_0_alone_and_rank_0_alone_hashes_a_checkpoint(packed_images, tmp_path):
    state = {"model": {"w": torch.arange(2**21, dtype=torch.float32)}}
    checkpoint.save(tmp_path / "checkpoints", state, step=1, meta={})
    run_on_ranks(_measure_on_ranks, 2, tmp_path, packed_images)


def _measure_on_ranks(rank: int, world_size: int, folder: Path, packed: Path) -> None:
    config = TrainConfig(image=ImageSettings(height_px=24, width_px=32), augment=AugmentSettings())
    device, ids = torch.device("cpu"), np.arange(24)[::-1].copy()
    loader = Loader(config, ShardSet(packed), device=device, decode="cpu", rank=rank, world_size=world_size)
    gathered: list[Any] = []

    def gather() -> None:
        gathered.append(gather_rows(Wide(), loader, ids, batch_size=1, autocast=nullcontext))

    gather()  # starts threads, and takes memory that stays
    gathered.clear()
    memory = measure_peak_mib(gather)
    if rank == 0:
        (rows, size) = gathered[0]
        assert size == 1 and rows["sample_id"].tolist() == list(range(24))
        assert np.array_equal(rows["row"][:, ::9999], np.broadcast_to(np.arange(24)[:, None], (24, 53)))
    else:
        assert gathered == [None]
    assert memory < 48 * 1.3 if rank == 0 else memory < 24 * 1.3, f"{memory} MiB of 48"

    distributed.barrier()
    before = count_read_bytes()
    found = load_newest_checkpoint(folder, is_main=rank == 0)
    read = (count_read_bytes() - before) / (folder / "checkpoints" / "step-000000001.ckpt").stat().st_size
    assert found is not None and torch.equal(found[1]["model"]["w"], torch.arange(2**21, dtype=torch.float32))
    assert round(read, 1) == (2 if rank == 0 else 1), "rank 0 hashes it before anyone loads it"


def measure_peak_mib(work: Callable[[], object]) -> float:
    """Return the most memory that this process had during some work beyond what it had before."""
    Path("/proc/self/clear_refs").write_text("5")  # from here on, VmHWM is the peak: proc(5)
    before = read_status_mib("VmRSS")
    work()
    return read_status_mib("VmHWM") - before


def read_status_mib(name: str) -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(f"{name}:"))


def count_read_bytes() -> int:
    """Return how many bytes this process has read from files, cached or not."""
    return int(Path("/proc/self/io").read_text().split()[1])


# Saving


def test_pruning_trusts_what_this_process_has_just_written(tmp_path):
    for step in (1, 2, 3):
        saved = checkpoint.save(tmp_path, {"w": torch.ones(9)}, step=step, meta={})
    data = bytearray(saved.read_bytes())
    data[-30] ^= 1
    saved.write_bytes(data)  # so that whoever reads it notices
    assert checkpoint.prune(tmp_path, keep_last=1) == [tmp_path / "step-000000001.ckpt"]
    deleted = checkpoint.prune(tmp_path, keep_last=1, written=saved)
    assert deleted == [tmp_path / "step-000000002.ckpt"]
    saved.write_bytes(data[:-1])
    checkpoint.save(tmp_path, {"w": torch.ones(9)}, step=0, meta={})
    assert checkpoint.prune(tmp_path, keep_last=1, written=saved) == [], "its size is compared"


@pytest.fixture(scope="module")
def packed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ("max_duration=3st", "checkpoint.every=1st", "checkpoint.keep_last=1", "data.synthetic=60")
    return new_run(tmp_path_factory.mktemp("saving"), *options)


@pytest.mark.slow
def test_the_time_of_a_save_includes_deleting_old_checkpoints(packed_run):
    is_slow = True

    def delete_slowly(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.remove" and is_slow and str(arguments[0]).endswith(".ckpt"):
            time.sleep(0.2)

    sys.addaudithook(delete_slowly)
    try:
        assert train(packed_run) == 0
    finally:
        is_slow = False
    saved = [event["seconds"] for event in read_events(packed_run) if event["event"] == "checkpoint"]
    assert len(saved) == 3 and max(saved) >= 0.2


# Raw files


def test_packing_asks_once_for_each_raw_file_and_for_many_at_the_same_time(packed_run, monkeypatch):
    config = configs.load_config(packed_run / CONFIG, FAMILIES)
    raw = next(path for path in Path(config.data.cache).glob("stripes-synthetic-*") if path.is_dir())
    asked: dict[str, int] = {}
    waiting, most, lock = 0, 0, threading.Lock()
    ask = os.stat

    def ask_slowly(path: Any, **options: Any) -> os.stat_result:
        nonlocal waiting, most
        if not str(path).startswith(f"{raw}/"):
            return ask(path, **options)
        with lock:
            asked[str(path)] = asked.get(str(path), 0) + 1
            waiting += 1
            most = max(most, waiting)
        time.sleep(0.005)  # a network file system
        with lock:
            waiting -= 1
        return ask(path, **options)

    monkeypatch.setattr(os, "stat", ask_slowly)
    before = sorted(path.name for path in Path(config.data.path).iterdir())
    pack_raw(config, raw, None, FAMILIES)
    assert sorted(path.name for path in Path(config.data.path).iterdir()) == before, "it is packed already"
    assert len(asked) == 60 and set(asked.values()) == {1}
    assert most > 1


def test_folders_are_listed_once_within_a_block(tmp_path, monkeypatch):
    for name in ("a/1.png", "b/2.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    listed: list[str] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(str(path)) or scan(path))

    def list_twice() -> Iterator[list[Path]]:
        yield list_files(tmp_path, {".png"})
        (tmp_path / "a" / "3.png").touch()
        yield list_files(tmp_path, {".png"})

    with list_once():
        first, second = list_twice()
    assert first == second == [tmp_path / "a/1.png", tmp_path / "b/2.png"] and len(listed) == 3
    assert len(list_files(tmp_path, {".png"})) == 3, "outside the block, folders are listed again"


def test_a_listing_is_recalled_until_an_entry_of_a_folder_changes(tmp_path):
    raw, remembered = tmp_path / "raw", tmp_path / "remembered"
    (raw / "a").mkdir(parents=True)
    (raw / "a" / "1.png").touch()

    def remember() -> None:
        with list_once() as listed:
            assert list_files(raw, {".png"})
            remember_listing(remembered, listed, "packed", raw=raw)

    assert recall_listing(remembered) is None
    remember()
    for change in ((raw / "a/2.png").touch, (raw / "a/1.png").unlink, (raw / "b").mkdir, (raw / "b").rmdir):
        time.sleep(0.02)  # the clock of files ticks every few milliseconds
        change()
        assert recall_listing(remembered) is None, change
        remember()
        assert recall_listing(remembered) == "packed"
    remembered.write_text('{"folders": 3}')
    assert recall_listing(remembered) is None


# Intervals


def test_a_draw_looks_at_the_highest_scores_first_and_finds_what_all_scores_say():
    """20,000 pairs: more than a draw looks at first; with few errors, and with so many that it has to look further."""
    for distance in (6.0, 0.5):
        pairs, looked_at = make_pairs(25, 8, distance=distance), []

        def compute(rates: ErrorRates) -> dict[str, float]:
            looked_at.append(len(rates.thresholds))  # noqa: B023  it is called at once
            return compute_operating_points(rates, impostors=10_000)

        found = bootstrap(pairs, compute, draws=20, seed=5)
        assert (max(looked_at) < len(pairs.impostor) / 2) == (distance == 6.0)

        generator, whole = np.random.default_rng(5), []
        for _ in range(20):
            count = np.bincount(generator.integers(25, size=25), minlength=25)
            genuine = np.repeat(pairs.genuine, count[pairs.genuine_identity])
            impostor = np.repeat(pairs.impostor, count[pairs.impostor_identities].prod(axis=1))
            whole.append(compute_operating_points(compute_error_rates(genuine, impostor), impostors=10_000))
        assert found == summarize_draws(whole, draws=20)


def make_pairs(fingers: int, impressions: int, *, distance: float) -> Pairs:
    """Return all pairs of prints with random scores; the means of the two kinds are `distance` standard deviations
    apart."""
    finger = np.repeat(np.arange(fingers), impressions)
    one, other = np.triu_indices(len(finger), 1)
    same = finger[one] == finger[other]
    score = np.random.default_rng(0).normal(size=len(one)) + distance * same
    return Pairs(score[same], score[~same], finger[one][same], np.stack([finger[one], finger[other]], axis=1)[~same])
