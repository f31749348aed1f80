"""Every option of the tinydet family."""

from dataclasses import dataclass

from trainyard.config.settings import PackingPace, ReportSettings, TrainConfig, option


@dataclass
class ModelSettings:
    """A detection transformer (`vanilla.py`, `conditional.py`, `multiscale.py`), or FCOS (`fcos.py`)."""

    variant: str = option(
        "ms",
        "vanilla: DETR; cond: Conditional DETR; ms: multi-scale deformable attention, two stages, denoising; fcos: "
        "convolutions alone, which learn from few images; of the options below it takes those up to dims",
        choices=("vanilla", "cond", "ms", "fcos"),
    )
    backbone: str = option(
        "resnet50",
        "network that extracts the image features; small: a few convolutions, for CPUs",
        choices=("resnet18", "resnet34", "resnet50", "small"),
    )
    width: int = option(32, "channels of backbone=small at stride 4; twice as many at 8, four times from 16 on", low=8)
    norm: str = option(
        "auto",
        "norm of the backbone; auto: frozen with weights, else group. Only batch uses statistics of the micro-batch",
        choices=("auto", "frozen", "batch", "group"),
    )
    strides: list[int] = option(
        lambda: [8, 16, 32], "ms and fcos: feature levels, finest first: neighbours among 4, 8, 16, 32"
    )
    dilated: bool = option(False, "vanilla and cond: the last stage at stride 16 (DC5)")
    dims: int = option(256, "width of a token", low=16)
    heads: int = option(8, "attention heads", low=1)
    points: int = option(4, "ms: points that a head samples on each level", low=1)
    feedforward: int = option(1024, "hidden width of the feed-forward blocks", low=8)
    encoder_layers: int = option(1, "encoder layers (self-attention); ms: on the coarsest level", low=0)
    decoder_layers: int = option(6, "decoder layers, each with its own loss", low=1)
    queries: int = option(300, "most objects that can be found in an image", low=1)
    dropout: float = option(0.0, "dropout rate in attention and feed-forward blocks", low=0, high=0.9)
    temperature: float = option(
        0.0,
        "temperature of sine positions; 0: as published, 10000 for vanilla and cond, 20 for ms, which separates "
        "nearby positions",
        low=0,
        high=10_000,
    )
    anchor_strides: float = option(2.0, "ms: side of the anchor in each cell, in strides of its level", low=0.1)
    denoising: int = option(100, "ms: denoising queries, in addition to the others; 0: none", low=0)
    label_noise: float = option(0.5, "ms: share of denoising queries with another category", low=0, high=1)
    box_noise: float = option(1.0, "ms: shift of a denoising query's edges, in halves of its sides", low=0, high=2)
    backbone_weights: str = option("", "file of backbone weights, in torchvision's names; empty: random")
    backbone_lr: float = option(
        0.1, "factor on the learning rate of a backbone that starts from weights", low=0, high=1
    )
    weights: str = option(
        "", "file of detector weights, such as facebookresearch/detr's; its classifier is replaced if it does not fit"
    )


@dataclass
class LossSettings:
    """Matching and losses; matching uses the weights of the losses, except for `match_class`."""

    classification: str = option(
        "auto",
        "auto: softmax for vanilla, else focal; varifocal teaches scores the IoU, and nothing where boxes miss",
        choices=("auto", "softmax", "focal", "varifocal"),
    )
    match_class: float = option(0.0, "weight of the category in matching; 0: 1 for softmax, else 2", low=0)
    class_weight: float = option(0.0, "weight of the category loss; 0: 2 for focal, else 1", low=0)
    box_weight: float = option(5.0, "weight of L1 over centre and sides, relative to the input", low=0)
    overlap_weight: float = option(2.0, "weight of the overlap: GIoU and NWD together", low=0)
    nwd_share: float = option(0.0, "share of NWD in the overlap, in loss and matching; 1: NWD alone", low=0, high=1)
    nwd_px: float = option(0.0, "NWD's constant C in pixels of the input; 0: mean size of the training objects", low=0)
    no_object: float = option(0.1, "softmax: weight of queries without an object", low=0, high=1)
    denoising_weight: float = option(1.0, "weight of all losses of the denoising queries", low=0)
    normalise: str = option(
        "batch",
        "what losses are divided by: objects in the micro-batches of all ranks, or the training set's mean per "
        "image, which does not depend on how a batch is split",
        choices=("batch", "data"),
    )


@dataclass
class PhotometricSettings:
    """Photometric augmentation of training images, on the device; each change has its own probability."""

    colour_p: float = option(0.0, "probability of a change of brightness, contrast, saturation and hue", low=0, high=1)
    brightness: float = option(0.2, "brightness factor, uniform in 1 +- this", low=0, high=1)
    contrast: float = option(0.2, "contrast factor about the image's mean gray, uniform in 1 +- this", low=0, high=1)
    saturation: float = option(0.2, "saturation factor about each pixel's gray, uniform in 1 +- this", low=0, high=1)
    hue_deg: float = option(10.0, "rotation of the hue, uniform in +- this", low=0, high=180)
    clahe_p: float = option(0.0, "probability of local histogram equalisation of L in CIELAB", low=0, high=1)
    clahe_clip: float = option(2.0, "largest slope of a CLAHE tile's curve", low=1, high=64)
    clahe_tiles: int = option(8, "CLAHE tiles along each side", low=1, high=64)
    blur_p: float = option(0.0, "probability of motion blur along a line", low=0, high=1)
    blur_px: int = option(15, "longest blur line, odd; the shortest is 3", low=3, high=63)
    paste_p: float = option(
        0.0, "probability of pasting small objects from the next image of the micro-batch", low=0, high=1
    )
    paste_count: int = option(
        4, "most objects pasted into an image; one that would cover another is left out", low=1, high=6
    )
    paste_px: int = option(32, "longest side of a pasted object", low=4, high=128)


@dataclass
class BoxSettings:
    """Which boxes of a training image still count after it was cropped."""

    visible_min: float = option(0.4, "share of an object's box that must be inside the input", low=0, high=1)
    side_min_px: float = option(1.0, "shortest side of a box in the input", low=0)


@dataclass
class PackingSettings:
    """Options of packing. Changing one of these means packing again."""

    scale: float = option(1.0, "factor on the size of images and boxes, applied first", low=0.05, high=1)
    tile_px: int = option(0, "side of the tiles that images are cut into; 0: whole images", low=0)
    tile_overlap: float = option(0.2, "share of a tile's side that overlaps the next tile", low=0, high=0.9)
    tile_visible: float = option(0.4, "share of an object that a tile must show to include it", low=0, high=1)
    outside: str = option(
        "fail",
        "boxes wholly outside their image, or with negative sides: an error, or left out and counted",
        choices=("fail", "skip"),
    )
    side_min_px: float = option(1.0, "boxes with a shorter side are left out and counted", low=0)
    objects_max: int = option(0, "most objects in a sample; more is an error; 0: any number", low=0)
    val_share: float = option(
        0.15, "share of images, or sequences, for validation in annotation files that name no split", low=0
    )
    test_share: float = option(0.0, "the same for the test set", low=0, high=0.9)
    seed: int = option(0, "seed of the division into splits", low=0)


@dataclass
class EvaluationSettings:
    """Options of scoring."""

    areas: str = option(
        "aitod",
        "object sizes and detections per image: of AI-TOD (1/100/1500) or COCO (1/10/100)",
        choices=("aitod", "coco"),
    )
    detections: int = option(300, "most detections of a sample: those with the best scores", low=1)
    merge: str = option("iou", "measure by which detections of two tiles are one object", choices=("iou", "nwd"))
    merge_above: float = option(
        0.5, "IoU or NWD above which the detection with the lower score is dropped", low=0, high=1
    )
    bootstrap_draws: int = option(200, "resamples of the images behind each 95 % interval; 0: none", low=0)
    draw_samples: int = option(6, "samples drawn in the report: those with the worst and the best F1 scores", low=0)
    draw_above: float = option(0.3, "score above which a detection is drawn", low=0, high=1)


@dataclass
class Config(TrainConfig):
    """All options of a tinydet job."""

    packing_pace = PackingPace(0.019, 0.0026, 41)

    model: ModelSettings = option(ModelSettings, "network")
    loss: LossSettings = option(LossSettings, "matching and losses")
    photometric: PhotometricSettings = option(PhotometricSettings, "photometric augmentation")
    boxes: BoxSettings = option(BoxSettings, "boxes of cropped images")
    packing: PackingSettings = option(PackingSettings, "raw files to samples")
    evaluation: EvaluationSettings = option(EvaluationSettings, "scoring", mutable_on_resume=True)
    report: ReportSettings = option(lambda: ReportSettings(samples="on"), "report", mutable_on_resume=True)

    def explain_batch_dependence(self) -> str:
        """Return why results depend on the micro-batch; "" if they do not."""
        reasons = {
            "losses are divided by the objects of a micro-batch (loss.normalise=batch)": self.loss.normalise == "batch",
            "objects come from the next image of the micro-batch (photometric.paste_p)": self.photometric.paste_p > 0,
            "BatchNorm statistics are over a micro-batch (model.norm=batch)": self.model.norm == "batch",
        }
        return "; ".join(reason for reason, holds in reasons.items() if holds)

    def explain_varying_inputs(self) -> str:
        """Return why repeated layers get inputs of many shapes; "" if they do not: objects go to the losses."""
        return ""
