"""The pricing model with its loss and metrics."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trainyard.errors import UserError
from trainyard.report.figures import draw_figure
from trainyard.report.score_figures import draw_text_table
from trainyard.train.module import Batch, DataInfo, Rows, SampleSource, Score, Signature

from . import losses, metrics, tokenizer
from .config import NO_PRICES, Config
from .encoder_module import EncoderModule
from .features import Features
from .network import PriceNetwork, TextNetwork, build_encoder, build_random_encoder
from .pack import FEATURES, PRICES, RIDGE, TOKENIZER
from .pretraining import TextModule

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def build(config: Config, data: DataInfo) -> EncoderModule:
    """Return the model for the packed artifacts. Needs no rows: `read_artifacts` of a checkpoint is enough.

    Raises:
        UserError: `model.heads` does not divide `model.dims`, the head's widths and dropouts differ in number, the
            model reads images but none are packed, the encoder checkpoint does not fit, or there are no rows, so that
            prices are to be predicted, and the objective is text.
    """
    model = config.model
    if config.objective == "text" and not len(data.train_ids):
        raise UserError(NO_PRICES)
    if len(model.head_dims) != len(model.head_dropout):
        raise UserError(
            f"model.head_dims={model.head_dims} and model.head_dropout={model.head_dropout}: expected two lists of "
            "equal length."
        )
    if model.image_dims and not config.packing.images:
        raise UserError("model.image_dims needs images, but none are packed. Set packing.images=FOLDER.")
    vocabulary = tokenizer.parse(data.artifacts[TOKENIZER]).get_vocab_size()
    if model.encoder:
        encoder = build_encoder(Path(model.encoder), vocabulary=vocabulary, dropout=model.dropout)
    else:
        encoder = build_random_encoder(model, vocabulary=vocabulary, max_tokens=config.packing.max_tokens)
    module: EncoderModule
    if config.objective == "text":
        module = TextModule(TextNetwork(encoder), config, data)
    else:
        numbers = len(Features.from_json(data.artifacts[FEATURES]).names)
        network = PriceNetwork(encoder, model, numbers=numbers, image_channels=config.image.channels)
        module = PricingModule(network, config, data)
    if model.encoder and not config.start_from:
        module.start_file = (f"model.encoder={model.encoder}", model.encoder)
    return module


_SHOWN, _SHOWN_CHARS = 8, 70  # samples of a table, and of their texts


class PricingModule(EncoderModule):
    """Predicts prices."""

    network: PriceNetwork

    monitor = ("smape", "min")
    baseline = ("the median of the training prices", "smape_constant")
    rivals = ("ridge",)

    def __init__(self, network: PriceNetwork, config: Config, data: DataInfo) -> None:
        super().__init__(network, config, data)
        self.loss, self.draws = config.loss, config.evaluation.bootstrap_draws
        self.data: Callable[[], DataInfo] = lambda: data  # a function: copying the module must not copy open files
        self.blends = RIDGE in data.artifacts
        self.token_dropout, self.title_dropout = config.model.token_dropout, config.model.title_dropout
        self.id_column, self.price_column = config.packing.id_column, config.packing.price_column
        self.smape_start = self.loss.smape_after_epochs * len(data.train_ids) or float("inf")
        prices: dict[str, float] = json.loads(data.artifacts[PRICES])
        self.mean, self.std, self.median = prices["mean"], prices["std"], prices["median"]
        self.low, self.high = prices["low"], prices["high"]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss on ln(price), and the batch's SMAPE, which the loss approximates."""
        log_error = self._predict_log_price(batch) - batch["price"].log().float()
        samples_seen = batch.get("samples_seen")
        share = log_error.new_zeros(()) if samples_seen is None else (samples_seen >= self.smape_start).float()
        loss = losses.blend(log_error, beta=self.loss.beta, share=share).mean()
        return {"loss": loss, "smape": 100 * losses.smape_log(log_error.detach()).mean()}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the price, clamped to the range of the training prices, and the true price if it is known.

        With `packing.ridge` it is the geometric mean of the network's and the ridge's.
        """
        log_price = self._predict_log_price(batch)
        if self.blends:
            log_price = (log_price + batch["ridge"].float()) / 2
        log_price = log_price.clamp(self.low, self.high)
        rows = {"sample_id": batch["sample_id"], "predicted": log_price.exp()}
        return rows | {name: batch[name] for name in ("price", "group") if name in batch}

    def describe_predict(self) -> Signature:
        """Describe the network's inputs and outputs; tokenizer and features are among the artifacts."""
        inputs = {
            "tokens": f"ids of artifacts.{TOKENIZER}, from [CLS] to [SEP], padded with 0 to one length of 3 or more",
            "tokens_count": "number of tokens of each text",
            "numbers": f"numbers of artifacts.{FEATURES}, by its names: standardised, clipped to +-5, 0 where unknown",
        }
        if self.blends:
            inputs["ridge"] = f"ln of the price by artifacts.{RIDGE}, from the text as written and the numbers"
        if self.network.image_branch is not None:
            inputs["image"] = "of the item, resized to height and width; anything where there is none"
            inputs["has_image"] = "1 if the item has an image, else 0"
        return Signature(inputs, {"predicted": "the price, within the range of the training prices"})

    def score(self, rows: Rows) -> dict[str, float]:
        """Return the metrics of one set: `metrics.compute_metrics`."""
        return metrics.compute_metrics(rows["predicted"], rows["price"], constant=self.median)

    def compute_intervals(self, rows: Rows) -> dict[str, float]:
        """Return the ends of the interval of the SMAPE over resampled groups of near-duplicates."""
        intervals = metrics.compute_intervals(rows["predicted"], rows["price"], groups=rows["group"], draws=self.draws)
        return intervals.to_metrics()

    def score_baselines(
        self, rows: Rows, evaluated: SampleSource, open_training: Callable[[], SampleSource]
    ) -> dict[str, Score]:
        """Return the metrics of the ridge with which the network is blended; without one, of a ridge on its inputs."""
        if self.blends:
            prices = np.exp(evaluated.data.columns["ridge"][evaluated.ids])
        else:
            from .baseline import predict_prices

            prices = predict_prices(open_training(), evaluated)
        ridge = {**rows, "predicted": prices}
        return {"ridge": Score(self.score(ridge) | self.compute_intervals(ridge))}

    def prediction_rows(self, rows: Rows, keys: Sequence[str]) -> Iterator[dict[str, object]]:
        """Yield the id and the predicted price, to six digits, of each sample."""
        for key, price in zip(keys, rows["predicted"].tolist(), strict=True):
            yield {self.id_column: key, self.price_column: float(f"{price:.6g}")}

    def report_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return the plots for the report: predicted against true prices, and SMAPE by decile."""
        return {
            "Predicted against true price": _plot_scatter(rows["predicted"], rows["price"]),
            "SMAPE by tenth of the set, cheapest first": _plot_decile_bars(rows["predicted"], rows["price"]),
        }

    def sample_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return the samples with the best and the worst predictions: prices, and how their texts begin."""
        data, vocabulary = self.data(), tokenizer.parse(self.data().artifacts[TOKENIZER])
        order = np.argsort(np.abs(np.log(rows["predicted"] / rows["price"])), kind="stable")
        chosen = {"Best predictions": order[:_SHOWN], "Worst predictions": order[::-1][:_SHOWN]}
        figures = {}
        for title, places in chosen.items():
            pieces = [
                [vocabulary.id_to_token(token) or "" for token in ids.tolist()[1:-1]]  # without [CLS] and [SEP]
                for ids in data.read("tokens", rows["sample_id"][places])
            ]
            texts = ["".join(own).replace("\u2581", " ").strip() for own in pieces]  # SentencePiece marks a space so
            table = [
                [f"{rows['price'][i]:,.4g}", f"{rows['predicted'][i]:,.4g}", text[:_SHOWN_CHARS]]
                for i, text in zip(places.tolist(), texts, strict=True)
            ]
            figures[title] = draw_text_table(title, ["price", "predicted", "text"], table)
        return figures

    def _predict_log_price(self, batch: Batch) -> Tensor:
        """Return (B,) float32 ln(price)."""
        token_BL = batch["tokens"]
        if self.training and (self.token_dropout or self.title_dropout):
            token_BL = mask_tokens(token_BL, batch["title_length"], share=self.token_dropout, titles=self.title_dropout)
        image = batch.get("image")
        if image is not None and "has_image" in batch:
            image = image * batch["has_image"].view(-1, 1, 1, 1)
        standard: Tensor = self.network(token_BL, batch["tokens_count"], batch["numbers"], image)
        return standard * self.std + self.mean


def mask_tokens(token_BL: Tensor, title_B: Tensor, *, share: float, titles: float) -> Tensor:
    """Replace random tokens with [UNK], drawn from torch's generator; keep [CLS], [SEP] and padding.

    Args:
        title_B: int64 tokens of each title, which starts right after [CLS].
        share: of all tokens to replace.
        titles: share of the texts whose whole title is replaced.
    """
    position_L = torch.arange(token_BL.shape[1], device=token_BL.device)
    drop_title_B1 = torch.rand(len(token_BL), 1, device=token_BL.device) < titles
    dropped_BL = torch.rand(token_BL.shape, device=token_BL.device) < share
    dropped_BL |= drop_title_B1 & (position_L <= title_B[:, None])
    return torch.where(dropped_BL & (token_BL > tokenizer.UNK), tokenizer.UNK, token_BL)


def _plot_scatter(predicted: np.ndarray, true: np.ndarray) -> bytes:
    def draw(axes: "Axes") -> None:
        axes.scatter(true, predicted, s=4, alpha=0.4, linewidths=0)
        ends = [float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))]
        axes.plot(ends, ends, color="gray", linewidth=1)
        axes.set(xscale="log", yscale="log", ylabel="predicted price")

    return draw_figure("Predicted against true price", draw, x_label="true price")


def _plot_decile_bars(predicted: np.ndarray, true: np.ndarray) -> bytes:
    decile, terms = metrics.assign_deciles(true), metrics.compute_smape_terms(predicted, true)
    present = [number for number in range(metrics.DECILES) if (decile == number).any()]

    def draw(axes: "Axes") -> None:
        axes.bar([number + 1 for number in present], [100 * terms[decile == number].mean() for number in present])
        axes.set_ylabel("SMAPE, %")

    return draw_figure("SMAPE by tenth of the set", draw, x_label="tenth of the prices")
