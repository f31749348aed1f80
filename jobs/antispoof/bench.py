"""Features on the device against librosa in the loader, and PCM against FLAC in shards, side by side in one run."""

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
from scipy.signal import resample_poly

from trainyard import measure
from trainyard.data.loader import Loader
from trainyard.data.pack import pack
from trainyard.data.shards import Sample, ShardSet
from trainyard.errors import UserError
from trainyard.measure import Candidate
from trainyard.settings import AudioSettings, TrainConfig
from trainyard.train.precision import keep_freed_memory

from . import frontends
from .pack import Rule, load
from .synthesis import draw_speech

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

    Two pairs per feature: the whole way from files to a batch of features (ours: shards, loader, front end; theirs:
    FLAC files, soundfile, librosa, DataLoader), and features alone from waveforms in memory. Each is one process with
    one thread for arithmetic, and rates are per second of its CPU time, whatever thread used it: a busy machine
    disturbs them less than the clock's.

    Args:
        peers: folder of an environment with librosa; None: ours alone.

    Raises:
        UserError: there is no librosa in `peers`.
    """
    torch.set_num_threads(1)
    keep_freed_memory(torch.device("cpu"))  # as a run does
    with tempfile.TemporaryDirectory() as folder, _librosa(peers, Path(folder) / "flac") as ask:
        root = Path(folder)
        _draw(root / "flac")
        stores = {name: _packed(root, encoded=name == "encoded") for name in ("pcm", "encoded")}
        versions = None if ask is None else ask(None)
        ways = [way for feature in FEATURES for way in _feature_ways(feature, stores["pcm"], ask, seconds)]
        ways += _store_ways(stores, seconds)
        lines = measure.side_by_side(ways, rounds=rounds, warm_up=True)
        head = measure.header("frontends", {"rounds": rounds, "seconds": seconds})
        head["peer_versions"] = versions
        head["agreement"] = {} if ask is None else {name: _agreement(name, root / "flac", ask) for name in FEATURES}
        for data in stores.values():
            data.close()
    print(measure.table(lines))
    for name, difference in head["agreement"].items():
        print(f"{name}: {'95 % of values differ' if name == 'cqt432' else 'all differ'} by less than {difference:.2g}")
    print(f"written: {measure.write_new(results, 'frontends', [head, *lines])}")
    return 0


def _per_core_s(seconds: float, work: Callable[[], int]) -> float:
    """Repeat work that returns how many utterances it did; return utterances per second of CPU time."""
    begin, used, done = time.perf_counter(), time.process_time(), 0
    while done == 0 or time.perf_counter() - begin < seconds:
        done += work()
    return done / (time.process_time() - used)


Ask = Callable[[dict[str, Any] | None], Any]


@contextmanager
def _librosa(peers: Path | None, folder: Path) -> Iterator[Ask | None]:
    """Start librosa's process, and yield how to ask it; None where it is not wanted, which is said."""
    if peers is None:
        print(f"Ours alone. With librosa beside it: {ADD_LIBROSA}")
        yield None
        return
    python = peers / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", "import librosa"], capture_output=True).returncode:
        raise UserError(f"--peers {peers}: no environment with librosa there. Make one: {ADD_LIBROSA}")
    script = Path(__file__).with_name("librosa_loader.py")
    command = [str(python), str(script), str(folder), str(FRAMES)]
    environ = {**os.environ, **ONE_THREAD}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def ask(question: dict[str, Any] | None) -> Any:
        if question is not None:
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
        return json.loads(stdout.readline())

    try:
        yield ask
    finally:
        stdin.close()
        process.wait()


def _draw(folder: Path) -> None:
    """Write drawn speech as FLAC, 16 kHz, 4 to 4.8 s."""
    folder.mkdir()
    for i in range(UTTERANCES):
        speech = np.concatenate([draw_speech(0, i, take) for take in range(4)])
        wave = resample_poly(np.resize(speech, 32300 + 25 * i), 2, 1)
        pcm = np.clip(np.round(wave * 32767), -32768, 32767).astype(np.int16)
        soundfile.write(folder / f"{i:03d}.flac", pcm, RATE_HZ, subtype="PCM_16")


def _packed(root: Path, *, encoded: bool) -> ShardSet:
    rule = Rule(RATE_HZ, encoded, False, False, 0.0)
    paths = sorted((root / "flac").glob("*.flac"))
    samples = [Sample(path.name, partial(load, path, rule), source=path) for path in paths]
    return pack(samples, root / ("encoded" if encoded else "pcm"), meta={}, workers=1)


def _feature_ways(name: str, data: ShardSet, ask: Ask | None, seconds: float) -> list[Candidate]:
    frontend = frontends.build(name, rate_hz=RATE_HZ, frames=FRAMES, mean="none")
    waves = torch.cat([batch["wave"] for batch in _batches(data, "cpu")])[:BATCH]

    def loaded() -> int:
        return sum(len(frontend(batch["wave"])) for batch in _batches(data, "cpu"))

    ours = [
        Candidate(f"{name}/ours", lambda: _per_core_s(seconds, loaded), UNIT, "shards to features"),
        Candidate(f"{name}/ours, alone", lambda: _per_core_s(seconds, lambda: len(frontend(waves))), UNIT),
    ]
    if ask is None:
        return ours
    asked = {"feature": name, "seconds": seconds}
    theirs = [
        Candidate(f"{name}/librosa", lambda: float(ask({**asked, "what": "loaded"})), UNIT, "FLAC files to features"),
        Candidate(f"{name}/librosa, alone", lambda: float(ask({**asked, "what": "made"})), UNIT),
    ]
    held = [
        Candidate(way.name, way.measure, way.unit, way.note, other.name)
        for way, other in zip(ours, theirs, strict=True)
    ]
    return [*held, *theirs]


def _store_ways(stores: dict[str, ShardSet], seconds: float) -> list[Candidate]:
    def rate(data: ShardSet, decode: str) -> float:
        return _per_core_s(seconds, lambda: sum(len(b["wave"]) for b in _batches(data, decode)))

    size = {name: int(data.records["wave"].size.sum()) / data.count / 1024 for name, data in stores.items()}
    pcm = Candidate("store/pcm", lambda: rate(stores["pcm"], "cpu"), UNIT, f"{size['pcm']:.0f} KiB each")
    flac = f"{size['encoded']:.0f} KiB each"
    return [
        pcm,
        Candidate("store/flac, soundfile", lambda: rate(stores["encoded"], "cpu"), UNIT, flac, pcm.name),
        Candidate("store/flac, DALI", lambda: rate(stores["encoded"], "dali"), UNIT, flac, pcm.name),
    ]


def _batches(data: ShardSet, decode: str) -> Iterator[dict[str, torch.Tensor]]:
    config = TrainConfig(sound=AudioSettings(frames=FRAMES, rate_hz=RATE_HZ))
    loader = Loader.from_config(config, data, device=torch.device("cpu"), decode=decode)
    for micro in loader.evaluate(np.arange(data.count), batch_size=BATCH):
        yield micro.batch


def _agreement(name: str, folder: Path, ask: Ask) -> float:
    """Return how much the first utterance's map differs from librosa's, where it is within 60 dB of its loudest.

    Below that, what is left of rounding differs. librosa scales each bin of the constant-Q transform by a constant,
    which is a shift of its logarithm, resamples between octaves, and leaves out small parts of its windows: there the
    bins' means are removed, and the largest 5 % of differences left out. A test holds ours against the definition.
    """
    wave = torch.from_numpy(np.resize(soundfile.read(sorted(folder.glob("*.flac"))[0], dtype="float32")[0], FRAMES))
    ours = frontends.build(name, rate_hz=RATE_HZ, frames=FRAMES, mean="none")(wave[None])[0].double().numpy()
    theirs = np.array(ask({"feature": name, "what": "features"}))[:, : ours.shape[1]]
    if name == "cqt432":
        ours, theirs = (x - x.mean(axis=1, keepdims=True) for x in (ours, theirs))
    loud = np.ones(ours.shape, bool) if name == "lfcc60" else ours > ours.max() - (60 if name == "mel128" else 13.8)
    return float(np.quantile(np.abs(ours - theirs)[loud], 0.95 if name == "cqt432" else 1))
