"""Every option of the pricing family."""

from dataclasses import dataclass

from trainyard.settings import TrainConfig, option


@dataclass
class ModelSettings:
    """DeBERTa-v3 with branches for numbers and pictures (`network.py`)."""

    encoder: str = option("", "folder of a local DeBERTa-v3 checkpoint; empty: random weights of the sizes below")
    dims: int = option(256, "numbers of a token, of a random encoder", low=8)
    layers: int = option(4, "encoder layers, of a random encoder", low=1)
    heads: int = option(4, "attention heads, of a random encoder; must divide dims", low=1)
    feedforward: int = option(1024, "width between the two products of a layer, of a random encoder", low=8)
    position_buckets: int = option(64, "relative positions told apart, of a random encoder (v3: 256)", low=4)
    dropout: float = option(0.1, "within the encoder, attention included", low=0, high=0.9)
    token_dropout: float = option(0.0, "share of a training text's tokens that are read as [UNK]", low=0, high=0.9)
    title_dropout: float = option(
        0.0,
        "share of training texts whose whole title is read as [UNK], for items of which only the kind is known",
        low=0,
        high=1,
    )
    bag: bool = option(True, "also give the head the mean of the word embeddings, which few rows can teach")
    number_dims: int = option(128, "width of the branch of the numbers", low=4)
    head_dims: list[int] = option(lambda: [384, 192, 96], "widths of the head's hidden layers")
    head_dropout: list[float] = option(lambda: [0.3, 0.2, 0.1], "dropout after each of them")
    picture_dims: int = option(0, "width of the picture's branch; 0: none. Needs packing.images", low=0)


@dataclass
class RateSettings:
    """Learning rates by depth, as factors on optimizer.lr, which the head has."""

    encoder: float = option(1.0, "of the encoder's last layer; 0.02 for a pretrained one", low=0)
    layer_decay: float = option(1.0, "factor per layer below that", low=0.1, high=1)
    freeze_embeddings: bool = option(False, "leave the word embeddings as they are")


@dataclass
class LossSettings:
    """What is minimised, on the error of ln(price)."""

    beta: float = option(0.5, "error in ln below which smooth L1 is quadratic", low=0.01)
    smape_after_epochs: float = option(0.0, "when the exact SMAPE term replaces smooth L1; 0: never", low=0)


@dataclass
class PackingSettings:
    """From a CSV to records, and rows to parts. Changing one means packing again."""

    file: str = option("train.csv", "CSV file to read, where the folder holds several")
    id_column: str = option("sample_id", "column of unique ids")
    text_column: str = option("catalog_content", "column of the text")
    price_column: str = option("price", "column of the price, above 0")
    numeric_columns: list[str] = option(list, "further columns of numbers, such as [depth, height, width]")
    images: str = option("", "folder of picture files, the third input; empty: none")
    picture_column: str = option("image_link", "column whose last path component is a file in packing.images")
    missing_picture: str = option(
        "fail", "a picture file that is not there: an error, or a gray one that the model does not see",
        choices=("fail", "gray"),
    )  # fmt: skip
    tokenizer: str = option("", "a tokenizer.json, or the folder of one; empty: learned from the training texts")
    vocabulary: int = option(16_000, "pieces of a learned tokenizer, at most", low=64)
    max_tokens: int = option(192, "tokens of a text, [CLS] and [SEP] included; the description's end goes", low=8)
    group: str = option(
        "title", "what near-duplicates share, sizes and packs left out: the title, or title and description",
        choices=("title", "text"),
    )  # fmt: skip
    folds: int = option(5, "folds of groups", low=2)
    fold: int = option(0, "the fold that is tested; -1: none, every row trains or validates", low=-1)
    val_share: float = option(0.1, "share of the other rows that chooses the checkpoint; 0: none", low=0, high=0.5)
    seed: int = option(0, "of the cut into folds", low=0)


@dataclass
class EvaluationSettings:
    """Scoring."""

    bootstrap_draws: int = option(1000, "resamples of the groups behind the 95 % interval; 0: none", low=0)


@dataclass
class Config(TrainConfig):
    """All options of a pricing job."""

    model: ModelSettings = option(ModelSettings, "network")
    rates: RateSettings = option(RateSettings, "learning rates by depth")
    loss: LossSettings = option(LossSettings, "loss")
    packing: PackingSettings = option(PackingSettings, "CSV to records, rows to parts")
    evaluation: EvaluationSettings = option(EvaluationSettings, "scoring", mutable_on_resume=True)
