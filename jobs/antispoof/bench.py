"""Compares features on the device with librosa in the loader, and PCM with FLAC in shards, in one run."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from scipy.signal import resample_poly  # type: ignore[import-untyped]

from trainyard import measure
from trainyard.data.loader import Loader
from trainyard.data.pack import pack
from trainyard.data.shards import Sample, ShardSet
from trainyard.errors import UserError
from trainyard.measure import Candidate
from trainyard.settings import AudioSettings, TrainConfig
from trainyard.train.precision import keep_freed_memory

from . import frontends
from .pack import ConversionRule, load
from .synthesis import generate_speech

FEATURES = ("mel128", "spec257", "lfcc60", "cqt432")
UTTERANCES, FRAMES, BATCH, RATE_HZ = 256, 64600, 32, 16000
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
UNIT = "utt/core-s"
ADD_LIBROSA = (
    "python3 -m venv .venv-librosa && .venv-librosa/bin/pip install librosa torch soundfile scipy, "
    "then trainyard bench-frontends --peers .venv-librosa"
)


def run(*, peers: Path | None, rounds: int, seconds: float, results: Path) -> int:
    """Measure, print the table and write `results/frontends-<date>.jsonl`; return the exit code.

    Two pairs per feature: end to end from files to a batch of features (ours: shards, loader, front end; theirs: FLAC
    files, soundfile, librosa, DataLoader), and features only, from waveforms in memory. Each is one process with one
    arithmetic thread. Rates are per second of CPU time over all its threads: a busy machine disturbs them less than
    rates by the clock.

    Args:
        peers: folder of an environment with librosa; None: measure only ours.

    Raises:
        UserError: `peers` has no librosa.
    """
    torch.set_num_threads(1)
    keep_freed_memory(torch.device("cpu"))  # as in a run
    with tempfile.TemporaryDirectory() as folder, _start_librosa(peers, Path(folder) / "flac") as query:
        root = Path(folder)
        _write_recordings(root / "flac")
        stores = {name: _pack_recordings(root, encoded=name == "encoded") for name in ("pcm", "encoded")}
        versions = None if query is None else query(None)
        candidates = [c for name in FEATURES for c in _build_feature_candidates(name, stores["pcm"], query, seconds)]
        candidates += _build_store_candidates(stores, seconds)
        lines = measure.measure_candidates(candidates, rounds=rounds, warm_up=True)
        head = measure.make_header("frontends", {"rounds": rounds, "seconds": seconds})
        head["peer_versions"] = versions
        head["agreement"] = (
            {} if query is None else {name: _compare_features(name, root / "flac", query) for name in FEATURES}
        )
        for data in stores.values():
            data.close()
    print(measure.format_table(lines))
    for name, difference in head["agreement"].items():
        print(f"{name}: {'95 % of values differ' if name == 'cqt432' else 'all differ'} by less than {difference:.2g}")
    print(f"written: {measure.write_new(results, 'frontends', [head, *lines])}")
    return 0


def _measure_rate(seconds: float, work: Callable[[], int]) -> float:
    """Repeat `work`, which returns how many utterances it processed; return utterances per second of CPU time."""
    begin, cpu_begin, done = time.perf_counter(), time.process_time(), 0
    while done == 0 or time.perf_counter() - begin < seconds:
        done += work()
    return done / (time.process_time() - cpu_begin)


Query = Callable[[dict[str, Any] | None], Any]


@contextmanager
def _start_librosa(peers: Path | None, folder: Path) -> Iterator[Query | None]:
    """Start librosa's process and yield a function that queries it; None, with a hint, without `peers`."""
    if peers is None:
        print(f"Measuring only ours. To compare with librosa: {ADD_LIBROSA}")
        yield None
        return
    python = peers / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", "import librosa"], capture_output=True).returncode:
        raise UserError(f"--peers {peers}: not an environment with librosa. Create one: {ADD_LIBROSA}")
    script = Path(__file__).with_name("librosa_loader.py")
    command = [str(python), str(script), str(folder), str(FRAMES)]
    environ = {**os.environ, **ONE_THREAD}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def query(request: dict[str, Any] | None) -> Any:
        if request is not None:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        return json.loads(stdout.readline())

    try:
        yield query
    finally:
        stdin.close()
        process.wait()


def _write_recordings(folder: Path) -> None:
    """Write synthetic speech as FLAC, 16 kHz, 4 to 4.8 s."""
    folder.mkdir()
    for i in range(UTTERANCES):
        speech = np.concatenate([generate_speech(0, i, take) for take in range(4)])
        wave = resample_poly(np.resize(speech, 32300 + 25 * i), 2, 1)
        pcm = np.clip(np.round(wave * 32767), -32768, 32767).astype(np.int16)
        soundfile.write(folder / f"{i:03d}.flac", pcm, RATE_HZ, subtype="PCM_16")


def _pack_recordings(root: Path, *, encoded: bool) -> ShardSet:
    rule = ConversionRule(RATE_HZ, encoded, False, False, 0.0)
    paths = sorted((root / "flac").glob("*.flac"))
    samples = [Sample(path.name, partial(load, path, rule), source=path) for path in paths]
    return pack(samples, root / ("encoded" if encoded else "pcm"), meta={}, workers=1)


def _build_feature_candidates(name: str, data: ShardSet, query: Query | None, seconds: float) -> list[Candidate]:
    frontend = frontends.build(name, rate_hz=RATE_HZ, frames=FRAMES, mean="none")
    waves = torch.cat([batch["wave"] for batch in _load_batches(data, "cpu")])[:BATCH]

    def load_and_compute() -> int:
        return sum(len(frontend(batch["wave"])) for batch in _load_batches(data, "cpu"))

    ours = [
        Candidate(f"{name}/ours", lambda: _measure_rate(seconds, load_and_compute), UNIT, "shards to features"),
        Candidate(f"{name}/ours, alone", lambda: _measure_rate(seconds, lambda: len(frontend(waves))), UNIT),
    ]
    if query is None:
        return ours
    request = {"feature": name, "seconds": seconds}
    theirs = [
        Candidate(
            f"{name}/librosa", lambda: float(query({**request, "what": "loaded"})), UNIT, "FLAC files to features"
        ),
        Candidate(f"{name}/librosa, alone", lambda: float(query({**request, "what": "made"})), UNIT),
    ]
    compared = [Candidate(a.name, a.measure, a.unit, a.note, b.name) for a, b in zip(ours, theirs, strict=True)]
    return [*compared, *theirs]


def _build_store_candidates(stores: dict[str, ShardSet], seconds: float) -> list[Candidate]:
    def measure_rate(data: ShardSet, decode: str) -> float:
        return _measure_rate(seconds, lambda: sum(len(b["wave"]) for b in _load_batches(data, decode)))

    size = {name: int(data.records["wave"].size.sum()) / data.count / 1024 for name, data in stores.items()}
    pcm = Candidate("store/pcm", lambda: measure_rate(stores["pcm"], "cpu"), UNIT, f"{size['pcm']:.0f} KiB each")
    flac = f"{size['encoded']:.0f} KiB each"
    return [
        pcm,
        Candidate("store/flac, soundfile", lambda: measure_rate(stores["encoded"], "cpu"), UNIT, flac, pcm.name),
        Candidate("store/flac, DALI", lambda: measure_rate(stores["encoded"], "dali"), UNIT, flac, pcm.name),
    ]


def _load_batches(data: ShardSet, decode: str) -> Iterator[dict[str, torch.Tensor]]:
    config = TrainConfig(sound=AudioSettings(frames=FRAMES, rate_hz=RATE_HZ))
    loader = Loader.from_config(config, data, device=torch.device("cpu"), decode=decode)
    for micro in loader.evaluate(np.arange(data.count), batch_size=BATCH):
        yield micro.batch


def _compare_features(name: str, folder: Path, query: Query) -> float:
    """Return the largest difference between our map and librosa's of the first utterance, within 60 dB of its peak.

    Below that, rounding errors differ. For the constant-Q transform, librosa scales each bin by a constant, which
    shifts its logarithm, resamples between octaves, and omits small parts of its windows: so the bins' means are
    removed and the largest 5 % of differences ignored. A test compares ours with the definition.
    """
    wave = torch.from_numpy(np.resize(soundfile.read(sorted(folder.glob("*.flac"))[0], dtype="float32")[0], FRAMES))
    ours = frontends.build(name, rate_hz=RATE_HZ, frames=FRAMES, mean="none")(wave[None])[0].double().numpy()
    theirs = np.array(query({"feature": name, "what": "features"}))[:, : ours.shape[1]]
    if name == "cqt432":
        ours, theirs = (x - x.mean(axis=1, keepdims=True) for x in (ours, theirs))
    loud = np.ones(ours.shape, bool) if name == "lfcc60" else ours > ours.max() - (60 if name == "mel128" else 13.8)
    return float(np.quantile(np.abs(ours - theirs)[loud], 0.95 if name == "cqt432" else 1))
