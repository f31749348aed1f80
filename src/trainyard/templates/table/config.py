"""Every option of the family."""

from dataclasses import dataclass

from trainyard.config.settings import EvaluationSettings, HoldOutSettings, TrainConfig, option
from trainyard.data.amounts import MARKS

REGRESS, CLASSIFY = "regress", "classify"


@dataclass
class ModelSettings:
    """A multilayer perceptron on numbers and embedded categories."""

    layers: int = option(3, "hidden layers", low=1)
    width: int = option(256, "their width", low=4)
    category_dims: int = option(16, "width of the embedding of a category", low=1)
    dropout: float = option(0.1, "dropout after each hidden layer", low=0, high=0.9)


@dataclass
class PackingSettings(HoldOutSettings):
    """From rows to records and sets. Changing an option means packing again."""

    target: str = option("", "column to predict")
    task: str = option("", "whether the target is a number or a class", choices=("", REGRESS, CLASSIFY))
    id_column: str = option("", "column with a unique name of each row; empty: its line in the file")
    ignore: list[str] = option(list, "columns that the model must not see, such as [date,comment]")
    categories: list[str] = option(list, "columns of numbers that are names, such as [zip]; text columns are anyway")
    decimal_mark: str = option(
        "auto", "what separates decimals; auto: a point, but a file that leaves doubt is refused", choices=MARKS
    )
    set_column: str = option("", "column that says train, val or test; empty: shares, by a hash of the row's name")


@dataclass
class Config(TrainConfig):
    """All options of the family's jobs."""

    model: ModelSettings = option(ModelSettings, "network")
    packing: PackingSettings = option(PackingSettings, "rows to records and sets")
    evaluation: EvaluationSettings = option(EvaluationSettings, "scoring", mutable_on_resume=True)

    def explain_batch_dependence(self) -> str:
        """Return why results depend on the micro-batch; "" if they do not."""
        return ""

    def explain_varying_inputs(self) -> str:
        """Return why repeated layers get inputs of many shapes; "" if they do not."""
        return ""
