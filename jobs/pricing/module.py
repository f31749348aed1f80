"""The pricing model with its loss and its score."""

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from trainyard.errors import UserError
from trainyard.train.module import Batch, DataInfo, Rows, TrainModule

from . import losses, metrics, tokenizer
from .config import Config, LossSettings, RateSettings
from .features import Features
from .network import PriceNetwork, encoder_layers, learning_rates, local_encoder, random_encoder
from .pack import FEATURES, PRICES, TOKENIZER

ARTEFACT = "artefact"


def build(config: Config, data: DataInfo) -> "PricingModule":
    """Return the model for what packing has learned. Needs no row: `learned_of` a checkpoint is enough.

    Raises:
        UserError: heads do not divide the dims, widths and dropouts of the head differ in number, pictures are asked
            for and not packed, or a checkpoint to start from does not fit.
    """
    model = config.model
    if len(model.head_dims) != len(model.head_dropout):
        raise UserError(
            f"model.head_dims={model.head_dims} and model.head_dropout={model.head_dropout}: expected as many of one "
            "as of the other."
        )
    if model.picture_dims and not config.packing.images:
        raise UserError("model.picture_dims needs pictures, but none are packed: packing.images=FOLDER.")
    words = tokenizer.from_text(data.artifacts[TOKENIZER]).get_vocab_size()
    network = PriceNetwork(
        _encoder(config, words),
        numbers=len(Features.from_text(data.artifacts[FEATURES]).names),
        number_dims=model.number_dims,
        head_dims=model.head_dims,
        head_dropout=model.head_dropout,
        bag=model.bag,
        picture_dims=model.picture_dims,
        picture_channels=config.image.channels,
    )
    return PricingModule(
        network,
        artifacts=data.artifacts,
        rates=config.rates,
        loss=config.loss,
        token_dropout=model.token_dropout,
        title_dropout=model.title_dropout,
        train_count=len(data.train_ids),
        id_column=config.packing.id_column,
        price_column=config.packing.price_column,
        draws=config.evaluation.bootstrap_draws,
    )


def read_artifacts(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what packing had learned, from the state of a trained module: with the config, all that `build` needs."""
    artifacts: dict[str, str] = json.loads(state[ARTEFACT].cpu().numpy().tobytes())
    return artifacts


class PricingModule(TrainModule):
    """Predicts prices.

    Tokenizer, features and price statistics are in a buffer, so one checkpoint is the whole artefact.

    Args:
        artifacts: what `pack.fit_artifacts` returned.
        train_count: samples of an epoch, by which the loss knows the epoch.
        draws: bootstrap resamples of the score.
    """

    monitor = ("smape", "min")

    def __init__(
        self,
        network: PriceNetwork,
        *,
        artifacts: Mapping[str, str],
        rates: RateSettings,
        loss: LossSettings,
        token_dropout: float,
        title_dropout: float,
        train_count: int,
        id_column: str,
        price_column: str,
        draws: int,
    ) -> None:
        super().__init__()
        self.network, self.loss, self.draws = network, loss, draws
        self.token_dropout, self.title_dropout = token_dropout, title_dropout
        self.id_column, self.price_column = id_column, price_column
        self.smape_from = loss.smape_after_epochs * train_count if loss.smape_after_epochs else float("inf")
        prices: dict[str, float] = json.loads(artifacts[PRICES])
        self.mean, self.std, self.median = prices["mean"], prices["std"], prices["median"]
        self.low, self.high = prices["low"], prices["high"]
        self._rates = learning_rates(
            network, encoder=rates.encoder, decay=rates.layer_decay, frozen=rates.freeze_embeddings
        )
        packed = json.dumps(dict(artifacts), sort_keys=True).encode()
        self.register_buffer(ARTEFACT, torch.frombuffer(bytearray(packed), dtype=torch.uint8))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss on the logarithm of the price, and the batch's SMAPE, which is what it stands for."""
        off = self._log_price(batch) - batch["price"].log().float()
        share = (batch["samples_seen"] >= self.smape_from).float() if "samples_seen" in batch else off.new_zeros(())
        loss = losses.blended(off, beta=self.loss.beta, share=share).mean()
        return {"loss": loss, "smape": 100 * losses.smape_log(off.detach()).mean()}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the price, within the range of the training prices, beside the true one where it is known."""
        log_price = self._log_price(batch).clamp(self.low, self.high)
        rows = {"sample_id": batch["sample_id"], "predicted": log_price.exp()}
        return rows | {name: batch[name] for name in ("price", "group") if name in batch}

    def score(self, rows: Rows) -> dict[str, float]:
        """Return the metrics of one set: `metrics.report`."""
        return metrics.report(
            rows["predicted"], rows["price"], groups=rows["group"], constant=self.median, draws=self.draws
        )

    def prediction_rows(self, rows: Rows, keys: Sequence[str]) -> Iterator[dict[str, object]]:
        """Yield one line per sample of a catalogue to be priced: six digits of a price above 0."""
        for key, price in zip(keys, rows["predicted"].tolist(), strict=True):
            yield {self.id_column: key, self.price_column: float(f"{price:.6g}")}

    def report_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return pictures for the report: predicted against true prices, and SMAPE by decile."""
        return {
            "Predicted against true price": _scatter(rows["predicted"], rows["price"]),
            "SMAPE by tenth of the set, cheapest first": _bars(rows["predicted"], rows["price"]),
        }

    def repeated_layers(self) -> Iterable[nn.Module]:
        """Return the encoder's layers."""
        return encoder_layers(self.network)

    def parameter_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Return a group for each learning rate, with and without weight decay (none on vectors)."""
        groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for parameter, factor in self._rates:
            groups.setdefault((factor, parameter.ndim >= 2), []).append(parameter)
        return [
            {"params": members, "weight_decay": weight_decay if matrix else 0.0, "lr_scale": factor}
            for (factor, matrix), members in sorted(groups.items(), key=lambda entry: entry[0], reverse=True)
        ]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Fill the module, unless the state is of another tokenizer, other features or other prices.

        Raises:
            UserError: it is.
        """
        mine = cast(Tensor, getattr(self, ARTEFACT))
        theirs = state_dict.get(ARTEFACT)
        if theirs is not None and not torch.equal(theirs.cpu(), mine.cpu()):
            ours, found = read_artifacts({ARTEFACT: mine}), read_artifacts({ARTEFACT: theirs})
            differ = ", ".join(name for name in sorted(ours) if ours[name] != found.get(name))
            raise UserError(
                f"The checkpoint was trained with another {differ or 'state'} than the data at hand were packed with, "
                "so its weights mean something else. Use the data it was trained on, or train anew on these."
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _log_price(self, batch: Batch) -> Tensor:
        """Return (B,) float32 ln(price)."""
        token_BL = batch["tokens"]
        if self.training and (self.token_dropout or self.title_dropout):
            token_BL = masked(token_BL, batch["title_length"], share=self.token_dropout, titles=self.title_dropout)
        image = batch.get("image")
        if image is not None and "has_picture" in batch:
            image = image * batch["has_picture"].view(-1, 1, 1, 1)
        standard: Tensor = self.network(token_BL, batch["tokens_count"], batch["numbers"], image)
        return standard * self.std + self.mean


def masked(token_BL: Tensor, title_B: Tensor, *, share: float, titles: float) -> Tensor:
    """Return the tokens with some read as [UNK], drawn from torch's generator; [CLS], [SEP] and padding stay.

    Args:
        title_B: int64 tokens of each title, which begins behind [CLS].
        share: of all tokens.
        titles: of the texts, whose title goes as a whole.
    """
    place_L = torch.arange(token_BL.shape[1], device=token_BL.device)
    hidden_B1 = torch.rand(len(token_BL), 1, device=token_BL.device) < titles
    dropped_BL = torch.rand(token_BL.shape, device=token_BL.device) < share
    dropped_BL |= hidden_B1 & (place_L <= title_B[:, None])
    return torch.where(dropped_BL & (token_BL > tokenizer.UNK), tokenizer.UNK, token_BL)


def _encoder(config: Config, words: int) -> Any:
    model = config.model
    if model.encoder:
        return local_encoder(Path(model.encoder), vocabulary=words, dropout=model.dropout)
    if model.dims % model.heads:
        raise UserError(f"model.dims={model.dims}: expected a multiple of model.heads={model.heads}.")
    return random_encoder(
        vocabulary=words,
        dims=model.dims,
        layers=model.layers,
        heads=model.heads,
        feedforward=model.feedforward,
        buckets=model.position_buckets,
        max_tokens=config.packing.max_tokens,
        dropout=model.dropout,
    )


def _scatter(predicted: np.ndarray, true: np.ndarray) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="true price", ylabel="predicted price")
    axes.scatter(true, predicted, s=4, alpha=0.4, linewidths=0)
    ends = [float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))]
    axes.plot(ends, ends, color="gray", linewidth=1)
    return _drawn(figure)


def _bars(predicted: np.ndarray, true: np.ndarray) -> bytes:
    from matplotlib.figure import Figure

    decile, terms = metrics.deciles(true), metrics.smape_terms(predicted, true)
    found = [number for number in range(metrics.DECILES) if (decile == number).any()]
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="tenth of the prices", ylabel="SMAPE, %")
    axes.bar([number + 1 for number in found], [100 * terms[decile == number].mean() for number in found])
    return _drawn(figure)


def _drawn(figure: Any) -> bytes:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()
