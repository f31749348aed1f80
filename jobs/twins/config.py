"""Every option of the twins family."""

from dataclasses import dataclass

from trainyard.config.settings import PackingPace, StoreSettings, TrainConfig, option


@dataclass
class ModelSettings:
    """Dual cross-attention on a vision transformer (`network.py`)."""

    dims: int = option(768, "width of a token; 384: ViT-S, 768: ViT-B", low=8)
    layers: int = option(12, "self-attention blocks, L of the paper", low=1)
    heads: int = option(12, "attention heads; 6: ViT-S, 12: ViT-B", low=1)
    patch_px: int = option(16, "side of a patch; the image's sides must be multiples of it", low=2)
    stem: str = option(
        "patch",
        "how patches are embedded: one convolution as in ViT, or several small ones, which need less data",
        choices=("patch", "conv"),
    )
    glca: bool = option(True, "add the global-local block (M = 1) to training and embedding")
    local_share: float = option(
        0.15, "share of the patches that the global-local block uses as queries, R", low=0.01, high=1
    )
    pwca_layers: int = option(
        12, "last blocks that training also runs with a distractor image, T; 0: none. Free at inference", low=0
    )
    pwca_twin_share: float = option(
        0.0, "probability that the distractor image is of the own twin; else any of the batch", low=0, high=1
    )
    drop_path: float = option(
        0.1, "probability of skipping the last block, rising from 0 at the first", low=0, high=0.9
    )
    weights: str = option(
        "", "ViT weights to start from, in timm's names: .safetensors, or .pth of tensors; empty: random"
    )


@dataclass
class HeadSettings:
    """The losses, the same for each branch (SA, GLCA, PWCA). Evaluation never uses them."""

    arcface_weight: float = option(1.0, "weight of ArcFace over the training people; 0: none", low=0)
    scale: float = option(32.0, "scale s of ArcFace's cosines", low=1, high=256)
    margin: float = option(0.3, "margin m in radians added to the angle of the true person", low=0, high=1)
    triplet_weight: float = option(
        0.1, "weight of the batch-hard triplet loss, which prefers twins as negatives", low=0
    )
    triplet_margin: float = option(0.5, "cosine by which the positive must exceed the negative", low=0, high=2)
    pair_weight: float = option(0.0, "weight of same-or-different cross-entropy over the pairs of the batch", low=0)
    pair_strangers: bool = option(True, "count pairs of strangers too; false: only pairs within a family")
    weighting: str = option(
        "learned",
        "how branch losses are summed: by learned uncertainty (exp(-w) L + w) / 2, or with branch_shares",
        choices=("learned", "fixed"),
    )
    pixels: float = option(
        0.0, "share of the likeness of the raw pixels in the score of two faces; with few faces it helps", low=0, high=1
    )
    branch_shares: list[float] = option(lambda: [1.0, 1.0, 0.3], "weights of SA, GLCA and PWCA, for weighting=fixed")


@dataclass
class PackingSettings(StoreSettings):
    """Options of packing: records, families and their sets, pairs. Changing any of these means packing again."""

    singles: str = option(
        "fail",
        "people without a twin: an error, kept as families of one, or skipped",
        choices=("fail", "keep", "skip"),
    )
    min_side_px: int = option(48, "shorter side below which an image is not a face crop", low=1)
    aspect_max: float = option(1.6, "longer over shorter side above which an image is not a face crop", low=1)
    val_share: float = option(0.15, "share of families that select the checkpoint and the threshold", low=0, high=0.9)
    test_share: float = option(0.15, "share of families to test on, if the raw files name no test set", low=0, high=0.9)
    seed: int = option(0, "seed of the split into sets and of the pairs of strangers", low=0)
    strangers: int = option(20, "pairs of strangers per image in the evaluation list", low=0)


@dataclass
class EvaluationSettings:
    """Options of scoring."""

    bootstrap_draws: int = option(200, "resamples of the families behind each 95 % interval; 0: none", low=0)


@dataclass
class Config(TrainConfig):
    """All options of a twins job."""

    packing_pace = PackingPace(0.0075, 0.0003, 3.6)

    objective: str = option(
        "identity",
        "what training learns: who a face is, or without labels to fill in masked squares of it, for a run that starts "
        "from this one (start_from); then head, evaluation, model.glca, local_share and pwca decide nothing",
        choices=("identity", "image"),
    )
    model: ModelSettings = option(ModelSettings, "network")
    head: HeadSettings = option(HeadSettings, "losses")
    packing: PackingSettings = option(PackingSettings, "raw files to records, families to sets")
    evaluation: EvaluationSettings = option(EvaluationSettings, "scoring", mutable_on_resume=True)

    def explain_batch_dependence(self) -> str:
        """Return why results depend on the micro-batch; "" if they do not."""
        if self.objective == "image" and self.model.stem == "patch":
            return ""
        return "pairs and batch statistics are computed within a micro-batch"

    def explain_varying_inputs(self) -> str:
        """Return why repeated layers get inputs of many shapes; "" if they do not."""
        return ""
