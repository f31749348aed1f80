"""Hydra's own multirun, for people who want its sweepers and launchers. Trainyard's own sweeps: `trainyard sweep`."""

import os
import re
import sys
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from trainyard.config import compose as configs
from trainyard.config.families import find_jobs, load_family
from trainyard.config.settings import TrainConfig
from trainyard.files import restrict_umask
from trainyard.runs import folder as runs
from trainyard.runs.create import Origin, create_run
from trainyard.text import quote_path

_WAIT_FOR_RUN_S = 120  # how long other ranks wait for rank 0, which may start later than they do


@restrict_umask()
def run_multirun(
    job: str,
    overrides: Sequence[str],
    *,
    jobs_dir: Path,
    runs_dir: Path,
    environ: MutableMapping[str, str],
    dry: bool = False,
) -> int:
    """Train a job once for each combination of values, as `python app.py --multirun` of a Hydra application does.

    Everything that Hydra understands works: sweepers, `hydra/launcher=submitit_slurm` with `hydra.launcher.*`, and
    overrides in Hydra's grammar. Each combination is a run under `runs_dir`, named after the multirun and its index.
    Sweepers that search get the best value of the metric that decides. They minimise it: where higher is better, type
    `hydra.sweeper.direction=maximize`.

    Limits of the plugin (hydra-submitit-launcher 1.2.0) that `trainyard sweep` does not have:
    - This process waits until all Slurm jobs have ended. If it dies they continue, but nobody collects their results.
    - It queries sacct for job states. Where accounting is off, a Slurm job that is killed (out of memory, cancelled,
      time limit) leaves no result, and this process waits forever.
    - Nothing is requeued after a preemption or a time limit. The run is intact, and `trainyard resume` resumes it.
      Where Slurm itself requeues a job (a node failed), the run resumes from its checkpoint.
    - A training that failed raises here and makes the exit code 1, but Slurm reports its job as COMPLETED, because
      the plugin returns the error as a result (hydra issue 1928). So do not use `--dependency=afterok` on these jobs.
    - Every variable of the shell that submits, such as RANK, reaches the ranks.
    - `hydra.launcher` has no option for the interpreter on the node, so jobs do not run in our container images.

    Args:
        overrides: in Hydra's grammar, which accepts special characters only in quotes.
        environ: the process environment. The parent of `jobs_dir` is added to its PYTHONPATH: a job's process
            unpickles objects of the family before any of our code runs there.
        dry: print each combination, and start nothing: no launcher is used.

    Returns:
        0, or 1 if a job failed or Hydra refused an override; Hydra has printed why.

    Raises:
        UserError: there is no such job.
    """
    configs.compose(job, [], jobs_dir)  # reports an error of the job in our words
    preset = find_jobs(jobs_dir)[job].resolve()
    configs.register_options(load_family(jobs_dir, preset.parent.name, "config").Config)
    family, jobs_dir, runs_dir = preset.parent.name, jobs_dir.resolve(), runs_dir.resolve()

    def train(tree: DictConfig) -> float | None:
        """Run one combination. Nested, so that it is pickled by value, with the paths in its closure."""
        config = configs.resolve(tree, f"job {job}")
        return _train(configs.apply_overrides(replace(config, job=job, family=family), []), jobs_dir, runs_dir)

    def show(tree: DictConfig) -> None:
        configs.resolve(tree, f"job {job}")
        print(" ".join([job, *HydraConfig.get().overrides.task]), flush=True)

    _add_to_path(environ, jobs_dir.parent)
    decorate = hydra.main(config_path=str(preset.parent), config_name=job, version_base="1.3")
    application = decorate(show if dry else train)
    words = [word for word in overrides if not (dry and re.match(r"[+~]*hydra[./]launcher", word))]
    with TemporaryDirectory() if dry else nullcontext(f"{runs_dir}/multirun/${{now:%Y%m%d-%H%M%S}}") as sweep_dir:
        with _replace_argv(["--multirun", f"hydra.sweep.dir={sweep_dir}", *words]):
            try:
                application()
            except SystemExit as exit_request:  # Hydra prints what went wrong, and exits
                return int(exit_request.code or 0)
    return 0


def _train(config: TrainConfig, jobs_dir: Path, runs_dir: Path) -> float | None:
    """Train in the process that the launcher started, in a run that a second start of the same job finds again.

    Returns:
        The best value of the metric that decides, for sweepers that search; None: no evaluation had a finite one.
    """
    from trainyard.node.rank_task import execute
    from trainyard.report.run_story import RunStory
    from trainyard.train.world import read_world

    started, environ = time.time(), dict(os.environ)  # this function is the entry point of the launcher's process
    hydra_config = HydraConfig.get()
    run = runs_dir / config.job / f"{Path(hydra_config.sweep.dir).name}-{hydra_config.job.num:03d}"
    if not read_world(environ).is_main:
        _wait_for_run(run)
    elif not (run / runs.CONFIG).is_file():
        create_run(runs_dir, config, name=run.name, origin=Origin.collect(environ))
    code = execute(run, jobs_dir, environ=environ, started=started)
    if code:
        resume = f"trainyard resume {quote_path(run)}"
        raise RuntimeError(f"{run}: ended with code {code}. Its log is {run}/log. Resume: {resume}")
    best = RunStory.read(run).find_best_evaluation()
    return None if best is None else float(best[1][best[0]])


def _wait_for_run(run: Path) -> None:
    deadline = time.monotonic() + _WAIT_FOR_RUN_S
    while not (run / runs.CONFIG).is_file():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run}: rank 0 has not created this run within {_WAIT_FOR_RUN_S} s. See its output.")
        time.sleep(0.2)


def _add_to_path(environ: MutableMapping[str, str], folder: Path) -> None:
    others = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(folder)]
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), *others])


@contextmanager
def _replace_argv(words: Sequence[str]) -> Iterator[None]:
    """Let Hydra read these words: it reads its arguments only from sys.argv."""
    typed = sys.argv
    sys.argv = [typed[0], *words]
    try:
        yield
    finally:
        sys.argv = typed
