"""Every option of the pricing family."""

from dataclasses import dataclass

from trainyard.config.settings import EvaluationSettings, PackingPace, ReportSettings, TrainConfig, option
from trainyard.data.amounts import MARKS

NO_PRICES = (
    "A run of objective=text learned to predict tokens, not prices. Start one that learns prices from it: "
    "trainyard run JOB data.path=FOLDER start_from=RUN"
)


@dataclass
class ModelSettings:
    """DeBERTa-v3 with branches for numbers and images (`network.py`)."""

    encoder: str = option(
        "",
        "folder of a local DeBERTa-v3 checkpoint; with start_from only its sizes are used; empty: random weights with "
        "the sizes below",
    )
    dims: int = option(256, "hidden size of a random encoder", low=8)
    layers: int = option(4, "layers of a random encoder", low=1)
    heads: int = option(4, "attention heads of a random encoder; must divide dims", low=1)
    feedforward: int = option(1024, "feed-forward width of a random encoder", low=8)
    position_buckets: int = option(64, "relative position buckets of a random encoder (v3: 256)", low=4)
    dropout: float = option(0.1, "dropout in the encoder, attention included", low=0, high=0.9)
    token_dropout: float = option(0.0, "share of a training text's tokens replaced with [UNK]", low=0, high=0.9)
    title_dropout: float = option(
        0.0,
        "share of training texts whose whole title is replaced with [UNK], for test items of unseen series",
        low=0,
        high=1,
    )
    bag: bool = option(True, "also feed the head the mean word embedding, which learns from few rows")
    number_dims: int = option(128, "width of the number branch", low=4)
    head_dims: list[int] = option(lambda: [384, 192, 96], "widths of the head's hidden layers")
    head_dropout: list[float] = option(lambda: [0.3, 0.2, 0.1], "dropout after each hidden layer")
    image_dims: int = option(0, "width of the image branch; 0: none. Needs packing.images", low=0)


@dataclass
class RateSettings:
    """Learning rates by depth, as factors on optimizer.lr; the head trains at optimizer.lr itself."""

    encoder: float = option(1.0, "factor for the encoder's last layer; 0.02 suits a pretrained encoder", low=0)
    layer_decay: float = option(1.0, "further factor for each layer below the last", low=0.1, high=1)
    freeze_embeddings: bool = option(False, "do not train the word embeddings")


@dataclass
class LossSettings:
    """Options of the loss, on the error of ln(price)."""

    beta: float = option(0.5, "error in ln below which smooth L1 is quadratic", low=0.01)
    smape_after_epochs: float = option(
        0.0, "epochs after which the exact SMAPE term replaces smooth L1; 0: never", low=0
    )


@dataclass
class PackingSettings:
    """From CSV to records, and from rows to parts. Changing an option means packing again."""

    file: str = option("train.csv", "CSV file to read if the folder has several")
    id_column: str = option("sample_id", "column with unique ids")
    text_column: str = option("catalog_content", "column with the text, or with its beginning, such as the title")
    further_text_columns: list[str] = option(list, "columns with the rest of the text, such as [description]")
    price_column: str = option("price", "column with the price, above 0")
    numeric_columns: list[str] = option(list, "further numeric columns, such as [depth, height, width]")
    decimal_mark: str = option(
        "auto", "what separates decimals; auto: a point, but a file that leaves doubt is refused", choices=MARKS
    )
    images: str = option("", "folder of image files, the third input; empty: none")
    image_column: str = option("image_link", "column whose last path component is a file in packing.images")
    missing_image: str = option(
        "fail", "if an image file is missing: fail, or store a gray image that the model ignores",
        choices=("fail", "gray"),
    )  # fmt: skip
    tokenizer: str = option(
        "", "a tokenizer.json or spm.model, or a folder with one; empty: train one on the training texts"
    )
    vocabulary: int = option(16_000, "maximum pieces of a trained tokenizer", low=64)
    max_tokens: int = option(192, "maximum tokens of a text with [CLS] and [SEP]; the end is cut", low=8)
    group: str = option(
        "title", "what near-duplicates share, apart from sizes and packs: the title, or title and description",
        choices=("title", "text"),
    )  # fmt: skip
    ridge: bool = option(
        False, "also fit ridge regression on TF-IDF and numbers: predictions are its and the network's geometric mean"
    )
    folds: int = option(5, "number of folds", low=2)
    fold: int = option(0, "fold to test; -1: none, every row trains or validates", low=-1)
    val_share: float = option(0.1, "share of the other rows used for validation; 0: none", low=0, high=0.5)
    seed: int = option(0, "seed of the split into folds", low=0)


@dataclass
class Config(TrainConfig):
    """All options of a pricing job."""

    packing_pace = PackingPace(0.0001, 0.0035, 20)  # rows alone were measured; an image counts above 20 kB

    objective: str = option(
        "price",
        "text: train the encoder alone to predict masked tokens, for a run with start_from=RUN; then loss, model.bag "
        "and model's options of head, branches and dropped tokens decide nothing",
        choices=("price", "text"),
    )
    model: ModelSettings = option(ModelSettings, "network")
    rates: RateSettings = option(RateSettings, "learning rates by depth")
    loss: LossSettings = option(LossSettings, "loss")
    packing: PackingSettings = option(PackingSettings, "CSV to records, rows to parts")
    evaluation: EvaluationSettings = option(EvaluationSettings, "scoring", mutable_on_resume=True)
    report: ReportSettings = option(lambda: ReportSettings(samples="on"), "report", mutable_on_resume=True)

    def explain_batch_dependence(self) -> str:
        """Return why results depend on the micro-batch; "" if they do not."""
        return ""

    def explain_varying_inputs(self) -> str:
        """Return why repeated layers get inputs of many shapes; "" if they do not."""
        return "texts have different lengths"
