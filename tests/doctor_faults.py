"""Plants what slows a job down from outside of it, and asks `trainyard doctor` what it finds.

`python -m tests.doctor_faults --cache FOLDER [--repeats N] [--only NAME] [--results benchmarks]` prints how often
each fault was named, and writes it. Cgroups (v1), mounts, loop devices and a second rank need root. `--overhead`
measures instead how fast steps are while the doctor samples the loader's threads, and how long the heartbeat takes to
count a phase.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from threading import enumerate as enumerate_threads

from trainyard.config import compose as configs
from trainyard.data.prepare import prepare_data
from trainyard.measure import Ratio, make_header, write_new
from trainyard.tools.stage_sampler import StageSampler
from trainyard.tools.trial import open_trial
from trainyard.train.heartbeat import Heartbeat

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ROOT / "tests" / "families"
MACHINE = "busy machine"
"""Not planted, and true wherever others compute: it counts neither as named nor as false."""
HEALTHY = "healthy"


@dataclass(frozen=True)
class Plant:
    """One fault at one strength, and how to plant it."""

    fault: str  # as the doctor names it
    strength: str
    expected: bool = True  # False: below the doctor's threshold
    job: str = "stripes"
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    environ: tuple[tuple[str, str], ...] = ()
    prefix: tuple[str, ...] = ()
    cgroup: tuple[tuple[str, str, str], ...] = ()  # controller, file, content
    stopped: float = 0.0  # share of the time in which the last rank is stopped

    @property
    def name(self) -> str:
        return f"{self.fault} / {self.strength}"


def list_plants() -> list[Plant]:
    """Return the matrix for this machine; the last strength of each fault is below the threshold."""
    cores = sorted(os.sched_getaffinity(0))
    two = ",".join(map(str, cores[:2]))
    # a run that is long enough for its evaluations to count, and records enough to time a disk
    each_step, large = "eval_every=1st", "data.synthetic=4000"
    # steps that take much longer than decoding does without the plant
    on_cpu = ("data.decode=cpu", "model.channels=96")
    return [
        Plant(HEALTHY, "stripes", expected=False),
        Plant(HEALTHY, "tinydet_smoke", expected=False, job="tinydet_smoke"),
        Plant("few cores", "1 core", prefix=("taskset", "-c", str(cores[0]))),
        Plant("few cores", "quota of 0.5", cgroup=_limit_cpu(0.5)),
        Plant("few cores", "2 cores", expected=False, prefix=("taskset", "-c", two)),
        Plant("slow disk", "0.06 MiB/s", overrides=(large,), cgroup=_limit_reads(1 << 16)),
        Plant("slow disk", "0.03 MiB/s", overrides=(large,), cgroup=_limit_reads(1 << 15)),
        Plant("slow disk", "64 MiB/s", expected=False, overrides=(large,), cgroup=_limit_reads(1 << 26)),
        Plant("small shared memory", "1 MiB", prefix=_mount_shm("1m")),
        Plant("small shared memory", "32 MiB", prefix=_mount_shm("32m")),
        Plant("small shared memory", "128 MiB", expected=False, prefix=_mount_shm("128m")),
        Plant("input: decode", "20 ms an image", overrides=on_cpu, environ=_slow("decode", 0.02)),
        Plant("input: decode", "10 ms an image", overrides=on_cpu, environ=_slow("decode", 0.01)),
        Plant("input: decode", "0.1 ms an image", expected=False, overrides=on_cpu, environ=_slow("decode", 0.0001)),
        Plant("slow rank", "stopped 60 %", ranks=2, stopped=0.6),
        Plant("slow rank", "stopped 30 %", ranks=2, stopped=0.3),
        Plant("slow rank", "stopped 2 %", expected=False, ranks=2, stopped=0.02),
        Plant("host waits in the step", "100 reads", environ=_slow("read", 100)),
        Plant("host waits in the step", "10 reads", environ=_slow("read", 10)),
        Plant("host waits in the step", "1 read", expected=False, environ=_slow("read", 1)),
        Plant("long validation", "1.5 s a batch", overrides=(each_step,), environ=_slow("predict", 1.5)),
        Plant("long validation", "0.5 s a batch", overrides=(each_step,), environ=_slow("predict", 0.5)),
        Plant(
            "long validation", "5 ms a batch", expected=False, overrides=(each_step,), environ=_slow("predict", 0.005)
        ),
        *(
            Plant("oversubscribed threads", f"{n} threads a core", expected=n > 1, environ=_set_threads(n * len(cores)))
            for n in (8, 2, 1)
        ),
    ]


def _limit_cpu(cores: float) -> tuple[tuple[str, str, str], ...]:
    return (("cpu", "cpu.cfs_period_us", "100000"), ("cpu", "cpu.cfs_quota_us", str(int(cores * 100000))))


def _limit_reads(bytes_per_s: int) -> tuple[tuple[str, str, str], ...]:
    return (("blkio", "blkio.throttle.read_bps_device", str(bytes_per_s)),)


def _mount_shm(size: str) -> tuple[str, ...]:
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", script, "sh")


def _slow(what: str, amount: float) -> tuple[tuple[str, str], ...]:
    return (("DOCTOR_PLANT", f"{what} {amount}"),)


def _set_threads(count: int) -> tuple[tuple[str, str], ...]:
    return (("OMP_NUM_THREADS", str(count)),)


# What a Python process loads before anything else: it changes functions of modules once they are imported.
_SITE = """
import functools, importlib.abc, importlib.util, os, sys, time

WHAT, AMOUNT = os.environ["DOCTOR_PLANT"].split()

def sleep_first(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        time.sleep(float(AMOUNT))
        return function(*args, **kwargs)
    return call

def read_first(forward):
    @functools.wraps(forward)
    def call(module, batch):
        for _ in range(int(float(AMOUNT))):
            batch["image"].flatten()[0].item()
        return forward(module, batch)
    return call

PLANTS = {
    "decode": ("trainyard.data.decode_cpu", "decode_image", sleep_first),
    "predict": ("families.stripes.module", "StripesModule.predict", sleep_first),
    "read": ("families.stripes.module", "StripesModule.forward", read_first),
}
MODULE, PLACE, WRAP = PLANTS[WHAT]

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            *owners, last = PLACE.split(".")
            owner = functools.reduce(getattr, owners, module)
            setattr(owner, last, WRAP(getattr(owner, last)))
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def diagnose(plant: Plant, cache: Path, *, seconds: float = 3.0) -> list[str]:
    """Start the doctor with a fault planted; return the names of the faults that it found.

    Raises:
        RuntimeError: the doctor failed.
    """
    jobs = FAMILIES if plant.job == "stripes" else ROOT / "jobs"
    with ExitStack() as stack:
        if any(controller == "blkio" for controller, _, _ in plant.cgroup):
            cache = stack.enter_context(_mount_disk(cache))
        words = [plant.job, "--jobs", str(jobs), f"data.cache={cache}", *plant.overrides]
        _prepare(plant, jobs, cache)
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="doctor-plant-")))
        (scratch / "sitecustomize.py").write_text(_SITE)
        path = [ROOT / "src", ROOT, *([scratch] if "DOCTOR_PLANT" in dict(plant.environ) else [])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **dict(plant.environ)}
        entered = stack.enter_context(_enter_cgroups(plant, cache))
        options = ["--seconds", str(seconds), "--ranks", str(plant.ranks), "--results", str(scratch)]
        command = [*entered, *plant.prefix, sys.executable, "-m", "trainyard", "doctor", *words, *options]
        output = scratch / "output"
        with output.open("w") as file:
            process = subprocess.Popen(command, env=environ, stdout=file, stderr=subprocess.STDOUT, cwd=scratch)
            try:
                if plant.stopped:
                    stack.enter_context(_stop_last_rank(process.pid, plant))
                code = process.wait(timeout=300)
            finally:
                process.kill()
        if code:
            raise RuntimeError(f"{plant.name}: exit code {code}: {output.read_text()[-2000:]}")
        [result] = scratch.glob("doctor-*.jsonl")
        found = json.loads(result.read_text().splitlines()[1])
    return [fault["name"] for fault in found["faults"]]


def _prepare(plant: Plant, jobs: Path, cache: Path) -> None:
    """Pack the data before a fault is planted, and read it once: what is slow is training, not packing."""
    config = configs.compose(plant.job, [f"data.cache={cache}", *plant.overrides], jobs)
    for path in Path(prepare_data(config, jobs).data.path).rglob("*.h5"):
        path.read_bytes()


@contextmanager
def _mount_disk(cache: Path) -> Iterator[Path]:
    """Mount a disk of its own for the data: a limit on the machine's disk slows down reads of libraries too."""
    image, folder = cache / "disk.img", cache / "disk"
    folder.mkdir(parents=True, exist_ok=True)
    if not image.exists():
        with image.open("wb") as file:
            file.truncate(256 << 20)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def _enter_cgroups(plant: Plant, cache: Path) -> Iterator[list[str]]:
    """Create groups (cgroup v1) with limits; yield the words that put a command into them."""
    groups = []
    for controller, file, content in plant.cgroup:
        group = Path("/sys/fs/cgroup") / controller / f"doctor_plant_{os.getpid()}"
        group.mkdir(exist_ok=True)
        device = cache.stat().st_dev
        is_disk = controller == "blkio"
        (group / file).write_text(f"{os.major(device)}:{os.minor(device)} {content}" if is_disk else content)
        groups.append(group)
    enter = "".join(f"echo $$ > {group}/cgroup.procs && " for group in dict.fromkeys(groups))
    yield ["sh", "-c", f'{enter}exec "$@"', "sh"] if groups else []
    for group in dict.fromkeys(groups):
        for _ in range(100):  # until the kernel has forgotten its processes
            if not (group / "cgroup.procs").read_text():
                group.rmdir()
                break
            time.sleep(0.05)


@contextmanager
def _stop_last_rank(parent: int, plant: Plant) -> Iterator[None]:
    """Stop and continue the last rank by turns of 50 ms until the block ends."""
    leaving, period_s = Event(), 0.05

    def stop() -> None:
        while not leaving.is_set():
            pid = _find_rank(parent, plant.ranks - 1)
            for number, share in ((signal.SIGSTOP, plant.stopped), (signal.SIGCONT, 1 - plant.stopped)):
                try:
                    if pid is not None:
                        os.kill(pid, number)
                except ProcessLookupError:
                    return
                time.sleep(period_s * share)

    thread = Thread(target=stop)
    thread.start()
    yield
    leaving.set()
    thread.join()


def _find_rank(parent: int, rank: int) -> int | None:
    """Return the process of a rank among a command's children; None if it has not started."""
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        environs = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in children}
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((int(pid) for pid, environ in environs.items() if f"RANK={rank}".encode() in environ), None)


def is_right(plant: Plant, named: Sequence[str]) -> bool:
    """Tell whether a planted fault was named; below the threshold, whether the run was called healthy."""
    return plant.fault in named if plant.expected else not set(named) - {MACHINE}


def measure_matrix(
    plants: Sequence[Plant], cache: Path, *, repeats: int, say: Callable[[str], object] = print
) -> list[dict[str, object]]:
    """Plant each fault `repeats` times, by turns; return a line for each."""
    named: dict[Plant, list[list[str]]] = {plant: [] for plant in plants}
    for _ in range(repeats):
        for plant in plants:
            begin, load = time.perf_counter(), os.getloadavg()[0]
            named[plant].append(diagnose(plant, cache))
            right = "right" if is_right(plant, named[plant][-1]) else "WRONG"
            took_s = time.perf_counter() - begin
            say(
                f"{right}  {plant.name:<42} load {load:4.1f}  {took_s:3.0f} s  {', '.join(named[plant][-1]) or HEALTHY}"
            )
    return [
        {
            "fault": plant.fault,
            "strength": plant.strength,
            "expected": plant.fault if plant.expected else HEALTHY,
            "right": sum(is_right(plant, names) for names in named[plant]),
            "of": len(named[plant]),
            "named": named[plant],
        }
        for plant in plants
    ]


def format_matrix(lines: Sequence[dict[str, object]]) -> list[str]:
    """Return the table: fault, strength, what is expected, and how often it was said."""
    return [
        f"{line['fault']:<24}{line['strength']:<22}{line['expected']:<26}{line['right']} of {line['of']}"
        for line in lines
    ]


def measure_overhead(cache: Path, *, rounds: int) -> list[dict[str, object]]:
    """Take steps with and without the sampler by turns, of a job that its loader limits; return a line for each.

    Turns are short, as in `trainyard ablate`: the speed of a shared machine changes within seconds. `sampler_share` is
    the processor time of the sampler's thread, per second that it was on.
    """
    config = prepare_data(configs.compose("stripes", [f"data.cache={cache}", "data.decode=cpu"], FAMILIES), FAMILIES)
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    sampler_s = 0.0
    with open_trial(config, FAMILIES, os.environ) as trial, closing(trial.open_stream()) as stream:
        for turn in range(-1, rounds):  # the first is not counted
            for name in sorted(seconds, reverse=turn % 2 == 0):
                with StageSampler() if name == "with" else nullcontext():
                    begin = time.perf_counter()
                    for _ in range(40):
                        trial.take_step(trial.take_micro_batches(stream))
                    if turn >= 0:
                        seconds[name].append(time.perf_counter() - begin)
                        sampler_s += sum(_read_cpu_s(t) for t in enumerate_threads() if t.name == "stages")
        beat, begin = Heartbeat(trial.context.run, "overhead", is_main=False).beat, time.perf_counter()
        for _ in range(100_000):
            beat("training")
        beat_us = 10 * (time.perf_counter() - begin)
    line = {
        "sampled": asdict(Ratio.from_values(seconds["without"], seconds["with"])),
        "sampler_share": sampler_s / sum(seconds["with"]),
        "beat_us": beat_us,
    }
    return [{"kind": "overhead", "rounds": rounds, **line, **seconds}]


def _read_cpu_s(thread: Thread) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) if thread.ident else 0.0


def main() -> None:
    """Measure the matrix, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", default="", help="part of a fault's name and strength")
    parser.add_argument("--cache", type=Path, required=True, help="folder for packed data")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--overhead", action="store_true")
    args = parser.parse_args()
    if args.overhead:
        lines = measure_overhead(args.cache, rounds=20 * args.repeats)
        print(*(f"{name}: {lines[0][name]}" for name in ("sampled", "sampler_share", "beat_us")), sep="\n")
        if args.results:
            header = make_header("doctor-overhead", vars(args)) | {"load": os.getloadavg()}
            print(f"written: {write_new(args.results, 'doctor-overhead', [header, *lines])}")
        return
    plants = [plant for plant in list_plants() if args.only in plant.name]
    # resolved: the doctor runs in another folder
    lines = measure_matrix(plants, args.cache.resolve(), repeats=args.repeats, say=lambda text: print(text, flush=True))
    print("\n".join(format_matrix(lines)))
    if args.results:
        header = make_header("doctor-faults", vars(args)) | {"load": os.getloadavg()}
        print(f"written: {write_new(args.results, 'doctor-faults', [header, *lines])}")


if __name__ == "__main__":
    main()
