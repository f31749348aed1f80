"""Reads this process's place among the ranks of a run. Only here are RANK and SLURM_* read; loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from trainyard.errors import UserError


@dataclass(frozen=True)
class World:
    """The ranks of a run, and which of them this process is."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launcher: str = "one process"
    rendezvous: str = ""  # names this attempt's rendezvous, equal on all ranks; empty: MASTER_ADDR is used
    launch_address: str = "127.0.0.1"  # of the node that started the ranks, which need not be rank 0's
    cores: int | None = None  # of this rank, if the launcher says; None: an equal share of the node's

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and logs."""
        return self.rank == 0


def read_world(environ: Mapping[str, str]) -> World:
    """Read which rank we are from Trainyard's launcher or torchrun (RANK ...), Slurm or submitit's local executor.

    Without any of them we are alone. Slurm's variables count only inside a job step: a batch script itself, or a
    shell from salloc, sees the whole Slurm job's SLURM_NTASKS without being one of its tasks. In a step with a terminal
    (srun -n4 --pty bash) a person types into one of the tasks, and nobody into the others.

    Raises:
        UserError: the variables of one launcher are incomplete.
    """
    try:
        if "RANK" in environ and "WORLD_SIZE" in environ:
            return _read_torchrun(environ)
        if "SLURM_STEP_ID" in environ and "SLURM_PTY_PORT" not in environ:
            return _read_slurm(environ)
        if "SUBMITIT_LOCAL_NTASKS" in environ:
            return _read_submitit_local(environ)
    except KeyError as missing:
        raise UserError(
            f"The launcher's variables are incomplete: {missing.args[0]} is not set. Start with torchrun, srun, "
            "or trainyard run --gpus N."
        ) from None
    return World()


def find_idle_nodes(environ: Mapping[str, str]) -> str:
    """Return the nodes of a Slurm job that this process was given but is not on, as in a shell of salloc; else ""."""
    return "" if "SLURMD_NODENAME" in environ else environ.get("SLURM_JOB_NODELIST", "")


def read_attempt_id(environ: Mapping[str, str], *, started: float) -> str:
    """Return the attempt's id: "<Slurm job id>-<restarts>", as the batch script set it, or "local-<seconds>"."""
    return environ.get("TRAINYARD_ATTEMPT") or f"local-{int(started)}"


def _read_torchrun(environ: Mapping[str, str]) -> World:
    return World(
        rank=int(environ["RANK"]),
        local_rank=int(environ["LOCAL_RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"])),
        launcher="trainyard" if "TRAINYARD_MEETING" in environ else "torchrun",
        rendezvous=environ.get("TRAINYARD_MEETING", ""),
    )


def _read_slurm(environ: Mapping[str, str]) -> World:
    parts = (environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"], environ.get("SLURM_RESTART_COUNT", "0"))
    cores = environ.get("SLURM_CPUS_PER_TASK")
    return World(
        rank=int(environ["SLURM_PROCID"]),
        local_rank=int(environ["SLURM_LOCALID"]),
        world_size=int(environ.get("SLURM_NTASKS", "1")),
        local_world_size=int(environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split("(")[0].split(",")[0]),
        launcher="slurm",
        rendezvous="-".join(parts),
        launch_address=environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"),
        cores=int(cores) if cores else None,
    )


def _read_submitit_local(environ: Mapping[str, str]) -> World:
    count, rank = int(environ["SUBMITIT_LOCAL_NTASKS"]), int(environ["SUBMITIT_LOCAL_GLOBALID"])
    job_id = environ["SUBMITIT_LOCAL_JOB_ID"]
    return World(rank, int(environ["SUBMITIT_LOCAL_LOCALID"]), count, count, "submitit, here", f"local-{job_id}")
