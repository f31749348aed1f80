"""Every option that all jobs share, with unit, default and range. No torch: the submitting side imports this too."""

import math
import re
import sys
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, NamedTuple

from trainyard.config.duration import Duration
from trainyard.errors import UserError


def option(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    mutable_on_resume: bool = False,
    duration: bool = False,
    per_channel: bool = False,
) -> Any:
    """Declare one option.

    Args:
        default: the value unless a preset or the command line sets another; a callable is a default factory.
        doc: one line about its effect, with its unit.
        choices: the allowed words; of a list, of each of its entries.
        low, high: the allowed closed range, also of each number in a list. Without `high`, any finite number
            is allowed, and a whole one up to `MOST_INT`. A duration is above 0, unless `low` is 0.
        mutable_on_resume: whether a resumed run may change it, because it does not affect the mathematics.
        duration: whether it is a length of training, such as 10ep, 2000st or 30min, or a list of them; the empty string
            means "never".
        per_channel: whether it is a number for all channels of an image, or a list with one for each; its type is Any.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "low": low,
        "high": high,
        "mutable_on_resume": mutable_on_resume,
        "duration": duration,
        "per_channel": per_channel,
    }
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


MOST_INT = 2**63 - 1
"""The largest int64: the upper bound of whole numbers, because PyTorch and NumPy take no larger size or index."""

HANG_MINUTES = 2.0
"""Default of `hang_minutes`, which also counts until a rank has read its config."""


@dataclass
class DataSettings:
    """Where samples come from, and how they are read."""

    path: str = option(
        "", "folder of raw files, or of packed shards; empty: the job's own synthetic data, if it has any"
    )
    cache: str = option("data", "folder that packed shards go to when `path` holds raw files", mutable_on_resume=True)
    synthetic: int = option(0, "samples to synthesize when `path` is empty; 0: this job needs data", low=0)
    on_error: str = option(
        "fail", "how packing treats an unreadable raw file", choices=("fail", "skip"), mutable_on_resume=True
    )
    order: str = option(
        "shuffle",
        "order of an epoch: each sample once, identities x samples, each once in batches of similar length, or drawn "
        "by weight, as many as there are samples",
        choices=("shuffle", "pxk", "buckets", "weighted"),
    )
    order_by: str = option(
        "", "column with the identity of a sample, for order=pxk, its length, for buckets, or its weight, for weighted"
    )
    samples_per_identity: int = option(4, "K of order=pxk", low=2)
    balance_by: str = option(
        "", "column of which the K samples of an identity hold each value equally often, such as both twins of a family"
    )
    balanced_repeats: int = option(
        1,
        "how often an epoch deals an identity with several values of balance_by; 3: twins three times, others once",
        low=1,
    )
    decode: str = option(
        "auto",
        "who decodes images and audio; auto: DALI where it is installed, otherwise the CPU",
        choices=("auto", "dali", "cpu"),
        mutable_on_resume=True,
    )
    threads: int = option(0, "decoding threads per rank; 0: the cores this rank may use", low=0, mutable_on_resume=True)
    prefetch: int = option(2, "batches decoded in advance", low=1, high=64, mutable_on_resume=True)
    stage: str = option(
        "auto",
        "whether packed data is copied once to the node's scratch disk, if it has one",
        choices=("auto", "off"),
        mutable_on_resume=True,
    )
    check_crc: str = option(
        "first",
        "when a rank compares a record with its checksum: first: when it first reads it, so that a file that changes "
        "on disk later is not noticed before the next attempt; always: in every epoch; off: never",
        choices=("first", "always", "off"),
        mutable_on_resume=True,
    )


@dataclass
class ImageSettings:
    """Images as the model sees them."""

    height_px: int = option(299, "height after resizing", low=8)
    width_px: int = option(299, "width after resizing", low=8)
    channels: int = option(1, "1: gray, 3: RGB", low=1, high=3)
    fill: int = option(255, "gray level of pixels outside the image", low=0, high=255)
    mean: Any = option(
        0.0, "subtracted after scaling to 0..1: of all channels, or of each, as [0.485,0.456,0.406]", per_channel=True
    )
    std: Any = option(
        1.0,
        "divided by after subtracting the mean: of all channels, or of each, as [0.229,0.224,0.225]",
        low=1e-6,
        per_channel=True,
    )
    fit: str = option(
        "stretch",
        "stretch: resized to height and width; letterbox: scaled to fit, in the upper left corner, then padded",
        choices=("stretch", "letterbox"),
    )
    scales: list[float] = option(
        lambda: [1.0], "factors on height and width, one drawn per global training batch; each makes another shape"
    )


KEEP, JPEG = "keep", "jpeg"
"""Values of `packing.store`: the files' bytes; images encoded again, with losses."""


@dataclass
class StoreSettings:
    """Options of storing images; families derive their `packing` from it."""

    store: str = option(
        KEEP,
        "images in packed data: keep: the files' bytes; input-png, input-raw: resized to the model's input, as PNG or "
        "uncompressed, which gives the same batches with less work; jpeg: RGB images encoded again, with losses that "
        "packing measures. A change packs again",
        choices=(KEEP, "input-png", "input-raw", JPEG),
    )
    longest_side_px: int = option(0, "store=jpeg: longer images are scaled down to this; 0: none is scaled", low=0)
    quality: int = option(90, "store=jpeg: JPEG quality, as Pillow defines it", low=1, high=100)


@dataclass
class HoldOutSettings:
    """Which samples are held out; for families to derive their `packing` from (`data.labelled.assign_sets`)."""

    val_share: float = option(
        0.15, "share that selects the checkpoint, of each class, unless the raw files say", low=0, high=0.5
    )
    test_share: float = option(0.15, "share to test on, of each class, unless the raw files say", low=0, high=0.5)
    seed: int = option(0, "seed of the division into sets", low=0)


@dataclass
class EvaluationSettings:
    """Scoring; for families to take as `evaluation`."""

    bootstrap_draws: int = option(1000, "resamples behind each 95 % interval; 0: none", low=0)


@dataclass
class AudioSettings:
    """Audio as the model sees it."""

    frames: int = option(
        64_600, "length: a random segment in training, the first in evaluation; shorter recordings repeat", low=1
    )
    segments: str = option(
        "first",
        "in evaluation and predict: the first segment, or the mean over all, each half a segment after the one before; "
        "whole recordings are in memory",
        choices=("first", "sliding"),
    )
    rate_hz: int = option(16_000, "sampling rate; packing ensures it", low=1000)


@dataclass
class AugmentSettings:
    """Random changes to a training image, drawn per (seed, epoch, sample); 0 disables one."""

    rotate_deg: float = option(0.0, "rotation, uniform in +- this", low=0, high=180)
    shift: float = option(0.0, "shift along each axis, as a fraction of the image, uniform in +- this", low=0, high=1)
    zoom: float = option(0.0, "log-uniform scale between 1/(1+z) and 1+z", low=0, high=4)
    crop_area_min: float = option(1.0, "random-resized crop: smallest area fraction; 1: no crop", low=0.01, high=1)
    crop_aspect_max: float = option(1.0, "random-resized crop: largest aspect ratio (and 1/ratio)", low=1, high=4)
    scale_min: float = option(1.0, "letterbox: smallest scale, 1 being the fit; log-uniform", low=0.05, high=20)
    scale_max: float = option(
        1.0, "letterbox: largest scale; an image that no longer fits is cropped at random", low=0.05, high=20
    )
    crop_keeps: str = option("", "letterbox: record of boxes (xyxy in pixels); each crop contains one if possible")
    flip: float = option(0.0, "probability of a left-right flip", low=0, high=1)
    gain: float = option(0.0, "brightness factor, uniform in 1 +- this", low=0, high=1)
    contrast: float = option(0.0, "contrast around mid-gray, log-uniform between 1/(1+c) and 1+c", low=0, high=4)


@dataclass
class OptimizerSettings:
    """The optimizer. Fused kernels only: they can skip a step that is not finite on the device."""

    name: str = option("adamw", "algorithm", choices=("adamw", "adam", "sgd"))
    lr: float = option(1e-3, "peak learning rate, for this global batch size", low=0)
    weight_decay: float = option(0.0, "decoupled for adamw, L2 otherwise; not on vectors", low=0)
    beta1: float = option(0.9, "first moment of Adam, momentum of SGD", low=0, high=0.9999)
    beta2: float = option(0.999, "second moment of Adam", low=0, high=0.99999)


@dataclass
class ScheduleSettings:
    """The learning rate over the run, as a pure function of the step."""

    name: str = option("cosine", "shape after warm-up", choices=("cosine", "step", "one_cycle", "constant"))
    warmup: str = option("0st", "linear rise from 0", low=0, duration=True)
    final_ratio: float = option(0.0, "final learning rate / peak (cosine, one_cycle)", low=0, high=1)
    milestones: list[str] = option(list, "when the step schedule drops, such as [30ep, 60ep]", duration=True)
    drop: float = option(0.1, "factor of each drop (step)", low=0, high=1)


@dataclass
class CheckpointSettings:
    """When checkpoints are written, and which are kept."""

    every: str = option(
        "",
        "fixed interval; empty: computed from the measured cost of a save (Young 1974, Daly 2006)",
        mutable_on_resume=True,
        duration=True,
    )
    max_minutes: float = option(15.0, "upper bound of the measured interval", low=0.01, mutable_on_resume=True)
    mtbf_hours: float = option(
        24.0, "mean time between failures that the formula assumes", low=0.01, mutable_on_resume=True
    )
    keep_last: int = option(2, "newest checkpoints kept", low=1, mutable_on_resume=True)
    keep_every: str = option("", "also keep one per interval, forever", mutable_on_resume=True, duration=True)
    background: bool = option(
        True,
        "train while a checkpoint is written, from a copy in host memory; without room for it, training waits",
        mutable_on_resume=True,
    )


@dataclass
class NeedsSettings:
    """Requirements of a preset on each GPU. Planning refuses a type with less; 0 and "" state nothing."""

    memory_gib: float = option(0.0, "memory of a GPU; 0: that of `card`, if it names one", low=0)
    micro_batch_size: int = option(0, "samples of a micro-batch that this memory is stated for; 0: of any", low=0)
    card: str = option("", "the card that the preset was written for, such as p100 or a100-80: chosen first")


@dataclass
class ReportSettings:
    """Options of a run's report. A family whose samples others may see sets the default of `samples` to on."""

    samples: str = option(
        "off",
        "show samples, such as the best and the worst; off: only plots of whole sets, without a name or an image of "
        "any sample, because pages are shared",
        choices=("on", "off"),
        mutable_on_resume=True,
    )

    def __post_init__(self) -> None:
        """Accept YAML's reading of a bare `on` or `off`."""
        self.samples = {"true": "on", "false": "off"}.get(self.samples.lower(), self.samples)


@dataclass
class TrackingSettings:
    """Options of trackers."""

    project: str = option("", "project in W&B, experiment in MLflow; empty: the job")
    tags: list[str] = option(list, "tags in W&B and MLflow, such as [night,baseline]")


class PackingPace(NamedTuple):
    """The seconds that a sample takes one core; `python -m benchmarks.packing_pace` measures them."""

    draw_s: float  # to synthesize it
    pack_s: float  # to read, encode and write it
    raw_kb: float  # of the raw files that were measured; larger ones take longer in proportion


@dataclass
class TrainConfig:
    """The options of every job. A family subclasses this in its `config.py` and adds its own options."""

    packing_pace: ClassVar[PackingPace] = PackingPace(0.05, 0.15, 64)  # slower than any that was measured

    job: str = option("", "preset; filled in by the launcher")
    family: str = option("", "folder of the preset; filled in by the launcher")
    seed: int = option(0, "of weights, order, augmentation and dropout", low=0, high=2**64 - 1)  # as manual_seed takes
    data: DataSettings = option(DataSettings, "data")
    image: ImageSettings = option(ImageSettings, "images")
    sound: AudioSettings = option(AudioSettings, "audio")
    augment: AugmentSettings = option(AugmentSettings, "augmentation")
    global_batch_size: int = option(32, "samples per optimizer step over all ranks", low=1)
    micro_batch_size: int = option(
        0, "samples per micro-batch; 0: the rank's whole share. Batch statistics are computed over these", low=0
    )
    halve_micro_batch: str = option(
        "auto",
        "if a GPU's memory is not enough: halve the micro-batch, keep the global batch and resume; auto: where results "
        "do not depend on the micro-batch",
        choices=("auto", "always", "never"),
        mutable_on_resume=True,
    )
    probe_memory: str = option(
        "auto",
        "try the largest step and evaluation batch before training, which changes nothing; auto: on a GPU",
        choices=("auto", "on", "off"),
        mutable_on_resume=True,
    )
    eval_batch_size: int = option(64, "samples a rank evaluates at once", low=1, mutable_on_resume=True)
    start_from: str = option(
        "", "a run, or a file of weights, that a new run begins with: safetensors or from torch.save; empty: random"
    )
    start_from_partial: list[str] = option(
        list, "load only the tensors of these names or patterns, such as [network.backbone.*]; empty: all must match"
    )
    expects_weights: str = option(
        "", "kind of weights that the learning rates suit: a run that starts from random ones gets a warning"
    )
    max_duration: str = option("10ep", "when training is complete", duration=True)
    max_runtime: str = option(
        "",
        "save and exit after this wall time, such as 8h30m, before the limit of a session",
        low=0,
        mutable_on_resume=True,
        duration=True,
    )
    optimizer: OptimizerSettings = option(OptimizerSettings, "optimizer")
    schedule: ScheduleSettings = option(ScheduleSettings, "learning rate")
    clip_grad_norm: float = option(1.0, "largest global gradient norm; 0: no clipping", low=0)
    ema_decay: float = option(
        0.0,
        "decay per step of the averaged weights used for evaluation and export; 0: no averaging",
        low=0,
        high=0.99999,
    )
    precision: str = option("auto", "data type of matrix products", choices=("auto", "fp32", "fp16", "bf16"))
    channels_last: str = option("auto", "memory layout of images", choices=("auto", "on", "off"))
    swa: bool = option(
        False,
        "average the weights at each new best validation score, and score the test sets with that average, after "
        "recomputing BatchNorm statistics on training samples",
    )
    compile: str = option(
        "auto",
        "torch.compile; auto: off, until a measurement shows that it pays; graphs: and one CUDA graph starts all "
        "kernels of a layer, on GPUs, where shapes are fixed",
        choices=("auto", "on", "off", "graphs"),
    )
    gradient_checkpointing: bool = option(False, "recompute repeated layers in the backward pass to save memory")
    sync_batchnorm: bool = option(
        False, "on several GPUs, BatchNorm uses the statistics of all ranks' micro-batches, not each rank its own"
    )
    find_unused_parameters: str = option(
        "auto",
        "on several ranks, look in each step for parameters that its micro-batches do not use; auto: where the first "
        "micro-batches of some ranks use parameters that those of others do not",
        choices=("auto", "on", "off"),
        mutable_on_resume=True,
    )
    deterministic: bool = option(
        True, "use deterministic kernels; if torch has all, a resume is bitwise equal on a GPU"
    )
    eval_every: str = option("1ep", "evaluation interval", mutable_on_resume=True, duration=True)
    eval_on_start: bool = option(
        False, "score the validation and the test sets also before the first step: a baseline for training"
    )
    score_baselines: bool = option(
        True,
        "after training, also score the family's methods without a network on the first test set: the page's verdict "
        "is about the best of them",
        mutable_on_resume=True,
    )
    monitor: str = option(
        "",
        "validation metrics that decide which checkpoint is the best, such as eer:min,d_prime:max: each decides where "
        "those before are equal, then the earlier one wins; empty: the family's own",
    )
    patience: int = option(
        0,
        "training is complete after this many evaluations in a row without a better first metric; 0: never",
        low=0,
        mutable_on_resume=True,
    )
    min_delta: float = option(0.0, "how much better it has to be, for patience", low=0)
    log_every: str = option("20st", "interval of log lines and metrics", duration=True)
    hang_minutes: float = option(
        HANG_MINUTES,
        "a rank without progress for so long hangs, and the attempt ends; start-up, evaluation and saving may take 14 "
        "times as long; 0: never",
        low=0,
        mutable_on_resume=True,
    )
    needs: NeedsSettings = option(NeedsSettings, "requirements on a GPU", mutable_on_resume=True)
    checkpoint: CheckpointSettings = option(CheckpointSettings, "checkpoints", mutable_on_resume=True)
    trackers: list[str] = option(
        lambda: ["tensorboard"],
        "where metrics are also sent",
        choices=("tensorboard", "wandb", "mlflow"),
        mutable_on_resume=True,
    )
    tracking: TrackingSettings = option(TrackingSettings, "trackers", mutable_on_resume=True)
    report: ReportSettings = option(ReportSettings, "report", mutable_on_resume=True)

    def refuse_conflicts(self) -> None:
        """Refuse options of the family that do not fit together: before data are made, read or packed.

        Raises:
            UserError: they do not; has the option to type.
        """

    def explain_batch_dependence(self) -> str:
        """Return why results depend on `micro_batch_size`; "" if they do not, so that planning may choose another."""
        return f"family {self.family} does not say whether results depend on the micro-batch"

    def explain_varying_shapes(self) -> str:
        """Return why the model's repeated layers get inputs of many shapes; "" if only a last batch differs."""
        if len(self.image.scales) > 1:
            return "image.scales draws a size for each step"
        return self.explain_varying_inputs()

    def explain_varying_inputs(self) -> str:
        """Return why samples of one size of image give inputs of many shapes; a family says "" if they do not."""
        return f"family {self.family} does not say that its layers' inputs have one shape"


def check(config: Any, prefix: str = "") -> None:
    """Check every value against its option's choices and range.

    Raises:
        UserError: a value is not allowed; names the option, the allowed values and the value found.
    """
    for f in fields(config):
        value, name = getattr(config, f.name), prefix + f.name
        if is_dataclass(value):
            check(value, name + ".")
        elif f.metadata.get("per_channel"):
            _check_channels(f, name, value, channels=config.channels)
        else:
            _check_value(f, name, value)
    if isinstance(config, TrainConfig):
        parse_monitor(config.monitor)
        _check_schedule(config.schedule, config.max_duration)
        _check_store(config)
        config.refuse_conflicts()


def explain_more_than_resize(image: ImageSettings, augment: AugmentSettings) -> str:
    """Return what loading does to an image before or instead of one fixed resize; "" if it only resizes."""
    if image.fit != "stretch":
        return f"image.fit={image.fit} scales and pads each image on its own"
    if image.scales != [1.0]:
        return f"image.scales=[{','.join(map(str, image.scales))}] draws a size for each batch"
    if (augment.crop_area_min, augment.crop_aspect_max) != (1, 1):
        crop = f"augment.crop_area_min={augment.crop_area_min:g} crop_aspect_max={augment.crop_aspect_max:g}"
        return f"{crop} crops at random before resizing"
    return ""


def _check_store(config: TrainConfig) -> None:
    """Check that images which packing resizes need nothing else on the host, and that lossy packing is asked for."""
    packing, why = getattr(config, "packing", None), explain_more_than_resize(config.image, config.augment)
    if not isinstance(packing, StoreSettings):
        return
    if packing.store == JPEG and config.image.channels != 3:
        raise UserError(
            f"packing.store={JPEG} is for RGB images, but this job has image.channels={config.image.channels}: in gray "
            f"images, such as prints, the losses are in the detail that the model compares. Type packing.store={KEEP}."
        )
    if packing.store != JPEG and (packing.longest_side_px, packing.quality) != (0, StoreSettings.quality):
        raise UserError(
            f"packing.longest_side_px={packing.longest_side_px} packing.quality={packing.quality} are for "
            f"packing.store={JPEG}, but it is {packing.store}. Type packing.store={JPEG}, or leave both out."
        )
    if packing.store not in (KEEP, JPEG) and why:
        raise UserError(
            f"packing.store={packing.store} resizes images when they are packed, but {why}, which needs the whole "
            f"image. Type packing.store={KEEP}, or leave that option out."
        )


def _check_schedule(schedule: ScheduleSettings, max_duration: str) -> None:
    """Check that a learning rate that is a function of the step knows its steps."""
    if schedule.name in ("cosine", "one_cycle") and Duration.parse(max_duration).unit == "min":
        raise UserError(
            f"schedule.name={schedule.name} needs the number of steps, but max_duration={max_duration} is a time. "
            "Write max_duration in epochs (10ep) or steps (2000st), or use schedule.name=constant."
        )
    for name, texts in (("warmup", [schedule.warmup]), ("milestones", schedule.milestones)):
        for text in texts:
            if text and Duration.parse(text).unit == "min":
                raise UserError(
                    f"schedule.{name}: '{text}' is a time, but a number of steps is needed. Write 10ep or 2000st."
                )


def _check_channels(f: Field[Any], name: str, value: Any, *, channels: int) -> None:
    """Check a number for all channels, or a list with one for each."""
    numbers = value if isinstance(value, list) else [value] * channels
    if not all(type(number) is int or (type(number) is float and math.isfinite(number)) for number in numbers):
        raise UserError(f"{name}={value}: expected a number, or a list with one per channel, such as [0.5,0.5,0.5].")
    if len(numbers) != channels:
        raise UserError(
            f"{name}={value}: {len(numbers)} numbers for image.channels={channels}. Give one per channel, or one "
            "for all."
        )
    for number in numbers:
        _check_value(f, name, number)


def _check_value(f: Field[Any], name: str, value: Any) -> None:
    rule = f.metadata
    for item in value if isinstance(value, list) else [value]:
        if rule.get("choices") and item not in rule["choices"]:
            each = "each entry one" if isinstance(value, list) else "one"
            raise UserError(f"{name}={item}: expected {each} of {', '.join(rule['choices'])}.")
        if rule.get("duration"):
            _check_duration(name, item, allows_zero=rule.get("low") == 0)
        elif isinstance(item, int | float):
            _check_number(name, item, low=rule.get("low"), high=rule.get("high"))


def _check_number(name: str, number: float, *, low: float | None, high: float | None) -> None:
    """Check that a number is within its range and finite, and if it is whole, that PyTorch and NumPy can take it."""
    most = MOST_INT if isinstance(number, int) else sys.float_info.max
    lowest, highest = -most if low is None else low, most if high is None else high
    if lowest <= number <= highest:  # false of NaN
        return
    if isinstance(number, int) and abs(number) > most:
        allowed = f"{lowest} to {highest}"
    else:
        allowed = f"{low} or more" if high is None else f"at most {high}" if low is None else f"{low} to {high}"
    if not isinstance(number, int) and not math.isfinite(number):
        allowed = "a finite number" if low is None and high is None else f"{allowed}, and finite"
    raise UserError(f"{name}={number}: expected {allowed}.")


def _check_duration(name: str, text: str, *, allows_zero: bool) -> None:
    if not text:
        return
    try:
        length = Duration.parse(text)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    if not length.value and not allows_zero:
        raise UserError(f"{name}={text}: expected more than 0, such as 10ep, 2000st or 30min.")


def parse_monitor(text: str) -> tuple[tuple[str, str], ...]:
    """Read the option `monitor`: "eer:min,d_prime:max", the deciding metric first; nothing of "".

    Raises:
        UserError: another form.
    """
    matches = [re.fullmatch(r"\s*([^\s:,]+):(min|max)\s*", part) for part in text.split(",")] if text else []
    if not all(matches):
        raise UserError(
            f"monitor={text}: expected metrics, each with min or max, such as monitor=eer:min,d_prime:max. Leave it "
            "out for the family's own."
        )
    return tuple((match[1], match[2]) for match in matches if match)
