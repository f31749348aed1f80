"""Hydra's own multirun over a job, for those who like its sweepers and launchers. Our own way is `trainyard sweep`."""

import os
import sys
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from trainyard import config as configs
from trainyard.runs import folder as runs
from trainyard.settings import TrainConfig

_AWAIT_RUN_S = 120  # how long other ranks wait for rank 0, whose program may load later than theirs


def multirun(
    job: str, overrides: Sequence[str], *, jobs_dir: Path, runs_dir: Path, environ: MutableMapping[str, str]
) -> int:
    """Train a job once for each combination of values, as `python app.py --multirun` of a Hydra application does.

    Everything that Hydra understands works: sweepers, `hydra/launcher=submitit_slurm` with `hydra.launcher.*`, and
    overrides in Hydra's grammar. Each job is a run under `runs_dir`, named after the multirun and its number.

    What comes with the plugin (hydra-submitit-launcher 1.2.0), and not with `trainyard sweep`:
    - This process waits until all jobs have ended. If it dies they go on, but nobody collects their results.
    - It asks sacct for the state of jobs. Where accounting is off, a job that dies hard (out of memory, cancelled, its
      time limit) leaves no result, and this process waits for ever.
    - Nothing is started again after a preemption or a time limit. The run is whole, and `trainyard resume` goes on
      with it. Where Slurm itself starts a job again (a node failed), the run goes on from its checkpoint.
    - A training that failed raises here and makes the exit code 1, but for Slurm its job is COMPLETED, because the
      plugin hands the error over as a result (hydra issue 1928). So no `--dependency=afterok` on these jobs.
    - `hydra.launcher` has no option for the interpreter on the node, so jobs do not run in our images.

    Args:
        overrides: in Hydra's grammar, which takes special characters in quotes only.
        environ: the process environment. Gets the folder above `jobs_dir` on its PYTHONPATH: a job's process reads
            objects of the family before any code of ours runs there.

    Returns:
        0, or 1 if a job failed or Hydra refused an override; Hydra has then said why.

    Raises:
        UserError: there is no such job.
    """
    configs.compose(job, [], jobs_dir)  # says what is wrong with the job in our words, and registers its options
    preset = configs.find_jobs(jobs_dir)[job].resolve()
    family, jobs_dir, runs_dir = preset.parent.name, jobs_dir.resolve(), runs_dir.resolve()

    def train(tree: DictConfig) -> None:
        """Be one job. Nested, so that it reaches the node by value, with the paths in it."""
        config = OmegaConf.to_object(tree)
        assert isinstance(config, TrainConfig)
        _train(configs.apply_overrides(replace(config, job=job, family=family), []), jobs_dir, runs_dir)

    _add_to_path(environ, jobs_dir.parent)
    application = hydra.main(config_path=str(preset.parent), config_name=job, version_base="1.3")(train)
    place = f"hydra.sweep.dir={runs_dir}/multirun/${{now:%Y%m%d-%H%M%S}}"
    with _arguments(["--multirun", place, *overrides]):
        try:
            application()
        except SystemExit as leaving:  # Hydra prints what went wrong, and leaves
            return int(leaving.code or 0)
    return 0


def _train(config: TrainConfig, jobs_dir: Path, runs_dir: Path) -> None:
    """Train in the process that the launcher made, in a run that a second start of the same job finds again."""
    from trainyard.launch.rank_task import execute
    from trainyard.train.world import read_world

    started, environ = time.time(), dict(os.environ)  # this is where a process of its own begins
    place = HydraConfig.get()
    run = runs_dir / config.job / f"{Path(place.sweep.dir).name}-{place.job.num:03d}"
    if not read_world(environ).is_main:
        _await(run)
    elif not (run / runs.CONFIG).is_file():
        runs.create_run(runs_dir, config, name=run.name, environ=environ)
    code = execute(run, jobs_dir, environ=environ, started=started)
    if code:
        raise RuntimeError(f"{run}: ended with code {code}. Its log is {run}/log. Go on: trainyard resume {run}")


def _await(run: Path) -> None:
    deadline = time.monotonic() + _AWAIT_RUN_S
    while not (run / runs.CONFIG).is_file():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run}: rank 0 has not made this run within {_AWAIT_RUN_S} s. See what it said.")
        time.sleep(0.2)


def _add_to_path(environ: MutableMapping[str, str], folder: Path) -> None:
    others = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(folder)]
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), *others])


@contextmanager
def _arguments(words: Sequence[str]) -> Iterator[None]:
    """Let Hydra read these words: it takes them from sys.argv, and from nowhere else."""
    typed = sys.argv
    sys.argv = [typed[0], *words]
    try:
        yield
    finally:
        sys.argv = typed
