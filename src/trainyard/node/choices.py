"""Chooses, in a rank, all that depends on its machine and on the data, and records each choice with its reason."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from trainyard.choice import Choice
from trainyard.config.families import format_families, load_family
from trainyard.config.settings import TrainConfig
from trainyard.errors import UserError
from trainyard.hardware import (
    Precision,
    choose_compute_threads,
    choose_precision,
    choose_sync_batchnorm,
    count_cores,
    explain_missing_compiler,
    explain_missing_gpu,
    explain_missing_kernels,
    find_gpu_by_name,
    read_driver_version,
    read_openmp_wait_policy,
    reuse_compute_threads,
)
from trainyard.node import compile_cache
from trainyard.runs import folder
from trainyard.runs.folder import ENV_FILE, update_env
from trainyard.runs.history import read_object
from trainyard.runs.lock import RunLock
from trainyard.runs.observations import learn_from_errors, read_limit
from trainyard.split import split_batch
from trainyard.text import count_nouns
from trainyard.train.world import World, read_attempt_id

if TYPE_CHECKING:
    import torch

    from trainyard.data.shards import ShardSet
    from trainyard.data.stage import Staged
    from trainyard.train.heartbeat import Heartbeat
    from trainyard.train.module import TrainModule
    from trainyard.train.run_context import RunContext


FEW_BATCHES = 4
"""With fewer global batches in the training set, the run logs its number of steps."""

FEW_TRIALS = 30
"""Fewer validation samples cannot show an error rate below a tenth: `scoring.compute_smallest_rate`."""


def build_context(
    run: Path,
    config: TrainConfig,
    staged: "Staged",
    jobs_dir: Path,
    world: World,
    heartbeat: "Heartbeat",
    lock: RunLock | None,
    environ: Mapping[str, str],
) -> "RunContext":
    """Choose everything that depends on this machine and on the data, and record each choice with its reason."""
    import numpy as np
    import torch

    from trainyard.data.shards import ShardSet
    from trainyard.data.splits import find_splits
    from trainyard.train import distributed
    from trainyard.train.contract import build_module
    from trainyard.train.module import DataInfo
    from trainyard.train.run_context import RunContext

    device = distributed.select_device(world, environ)
    policy, choices = _choose_settings(run, config, world, device, environ)
    # also waits until every rank has read the record
    threads_by_rank = distributed.gather_to_rank0(choices["compute_threads"].value)
    data = ShardSet(staged.folder)
    choices["stage"] = Choice(str(data.folder) if staged.copied else "off", staged.reason)
    choices["reader"] = Choice(data.reader, data.reader_reason)
    pack = load_family(jobs_dir, config.family, "pack")
    splits = find_splits(pack, data, config)
    if repeated := len(splits["train"]) - len(np.unique(splits["train"])):
        logger.info("oversampling: {} of {} training ids are repeated ones", repeated, len(splits["train"]))
    if policy.compile:
        choices["compile_cache"] = _set_compile_cache(environ, device)
    if world.is_main:
        update_env(run, "exactness", {"compute_threads_by_rank": threads_by_rank})
        _record_data(run, choices, config.data.path, data, {name: len(ids) for name, ids in splits.items()})
    torch.manual_seed(config.seed)
    info = DataInfo.from_shards(data, splits["train"])
    module = build_module(jobs_dir, config, info)
    if world.is_main:
        _warn_of_batch(run, config, module, choices, world, samples=len(splits["train"]))
        warn_of_few_samples(config, {name: len(ids) for name, ids in splits.items()}, jobs_dir)
    decode, threads = choices["decode"].value, choices["threads"].value
    check_owner = lock.check if lock else lambda: None
    return RunContext(
        config,
        module,
        data,
        splits,
        world,
        device,
        policy,
        decode,
        threads,
        run,
        heartbeat,
        check_owner,
        micro_batch_size=choices["micro_batch_size"].value,
        eval_batch_size=choices["eval_batch_size"].value,
    )


def _warn_of_batch(
    run: Path,
    config: TrainConfig,
    module: "TrainModule",
    choices: Mapping[str, Choice[Any]],
    world: World,
    *,
    samples: int,
) -> None:
    """Warn of a batch that is too large or too small, and record the number of samples behind batch statistics."""
    from trainyard.train.data_parallel import FEW_SAMPLES, describe_batch_statistics

    if config.global_batch_size > samples:
        logger.warning(
            "global_batch_size={}: the training set has {} samples, so each step takes all of them",
            config.global_batch_size,
            samples,
        )
    statistics = describe_batch_statistics(
        module,
        micro_batch_size=choices["micro_batch_size"].value,
        world_size=world.world_size,
        sync_batchnorm=choices["sync_batchnorm"].value,
    )
    if statistics is not None:
        record_choices(run, {"batch_statistics": statistics})
        if statistics.value < FEW_SAMPLES:
            logger.warning("{}", statistics.reason)


def warn_of_few_samples(config: TrainConfig, sizes: Mapping[str, int], jobs_dir: Path) -> None:
    """Warn that a small data set gives few steps, or cannot tell checkpoints apart."""
    from trainyard.scoring import compute_smallest_rate  # loads NumPy
    from trainyard.train.run_context import TRAIN, VALIDATION, compute_total_steps

    batch, samples, validation = config.global_batch_size, sizes[TRAIN], sizes.get(VALIDATION, 0)
    steps = -(-samples // batch)
    if batch <= samples < FEW_BATCHES * batch and (total := compute_total_steps(config, steps)) is not None:
        logger.warning(
            "{} training samples are {} steps of global_batch_size={}, and {} in the whole run; more steps: a smaller "
            "global_batch_size, or a larger max_duration",
            samples,
            steps,
            batch,
            total,
        )
    if 0 < validation < FEW_TRIALS:
        logger.warning(
            "the validation set has {} samples: without any error they show an error rate below {:.0%} at best (rule "
            "of 3, ISO/IEC 19795-1), so the checkpoint that is best on them may only be lucky. To choose them: "
            "trainyard options {}{}",
            validation,
            compute_smallest_rate(validation),
            config.job,
            format_families(config.job, jobs_dir),
        )


def _choose_settings(
    run: Path, config: TrainConfig, world: World, device: "torch.device", environ: Mapping[str, str]
) -> tuple[Precision, dict[str, Choice[Any]]]:
    """Choose what depends on this machine alone, and set this process's switches and threads accordingly.

    Raises:
        UserError: this machine cannot do something that the config asks for.
    """
    from trainyard.train import distributed, precision

    sm, name = _describe_device(device)
    _check_device(sm, world, environ)
    policy = choose_precision(
        sm,
        precision=config.precision,
        channels_last=config.channels_last,
        compile=config.compile,
        varying_shapes=config.explain_varying_shapes(),
    )
    if policy.compile and (missing := explain_missing_compiler(sm, environ)):
        raise UserError(
            f"Rank {world.rank}: this run compiles its model, but {missing}. Use a container image, which has it, or "
            "start a new run with compile=off."
        )
    has_dali = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None
    cores = _choose_cores(world)
    choices: dict[str, Choice[Any]] = {
        "device": Choice(name, f"rank 0 of {world.world_size}, started by {world.launcher}"),
        **{name: Choice(getattr(policy, name), reason) for name, reason in policy.reasons.items()},
        "cudnn_benchmark": precision.set_switches(policy, deterministic=config.deterministic),
        "decode": choose_decoder(config.data.decode, has_dali=has_dali),
        "threads": Choice(config.data.threads, "data.threads") if config.data.threads else cores,
        "compute_threads": _set_compute_threads(run, world, sm, cores, environ),
        "collectives": distributed.choose_collectives(environ.get("CUDA_VISIBLE_DEVICES", "")),
        "openmp_wait": read_openmp_wait_policy(environ),
        **_choose_batch_sizes(run, config, world),
        "freed_memory": precision.keep_freed_memory(device),
        "sync_batchnorm": choose_sync_batchnorm(
            config.sync_batchnorm, device_type=device.type, world_size=world.world_size
        ),
    }
    if choices["decode"].value == "dali" and device.type == "cuda":
        from trainyard.data.decode_dali import choose_gpu_decoding

        choices |= choose_gpu_decoding()
    return policy, choices


def choose_decoder(wanted: str, *, has_dali: bool) -> Choice[str]:
    """Return the decoder of images and audio for data.decode=`wanted`.

    Raises:
        UserError: DALI is requested, but not installed.
    """
    if wanted == "cpu":
        return Choice("cpu", "requested")
    if has_dali:
        reason = "requested" if wanted == "dali" else "installed, and bit-equal to the CPU reference on the host"
        return Choice("dali", reason)
    if wanted == "dali":
        raise UserError(
            "data.decode=dali, but nvidia.dali is not installed here. Use data.decode=cpu, or a container image that "
            "has DALI."
        )
    return Choice("cpu", "nvidia.dali is not installed here")


def _check_device(sm: int | None, world: World, environ: Mapping[str, str]) -> None:
    """Refuse a GPU for which torch has no kernels, and the CPU where a GPU is expected."""
    import torch

    if sm is None:
        fault = explain_missing_gpu(read_driver_version(), environ)
    else:
        fault = explain_missing_kernels(sm, torch.cuda.get_arch_list())
    if fault:
        raise UserError(f"Rank {world.rank}: {fault}")


def _set_compile_cache(environ: Mapping[str, str], device: "torch.device") -> Choice[Any]:
    """Make torch.compile keep its code in this user's folder, and load it from there."""
    import torch

    cache = compile_cache.choose_cache(
        environ,
        card=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        torch_version=torch.__version__,
        attempt=read_attempt_id(environ, started=0),
    )
    kernels = environ.get("TRITON_CACHE_DIR") or str(cache.value / "triton")
    os.environ.update(dict(zip(compile_cache.CACHE_VARIABLES, (str(cache.value), kernels), strict=True)))
    return Choice(str(cache.value), cache.reason)


def _describe_device(device: "torch.device") -> tuple[int | None, str]:
    """Return a device's compute capability (major * 10 + minor; None: CPU) and its name."""
    import torch

    from trainyard.train.precision import read_capability

    if device.type == "cpu":
        return None, f"CPU, {count_cores()} cores"
    name = torch.cuda.get_device_name(device)
    memory_gib = torch.cuda.get_device_properties(device).total_memory / 2**30
    known = find_gpu_by_name(name, memory_gib)
    return read_capability(device), f"{name}, {memory_gib:.1f} GiB" + ("" if known else " (not in the GPU table)")


def _choose_cores(world: World) -> Choice[int]:
    """Choose how many cores this rank may keep busy."""
    usable = count_cores()
    if world.cores is not None:  # bound or not: Slurm grants a rank this many, and this machine may have fewer
        granted = f"Slurm's cores per task ({world.cores}), of {usable} usable here"
        return Choice(max(1, min(world.cores, usable)), granted)
    return Choice(max(1, usable // world.local_world_size), "cores of this process, split among the ranks of the node")


def _set_compute_threads(
    run: Path, world: World, sm: int | None, cores: Choice[int], environ: Mapping[str, str]
) -> Choice[int]:
    """Choose with how many threads torch computes on the host, and set that; on the CPU, a run keeps its number."""
    import torch

    threads = choose_compute_threads(environ, cores=cores.value, reason=cores.reason, launcher=world.launcher)
    if sm is None:
        threads = reuse_compute_threads(_read_compute_threads(run, world), threads)
    torch.set_num_threads(threads.value)
    return threads


def _read_compute_threads(run: Path, world: World) -> int | None:
    """Return how many threads this rank computed with in the last attempt with as many ranks; None if none is known."""
    by_rank = read_object(run / ENV_FILE).get("exactness", {}).get("compute_threads_by_rank")
    return int(by_rank[world.rank]) if by_rank and len(by_rank) == world.world_size else None


def _choose_batch_sizes(run: Path, config: TrainConfig, world: World) -> dict[str, Choice[Any]]:
    """Choose how many samples are trained and evaluated at once: at most as many as fitted so far."""
    from trainyard.train import distributed

    if world.is_main and (reason := learn_from_errors(run)):
        logger.warning("micro-batch {}", reason)
    names = ("micro_batch_size", "eval_batch_size")
    limits = [read_limit(run, name) if world.is_main else None for name in names]
    micro_limit, eval_limit = distributed.broadcast_from_rank0(limits)
    batch, ranks, lowered = config.global_batch_size, world.world_size, ""
    split = split_batch(batch, ranks=ranks, micro_batch=config.micro_batch_size)
    if micro_limit is not None and micro_limit.value < split.micro_batch:
        split, lowered = split_batch(batch, ranks=ranks, micro_batch=micro_limit.value), f"; {micro_limit.reason}"
    micro_batches = count_nouns(split.accumulation_steps, "micro-batch")
    why_micro = f"global batch {batch} over {count_nouns(ranks, 'rank')}, {micro_batches} each{lowered}"
    evaluated = Choice(config.eval_batch_size, "eval_batch_size")
    if eval_limit is not None and eval_limit.value < config.eval_batch_size:
        evaluated = Choice(eval_limit.value, eval_limit.reason)
    return {"micro_batch_size": Choice(split.micro_batch, why_micro), "eval_batch_size": evaluated}


def _record_data(
    run: Path, choices: Mapping[str, Choice[Any]], path: str, data: "ShardSet", sizes: Mapping[str, int]
) -> None:
    from trainyard.data.store import explain_images

    stored = explain_images(data.records, data.meta)
    record_choices(run, choices if stored is None else {**choices, "images": stored})
    update_env(run, "data", {"path": path, "fingerprint": data.fingerprint, "samples": data.count})
    update_env(run, "data", {"skipped": data.skipped, "splits": dict(sizes)})
    logger.info("{:<16} {}", "data", "  ".join(f"{name} {size}" for name, size in sizes.items()))


def record_choices(run: Path, choices: Mapping[str, Choice[Any]]) -> None:
    """Record choices in the run, and log them."""
    folder.record_choices(run, choices)
    for name, choice in choices.items():
        logger.info("{:<16} {}  ({})", name, *choice)
