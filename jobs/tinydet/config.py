"""Every option of the tinydet family."""

from dataclasses import dataclass

from trainyard.settings import TrainConfig, option


@dataclass
class ModelSettings:
    """A detection transformer (`vanilla.py`, `conditional.py`, `multiscale.py`)."""

    variant: str = option(
        "ms",
        "vanilla: DETR; cond: Conditional DETR; ms: multi-scale deformable attention, two stages, denoising",
        choices=("vanilla", "cond", "ms"),
    )
    backbone: str = option(
        "resnet50",
        "what sees the picture; small: a few convolutions, for CPUs",
        choices=("resnet18", "resnet34", "resnet50", "small"),
    )
    width: int = option(32, "channels of backbone=small at stride 4; doubled at 8, at most 4 times", low=8)
    norm: str = option(
        "auto",
        "of the backbone; auto: frozen with weights, group without. batch sees micro-batches, the others do not",
        choices=("auto", "frozen", "batch", "group"),
    )
    strides: list[int] = option(lambda: [8, 16, 32], "feature levels of ms, finest first: some of 4, 8, 16, 32")
    dilated: bool = option(False, "vanilla and cond: the last stage at stride 16 (DC5)")
    dims: int = option(256, "numbers of a token", low=16)
    heads: int = option(8, "attention heads", low=1)
    points: int = option(4, "ms: places that a head looks at on each level", low=1)
    feedforward: int = option(1024, "hidden width of the feed-forward parts", low=8)
    encoder_layers: int = option(1, "self-attention layers; of ms: on the coarsest level", low=0)
    decoder_layers: int = option(6, "decoder layers; each has a loss", low=1)
    queries: int = option(300, "objects a picture can have, at most", low=1)
    dropout: float = option(0.0, "in attention and feed-forward parts", low=0, high=0.9)
    temperature: float = option(
        20.0, "of sine positions: 10000 in DETR, 20 tells close places apart", low=1, high=10_000
    )
    anchor_strides: float = option(2.0, "ms: side of the first guess at an object, in strides of its level", low=0.1)
    denoising: int = option(100, "ms: noised objects that the decoder sees beside its queries; 0: none", low=0)
    label_noise: float = option(0.5, "ms: share of noised objects with another category", low=0, high=1)
    box_noise: float = option(1.0, "ms: shift of a noised object's edges, in halves of its sides", low=0, high=2)
    backbone_weights: str = option("", "backbone to start from, in torchvision's names; empty: random")
    backbone_lr: float = option(
        0.1, "factor on the learning rate of a backbone that starts from weights", low=0, high=1
    )
    weights: str = option(
        "", "whole detector to start from, such as facebookresearch/detr's; its classifier is replaced if it must be"
    )


@dataclass
class LossSettings:
    """Matching and losses; the matcher's costs bear the weights of the losses, but for `match_class`."""

    classification: str = option(
        "auto",
        "auto: softmax for vanilla, else focal; varifocal makes scores tell IoU, and learns nothing where boxes miss",
        choices=("auto", "softmax", "focal", "varifocal"),
    )
    match_class: float = option(0.0, "cost of the category in matching; 0: 1 for softmax, else 2", low=0)
    class_weight: float = option(0.0, "weight of the category; 0: 2 for focal, else 1", low=0)
    box_weight: float = option(5.0, "weight of L1 over centre and sides, in shares of the input", low=0)
    overlap_weight: float = option(2.0, "weight of GIoU and NWD together", low=0)
    nwd_share: float = option(0.0, "share of NWD in the overlap, in loss and matching; 1 replaces GIoU", low=0, high=1)
    nwd_px: float = option(0.0, "NWD's constant C, pixels of the input; 0: mean size of the training objects", low=0)
    no_object: float = option(0.1, "softmax: weight of a query without an object", low=0, high=1)
    denoising_weight: float = option(1.0, "weight of all losses of the noised objects", low=0)
    normalise: str = option(
        "batch",
        "what losses are divided by: objects in the micro-batches of all ranks, or the training set's mean per "
        "picture, which does not depend on how a batch is cut",
        choices=("batch", "data"),
    )


@dataclass
class PhotometricSettings:
    """Changes of the training picture's pixels, on the device; each with its probability p."""

    colour_p: float = option(0.0, "brightness, contrast, saturation and hue", low=0, high=1)
    brightness: float = option(0.2, "factor, uniform in 1 +- this", low=0, high=1)
    contrast: float = option(0.2, "factor about the picture's mean gray, uniform in 1 +- this", low=0, high=1)
    saturation: float = option(0.2, "factor about each pixel's gray, uniform in 1 +- this", low=0, high=1)
    hue_deg: float = option(10.0, "turn of the hue, uniform in +- this", low=0, high=180)
    clahe_p: float = option(0.0, "local histogram equalisation of L in CIELAB", low=0, high=1)
    clahe_clip: float = option(2.0, "largest slope of a tile's curve", low=1, high=64)
    clahe_tiles: int = option(8, "tiles along each side", low=1, high=64)
    blur_p: float = option(0.0, "motion blur along a line", low=0, high=1)
    blur_px: int = option(15, "longest line, odd; the shortest is 3", low=3, high=63)
    paste_p: float = option(0.0, "pasting small objects of the next picture of the micro-batch", low=0, high=1)
    paste_count: int = option(4, "objects pasted, at most; those that would cover another are left out", low=1, high=6)
    paste_px: int = option(32, "longest side of what is pasted", low=4, high=128)


@dataclass
class BoxSettings:
    """Which boxes of a training picture still count after it was cut."""

    visible_min: float = option(0.4, "share of an object that the input must show", low=0, high=1)
    side_min_px: float = option(1.0, "shortest side in the input", low=0)


@dataclass
class PackingSettings:
    """From pictures and annotations to samples. Changing one means packing again."""

    scale: float = option(1.0, "pictures are made smaller by this before anything else; boxes too", low=0.05, high=1)
    tile_px: int = option(0, "side of the tiles that pictures are cut into; 0: whole pictures", low=0)
    tile_overlap: float = option(0.2, "share of a tile's side that it has in common with the next", low=0, high=0.9)
    tile_visible: float = option(0.4, "share of an object that a tile must show to have it", low=0, high=1)
    outside: str = option(
        "fail",
        "boxes wholly outside their picture, or with negative sides: an error, or left out and counted",
        choices=("fail", "skip"),
    )
    side_min_px: float = option(1.0, "boxes with a shorter side are left out and counted", low=0)
    objects_max: int = option(1500, "objects a sample may have; more is an error", low=1)
    val_share: float = option(0.15, "share of pictures, or sequences, where no annotations are named val", low=0)
    test_share: float = option(0.0, "the same for the test set", low=0, high=0.9)
    seed: int = option(0, "of the cut into sets")


@dataclass
class EvaluationSettings:
    """How detections are scored."""

    areas: str = option(
        "aitod",
        "sizes and detections per picture: of AI-TOD (1/100/1500) or COCO (1/10/100)",
        choices=("aitod", "coco"),
    )
    detections: int = option(300, "detections a sample gives, at most: the best by score", low=1)
    merge: str = option("iou", "what tells that two tiles show one object", choices=("iou", "nwd"))
    merge_above: float = option(0.5, "IoU or NWD above which the lesser detection goes", low=0, high=1)
    pictures: int = option(6, "samples drawn in the report", low=0)
    draw_above: float = option(0.3, "score above which a detection is drawn", low=0, high=1)


@dataclass
class Config(TrainConfig):
    """All options of a tinydet job."""

    model: ModelSettings = option(ModelSettings, "network")
    loss: LossSettings = option(LossSettings, "matching and losses")
    photometric: PhotometricSettings = option(PhotometricSettings, "changes of pixels")
    boxes: BoxSettings = option(BoxSettings, "boxes of cut pictures")
    packing: PackingSettings = option(PackingSettings, "raw files to records")
    evaluation: EvaluationSettings = option(EvaluationSettings, "scoring", mutable_on_resume=True)
