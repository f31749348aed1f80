"""Every option of the fingerprint family."""

from dataclasses import dataclass

from trainyard.config.settings import PackingPace, StoreSettings, TrainConfig, option
from trainyard.errors import UserError

DENSE, SHIPPED = "dense", "shipped"


@dataclass
class ModelSettings:
    """DeepPrint (`network.py`)."""

    name: str = option(
        "deepprint_tex",
        "branches: texture, minutiae, or both, whose embeddings have half of embedding_dims each. With the minutia "
        "branch, training also needs packing.minutiae. dense: no embedding, but the descriptors of the matcher",
        choices=("deepprint_tex", "deepprint_minu", "deepprint_texminu", DENSE),
    )
    embedding_dims: int = option(512, "size of the embedding", low=2)
    width: float = option(1.0, "factor on every channel count; 1: as in the paper", low=0.02, high=4)
    blocks: list[int] = option(
        lambda: [4, 7, 3], "number of Inception blocks A, B and C of the texture branch; [4,7,3]: as in the paper"
    )
    dropout: float = option(0.2, "probability of dropping a feature before the embedding", low=0, high=0.95)
    weights: str = option(
        "none",
        "model.name=dense: shipped: start from the descriptors of the matcher, instead of nothing",
        choices=("none", SHIPPED),
    )
    stn: bool = option(False, "align the print with a spatial transformer first (the paper's Loc variants)")
    stn_rotate_deg: float = option(60.0, "largest rotation by the stn, in both directions", low=0, high=180)
    stn_shift: float = option(0.2, "largest shift by the stn along each axis, as a share of the image", low=0, high=1)


@dataclass
class HeadSettings:
    """The classification head that trains the embedding, one class per training finger. Evaluation never uses it."""

    name: str = option("cosface", "softmax over cosines, without or with a margin", choices=("ce", "cosface"))
    scale: float = option(
        32.0, "factor s on the cosines; without it the softmax cannot become confident", low=1, high=256
    )
    margin: float = option(0.35, "m subtracted from the cosine of the true finger (cosface)", low=0, high=1)
    margin_warmup: str = option(
        "", "linear increase of the margin from 0, such as 5ep (of training samples) or 1000st", low=0, duration=True
    )
    centre_weight: float = option(
        0.0,
        "weight of the batch MEAN of squared distances to the finger's centre; 0: none. 2 equals the reference's 0.125 "
        "on the SUM over its batch of 16",
        low=0,
    )
    map_weight: float = option(
        0.3, "weight of the minutia branch's mean squared error on minutia maps; 0.3: as the reference", low=0
    )
    sampled_classes: int = option(
        0,
        "other training fingers that a step compares its prints with, drawn for each step (partial FC); 0: all. Ranks "
        "then exchange the gradients of these alone, and logits take less memory. Accuracy counts among them. Its "
        "effect on the metrics was not measured",
        low=0,
    )


@dataclass
class PackingSettings(StoreSettings):
    """From raw files to records. Changing an option means packing again."""

    layout: str = option(
        "auto",
        "how file names say whose print it is; auto: [<set>/]<finger>_<impression>, if no other reading differs",
        choices=(
            *(
                "auto",
                "sets",
                "sessions",
                "folders",
                "fvc",
                "sd4",
                "sd14",
                "sd300",
                "sd302",
                "mcyt",
                "socofing",
                "polyu",
            ),
        ),
    )
    dpi: int = option(
        500,
        "resolution of the raw files in dots per inch, where neither index.csv, dpi_of_sets, the layout nor a WSQ file "
        "states it; tags of other files are ignored",
        low=1,
    )
    dpi_of_sets: list[str] = option(
        list, "resolutions of sets that differ from dpi, by name or pattern, such as [FVC2002_DB2_B:569]"
    )
    minutiae: str = option(
        "none",
        "minutiae to train the minutia branch on; extract: found in each print, 0.3 s of one core; files: read from "
        "the record next to each print, .ist or .fmr (ISO/IEC 19794-2:2005) or .mnt (text)",
        choices=("none", "extract", "files"),
    )
    ridges: str = option(
        "none",
        "placed: store the enhanced ridges of each print, and where on its finger each cell is, instead of its image; "
        "model.name=dense trains on them",
        choices=("none", "placed"),
    )
    region_px: int = option(448, "side of the square around the print that the model sees, in px at 500 dpi", low=32)


@dataclass
class SplitSettings:
    """Which fingers train, validate and test. A set is a sub-folder of the raw files."""

    train_sets: list[str] = option(lambda: ["*"], "training sets, by name or pattern such as FVC2004_*")
    val_sets: list[str] = option(list, "validation sets; empty: val_share of the training fingers")
    test_sets: list[str] = option(list, "test sets, scored separately; empty: test_share of the training fingers")
    val_share: float = option(0.1, "share of fingers held out for validation", low=0, high=0.9)
    test_share: float = option(0.2, "share of fingers held out for testing if there are no test_sets", low=0, high=0.9)


@dataclass
class EvaluationSettings:
    """Options of scoring."""

    bootstrap_draws: int = option(1000, "resamples of the fingers for each 95 % interval; 0: none", low=0)
    impostors_max: int = option(
        2_000_000, "largest number of cross-finger pairs to score; if there are more, fingers are skipped", low=1000
    )
    matched_pairs: int = option(
        500, "model.name=dense: pairs of each kind that are compared to score the validation prints", low=10
    )
    baseline_pairs: int = option(
        4_000,
        "`trainyard evaluate`: most pairs of each kind that BLPOC (milliseconds) and the matcher (30 ms) compare",
        low=1,
    )
    pose_curve: bool = option(
        False,
        "`trainyard evaluate`: also score probes that are turned by up to 60 degrees and moved by up to 40 px; each "
        "turn scores all pairs again",
    )


@dataclass
class Config(TrainConfig):
    """All options of a fingerprint job."""

    packing_pace = PackingPace(0.028, 0.046, 63)

    model: ModelSettings = option(ModelSettings, "network")
    head: HeadSettings = option(HeadSettings, "loss")
    packing: PackingSettings = option(PackingSettings, "raw files to records")
    split: SplitSettings = option(SplitSettings, "fingers for training, validation and test")
    evaluation: EvaluationSettings = option(EvaluationSettings, "scoring", mutable_on_resume=True)

    def refuse_conflicts(self) -> None:
        """Refuse packing without the records that the model trains on, and weights of another model.

        Raises:
            UserError: `model.name` has a minutia branch, and `packing.minutiae` is none; it is dense, and
                `packing.ridges` is none; or one of the options is for dense, and the model is not.
        """
        if (self.model.name == DENSE) != (self.packing.ridges != "none"):
            fit = "placed" if self.model.name == DENSE else "none"
            raise UserError(
                f"model.name={self.model.name} does not train on packing.ridges={self.packing.ridges}. Type "
                f"packing.ridges={fit}, or start with JOB=fingerprint_dense or JOB=fingerprint."
            )
        if self.model.name.endswith("minu") and self.packing.minutiae == "none":
            raise UserError(
                f"model.name={self.model.name} trains on minutiae, but packing.minutiae=none. Type "
                "packing.minutiae=extract, or packing.minutiae=files if each print has a record of its minutiae."
            )
        if self.model.weights == SHIPPED and self.model.name != DENSE:
            raise UserError(
                f"model.weights={self.model.weights} are descriptors, but model.name={self.model.name}. Type "
                "model.weights=none or, for the weights of a run, start_from=RUN"
            )

    def explain_batch_dependence(self) -> str:
        """Return why results depend on the micro-batch; "" if they do not."""
        return "BatchNorm statistics are over a micro-batch"

    def explain_varying_inputs(self) -> str:
        """Return why repeated layers get inputs of many shapes; "" if they do not."""
        return ""
