"""The antispoof model: front end, network and classification head, and its metrics."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn

from trainyard.data.decode_cpu import decode_recording
from trainyard.errors import UserError
from trainyard.report.score_figures import draw_samples, draw_score_histogram
from trainyard.train.module import Batch, DataInfo, Rows, SampleSource, Score, Signature, TrainModule, average_segments

from . import augment, frontends, metrics
from .aasist import Aasist
from .baseline import PooledLogistic, pool, score_trials
from .config import Config, LossSettings
from .losses import AmSoftmax, CrossEntropy, Decision, OcSoftmax
from .metrics import AsvRates
from .network import OneClassResNet, SeNet, SeResNet
from .pack import LOGISTIC, WAVE

Network = SeNet | SeResNet | OneClassResNet | Aasist


def build(config: Config, data: DataInfo) -> "AntispoofModule":
    """Return the model for a data set.

    Raises:
        UserError: front end, rate, network and their options do not fit together.
    """
    frontend = frontends.build(
        config.frontend.name,
        rate_hz=config.sound.rate_hz,
        frames=config.sound.frames,
        mean=config.frontend.mean,
        slopes=config.frontend.slopes,
    )
    network = _build_network(config)
    trials = Trials.from_data(data)
    trials.log_resampling(config.sound.rate_hz)
    decision = _build_decision(config.loss, network.dims, trials.count_classes(data.train_ids))
    pooled = _build_pooled(config, data.artifacts)
    if pooled is not None:
        nn.init.zeros_(decision.get_parameter("logits.weight"))  # training starts from the regression alone
    return AntispoofModule(frontend, network, decision, config, trials=trials, data=data, pooled=pooled)


def _build_pooled(config: Config, artifacts: Mapping[str, str]) -> PooledLogistic | None:
    if not config.packing.logistic:
        return None
    if config.loss.name not in ("wce", "focal"):
        raise UserError(
            f"packing.logistic=true adds log-odds, but the scores of loss.name={config.loss.name} are cosines. Use "
            "loss.name=wce, or packing.logistic=false."
        )
    if LOGISTIC not in artifacts:
        raise UserError(
            "packing.logistic=true, but the data was packed without it. Name the raw files with data.path, or use "
            "packing.logistic=false."
        )
    return PooledLogistic(artifacts[LOGISTIC], rate_hz=config.sound.rate_hz, frames=config.sound.frames)


def _build_network(config: Config) -> Network:
    model, frontend = config.model, config.frontend.name
    if (model.name == "aasist") != (frontend == "wave"):
        raise UserError(
            f"model.name={model.name} and frontend.name={frontend}: aasist, and no other network, takes the waveform. "
            "The preset antispoof_aasist sets what it needs: trainyard run antispoof_aasist"
        )
    if model.name == "aasist":
        if config.disturb.mask:
            raise UserError(f"disturb.mask={config.disturb.mask}: a waveform has no bins to mask. Use disturb.mask=0.")
        return Aasist(rate_hz=config.sound.rate_hz)
    if model.name == "resnet18_oc":
        if not frontend.startswith("lfcc"):
            raise UserError(
                f"model.name=resnet18_oc takes {OneClassResNet.BINS} bins, but frontend.name={frontend} has another "
                "number. Use frontend.name=lfcc60, or model.name=senet34."
            )
        return OneClassResNet()
    if model.name == "seresnet":
        if len(model.layers) != 4 or min(model.layers) < 1:
            raise UserError(f"model.layers={model.layers}: expected four counts of 1 or more: [2,2,2,2] or [3,4,6,3].")
        return SeResNet(layers=model.layers, dropout=model.dropout)
    return SeNet(bottleneck=model.name == "senet50")


def _build_decision(loss: LossSettings, dims: int, counts: tuple[int, int]) -> Decision:
    if loss.name == "am_softmax":
        return AmSoftmax(dims, scale=loss.scale, margin=loss.margin)
    if loss.name == "oc_softmax":
        return OcSoftmax(dims, scale=loss.scale, margin_bonafide=loss.margin_bonafide, margin_spoof=loss.margin_spoof)
    return CrossEntropy(dims, counts=counts, gamma=loss.gamma if loss.name == "focal" else 0.0)


@dataclass(frozen=True)
class Trials:
    """Labels, attacks, sets and speakers of N utterances, for scoring; empty without labels."""

    label: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # (N,) 1: bona fide
    attack: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.str_))  # (N,) text
    set: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.str_))  # (N,) text
    speaker: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.str_))  # (N,) text; "": unknown
    source_rate_hz: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # (N,)
    asv: Mapping[str, AsvRates] = field(default_factory=dict)  # by set

    @classmethod
    def from_data(cls, data: DataInfo) -> "Trials":
        if "label" not in data.columns:
            return cls()
        names = ("attack", "set", "speaker")
        attack, set_names, speaker = (np.array(data.vocabulary[name])[data.columns[name]] for name in names)
        asv = {name: AsvRates(**rates) for name, rates in json.loads(data.artifacts.get("asv", "{}")).items()}
        return cls(data.columns["label"], attack, set_names, speaker, data.columns["source_rate_hz"], asv)

    def count_classes(self, ids: np.ndarray) -> tuple[int, int]:
        """Return how many of these utterances are spoofed and how many bona fide; 1 and 1 if unknown."""
        if not len(self.label) or not len(ids):
            return 1, 1
        bonafide = int(self.label[ids].sum())
        return len(ids) - bonafide, bonafide

    def log_resampling(self, rate_hz: int) -> None:
        """Log how many files were resampled, and warn if that alone tells the classes apart."""
        resampled = self.source_rate_hz != rate_hz
        if not resampled.any():
            return
        rates = ", ".join(
            f"{count} of {hz} Hz" for hz, count in sorted(Counter(self.source_rate_hz[resampled].tolist()).items())
        )
        logger.info("resampled to {} Hz when packed: {}", rate_hz, rates)
        bonafide, spoof = (float(resampled[self.label == label].mean()) for label in (1, 0))
        if abs(bonafide - spoof) > 0.1:
            logger.warning(
                "{:.0%} of bona fide and {:.0%} of spoofed files were resampled: a network can learn that instead of "
                "the attacks",
                bonafide,
                spoof,
            )


_SHOWN = 4  # utterances of each kind
_SHOWN_KINDS = {  # whether bona fide, and 1 for the lowest scores first
    "Bona fide, lowest scores": (True, 1),
    "Spoofed, highest scores": (False, -1),
    "Bona fide, highest scores": (True, -1),
    "Spoofed, lowest scores": (False, 1),
}


class AntispoofModule(TrainModule):
    """Scores utterances: high is bona fide.

    Axes: B utterances, N samples, F bins, T frames, D embedding dimensions.

    Args:
        frontend: (B, N) float32 to (B, F, T) float32; runs outside autocast.
        network: (B, F, T) to (B, D).
        data: whose utterances `sample_figures` shows.
        pooled: the decision's log-odds are added to its own.
    """

    identity_column = "speaker"
    monitor = ("eer", "min")
    tie_breaks = (("cllr", "min"),)  # the rate is 0 for every separation without an overlap
    baseline = ("chance", 0.5)
    rivals = ("pooled logistic",)

    def __init__(
        self,
        frontend: nn.Module,
        network: Network,
        decision: Decision,
        config: Config,
        *,
        trials: Trials,
        data: DataInfo,
        pooled: PooledLogistic | None = None,
    ) -> None:
        super().__init__()
        self.frontend, self.network, self.decision, self.pooled = frontend, network, decision, pooled
        self.config, self.trials = config, trials
        self.spectra = frontends.build_spectra(rate_hz=config.sound.rate_hz, frames=config.sound.frames)
        self.data: Callable[[], DataInfo] = lambda: data  # a function: copying the module must not copy open files

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss, and the share of utterances classified correctly."""
        embedding_BD = self.network(self.compute_maps(batch)).float()
        with torch.autocast(embedding_BD.device.type, enabled=False):
            offset_B = () if self.pooled is None else (self.compute_offset(batch, batch["fold"]),)
            loss = self.decision(embedding_BD, batch["label"], *offset_B)
            correct_B = self.decision.predict_bonafide(embedding_BD.detach(), *offset_B) == (batch["label"] == 1)
        return {"loss": loss, "accuracy": correct_B.float().mean()}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def compute_maps(self, batch: Batch) -> Tensor:
        """Return the network's input, (B, F, T) float32; augmented in training.

        Not compiled: Fourier transforms gain nothing, and complex numbers fall back to eager kernels anyway.
        """
        wave_BN, rule, rate_hz = batch["wave"], self.config.disturb, self.config.sound.rate_hz
        with torch.autocast(wave_BN.device.type, enabled=False):
            if not self.training:
                return self.frontend(wave_BN)  # type: ignore[no-any-return]
            if rule.roll:
                wave_BN = augment.roll(wave_BN, batch["noise"])
            if rule.reverb:
                wave_BN = augment.apply_reverb(wave_BN, batch["noise"], chance=rule.reverb, rate_hz=rate_hz)
            if rule.rawboost:
                wave_BN = augment.apply_rawboost(
                    wave_BN, batch["noise"], chance=rule.rawboost, kind=rule.rawboost_kind, rate_hz=rate_hz
                )
            if rule.codec:
                wave_BN = augment.apply_codec(wave_BN, batch["noise"], chance=rule.codec, rate_hz=rate_hz)
            map_BFT: Tensor = self.frontend(wave_BN)
            if rule.mask:
                map_BFT = augment.apply_specaugment(
                    map_BFT, batch["noise"], chance=rule.mask, bins=rule.mask_bins, frames=rule.mask_frames
                )
            return map_BFT

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def compute_offset(self, batch: Batch, fold_B: Tensor | None = None) -> Tensor:
        """Return the log-odds of the pooled regression, (B,) float32."""
        assert self.pooled is not None
        offset_B: Tensor = self.pooled(batch["wave"], fold_B)
        return offset_B

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the score of each utterance, (B,) float32; needs no labels."""
        return {"score": self._average(self._score_segment, batch), "sample_id": batch["sample_id"]}

    def _average(self, compute: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        return average_segments(compute, batch, WAVE, frames=self.config.sound.frames)

    def _score_segment(self, batch: Batch) -> Tensor:
        embedding_BD = self.network(self.compute_maps(batch)).float()
        with torch.autocast(embedding_BD.device.type, enabled=False):
            score_B = self.decision.score(embedding_BD)
            return score_B if self.pooled is None else score_B + self.compute_offset(batch)

    def describe_predict(self) -> Signature:
        """Return the inputs and outputs of `predict`, and the threshold that the loss implies, if it implies one."""
        threshold = self.decision.threshold
        rate_hz = self.config.sound.rate_hz
        wave = f"samples at {rate_hz} Hz, the first of a recording; a shorter one is repeated from its beginning"
        return Signature(
            {"wave": wave},
            {"score": "high for bona fide"},
            {} if threshold is None else {"threshold": threshold, "bona fide": "score > threshold"},
            tolerance=0.01,  # logarithms of weak bins: a Fourier transform in float64 moves scores by 0.002
        )

    def score(self, rows: Rows) -> dict[str, float]:
        """Return `metrics.compute_metrics`, rates in 0..1; with the t-DCF if the set has its own ASV scores.

        Raises:
            UserError: the set lacks bona fide or spoofed speech, or a score is not finite.
        """
        ids = rows["sample_id"]
        return metrics.compute_metrics(
            rows["score"], self.trials.label[ids] == 1, self.trials.attack[ids].tolist(), asv=self._find_asv_rates(ids)
        )

    def compute_intervals(self, rows: Rows) -> dict[str, float]:
        """Return the 95 % intervals of EER, t-DCF and minimum DCF over resampled speakers."""
        ids = rows["sample_id"]
        found = metrics.compute_intervals(
            rows["score"],
            self.trials.label[ids] == 1,
            self.trials.speaker[ids].tolist(),
            asv=self._find_asv_rates(ids),
            draws=self.config.evaluation.bootstrap_draws,
        )
        return found.to_metrics()

    def _find_asv_rates(self, ids: np.ndarray) -> AsvRates | None:
        names = np.unique(self.trials.set[ids])
        return self.trials.asv.get(str(names[0])) if len(names) == 1 else None

    def report_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return the DET plot and the score histogram of one set."""
        ids, scores = rows["sample_id"], rows["score"].astype(np.float64)
        genuine = self.trials.label[ids] == 1
        attacks = metrics.group_by_attack(scores, genuine, self.trials.attack[ids].tolist())
        return {
            "Detection error trade-off": metrics.draw_det_plot(scores[genuine], attacks),
            "Scores": draw_score_histogram(
                {"bona fide": scores[genuine], "spoofed": scores[~genuine]}, x_label="score"
            ),
        }

    @torch.no_grad()
    def sample_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return the spectra of the utterances with the worst and best scores, with captions."""
        data, ids, genuine = self.data(), rows["sample_id"], self.trials.label[rows["sample_id"]] == 1
        figures = {}
        for title, (is_bonafide, sign) in _SHOWN_KINDS.items():
            places = np.flatnonzero(genuine == is_bonafide)
            places = places[np.argsort(sign * rows["score"][places], kind="stable")[:_SHOWN]]
            cells = []
            for place, record in zip(places.tolist(), data.read(WAVE, ids[places]), strict=True):
                speaker, attack = (names[ids[place]] for names in (self.trials.speaker, self.trials.attack))
                name = "bona fide" if is_bonafide else f"attack {attack}"
                map_FT = self.spectra(self._read_wave(record)[None])[0].cpu().numpy()
                cells.append(([map_FT[::-1]], f"{rows['score'][place]:.3g}: {name}, speaker {speaker or 'unknown'}"))
            if cells:
                figures[title] = draw_samples(title, cells)
        return figures

    def _read_wave(self, record: np.ndarray) -> Tensor:
        """Return a recording as evaluation gets it, (N,) float32 in [-1, 1), on the network's device."""
        recording = record if record.dtype == np.int16 else decode_recording(record)
        frames = self.config.sound.frames
        wave_N = np.resize(recording[:frames], frames).astype(np.float32) / 2**15
        return torch.from_numpy(wave_N).to(next(self.network.parameters()).device)

    def score_baselines(
        self, rows: Rows, evaluated: SampleSource, open_training: Callable[[], SampleSource]
    ) -> dict[str, Score]:
        """Return the metrics of logistic regression on pooled spectra: the run's own, or one fitted here."""
        scores = (
            score_trials(partial(self._average, self._pool_spectra), open_training(), evaluated)
            if self.pooled is None
            else np.concatenate(
                [self._average(self.compute_offset, batch).cpu().numpy() for batch in evaluated.read_batches()]
            )
        )
        pooled = {**rows, "score": scores}
        return {"pooled logistic": Score(self.score(pooled) | self.compute_intervals(pooled))}

    def _pool_spectra(self, batch: Batch) -> Tensor:
        return pool(self.spectra(batch["wave"]))

    def prediction_rows(self, rows: Rows, keys: Sequence[str]) -> Iterator[dict[str, object]]:
        """Yield each file, its utterance name as in protocols, and its score."""
        for key, score in zip(keys, rows["score"].tolist(), strict=True):
            yield {"path": key, "utterance": Path(key).stem, "score": score}

    def repeated_layers(self) -> nn.Sequential:
        """Return the residual blocks."""
        return self.network.blocks

    def parameter_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Give the direction of one-class softmax its own learning rate and no decay: only its angle matters."""
        groups = super().parameter_groups(weight_decay)
        if not isinstance(self.decision, OcSoftmax):
            return groups
        direction = self.decision.direction_D
        for group in groups:
            group["params"] = [p for p in cast(list[Tensor], group["params"]) if p is not direction]
        return [*groups, {"params": [direction], "weight_decay": 0.0, "lr_scale": self.config.loss.lr_scale}]
