"""The fingerprint model with its loss and metrics."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard import scoring
from trainyard.config.duration import Duration
from trainyard.errors import UserError
from trainyard.report import score_figures
from trainyard.runs.evaluations import RUN
from trainyard.train.module import Batch, DataInfo, Rows, SampleSource, Score, Signature, TrainModule

from .class_sampling import compute_sampled_cosines, draw_classes
from .config import DENSE, Config
from .dense import DenseModule
from .identification import Compare, compute_identification_metrics, draw_cmc
from .minutia_maps import draw_targets
from .network import SMALLEST_INPUT_PX, Aligner, BranchOutputs, DeepPrint, MinutiaMapHead
from .pairs import (
    compute_pair_intervals,
    compute_pair_metrics,
    find_extreme_pairs,
    number_fingers,
    score_pairs,
    split_kinds,
    subsample_fingers,
)

if TYPE_CHECKING:
    from .methods import Trials

_SHOWN = 4  # pairs of each kind


def build(config: Config, data: DataInfo) -> TrainModule:
    """Return the model for the training fingers.

    Raises:
        UserError: the image is too small for the network, `model.blocks` is not three counts, or the network trains on
            minutiae, but the data has none.
    """
    model, image = config.model, config.image
    if model.name == DENSE:
        _require_record(data, "ridges", "packing.ridges=placed")
        return DenseModule(config, data)
    if min(image.height_px, image.width_px) < SMALLEST_INPUT_PX:
        raise UserError(
            f"image.height_px={image.height_px} image.width_px={image.width_px}: the network halves an image five "
            f"times and needs {SMALLEST_INPUT_PX} px or more. Use the paper's 299, or 144 for a quick test."
        )
    if len(model.blocks) != 3 or min(model.blocks) < 0:
        raise UserError(
            f"model.blocks={model.blocks}: expected three counts, for blocks A, B and C, such as [4,7,3] or [1,2,1]."
        )
    if model.name == "deepprint_texminu" and model.embedding_dims % 2:
        raise UserError(
            f"model.embedding_dims={model.embedding_dims}: the two branches of deepprint_texminu have half of it each. "
            f"Type model.embedding_dims={model.embedding_dims + 1}"
        )
    aligner = Aligner(image.channels, rotate_deg=model.stn_rotate_deg, shift=model.stn_shift) if model.stn else None
    network = DeepPrint(
        name=model.name,
        channels=image.channels,
        embedding_dims=model.embedding_dims,
        width=model.width,
        blocks=model.blocks,
        dropout=model.dropout,
        aligner=aligner,
    )
    if network.minutia is not None:
        _require_record(data, "minutiae", "packing.minutiae")
    return FingerprintModule(network, config, data)


def _parse_warmup(config: Config, train_samples: int) -> int:
    if not config.head.margin_warmup:
        return 0
    duration = Duration.parse(config.head.margin_warmup)
    if duration.unit == "ep":
        return round(duration.value * train_samples)
    if duration.unit == "st":
        return int(duration.value) * config.global_batch_size
    raise UserError(f"head.margin_warmup={duration}: expected epochs or steps, not a time. Write 5ep or 1000st.")


class FingerprintModule(TrainModule):
    """Embeds prints; trains by classifying the training fingers by each branch, and by drawing minutia maps.

    Shapes: B prints, D embedding size, C training fingers.

    Args:
        network: maps images to unit-norm embeddings (B, D).
        data: each finger in the training set becomes a class; no columns: to embed prints of unknown fingers.
    """

    monitor = ("eer_all_pairs", "min")
    tie_breaks = (("d_prime", "max"),)  # the rate is 0 for every separation without an overlap
    identity_column = "finger"
    baseline = ("chance", 0.5)
    reads_noise = False
    matcher = "matcher"
    training_only = ("class_of_code", "directions", "centres.", "map_head.")

    def __init__(self, network: DeepPrint, config: Config, data: DataInfo) -> None:
        super().__init__()
        self.network, self.head, self.evaluation = network, config.head, config.evaluation
        self.data: Callable[[], DataInfo] = lambda: data  # a function: copying the module must not copy open files
        finger = data.columns.get("finger", np.empty(0, dtype=np.int64))
        finger_codes, dims = np.unique(finger[data.train_ids]), config.model.embedding_dims
        class_of_code = torch.full((len(data.vocabulary.get("finger", ())),), -1, dtype=torch.long)
        class_of_code[torch.from_numpy(finger_codes)] = torch.arange(len(finger_codes))
        self.register_buffer("class_of_code", class_of_code)
        self.directions = nn.Parameter(torch.randn(len(finger_codes), dims))
        self.centres = CentreLoss(len(finger_codes), dims) if self.head.centre_weight > 0 else None
        minutia, width = network.minutia, config.model.width
        self.map_head = None if minutia is None else MinutiaMapHead(minutia.stem_channels, width)
        self.margin = self.head.margin if self.head.name == "cosface" else 0.0
        self.margin_warmup_samples = _parse_warmup(config, len(data.train_ids))
        self.sampled_classes = min(self.head.sampled_classes, len(finger_codes))
        self.seed, self.global_batch_size = config.seed, config.global_batch_size
        self.region_px = config.packing.region_px

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss, its parts, and the accuracy.

        The loss is the sum of the branches' softmax losses over cosines, the weighted centre loss of the branches'
        embeddings, and the weighted squared error of the minutia maps.
        """
        outputs = self.network.compute_branches(batch["image"])
        embedding_BD = torch.cat(outputs.embeddings, dim=1)
        class_B = cast(Tensor, self.class_of_code)[batch["finger"]]
        losses: dict[str, Tensor] = {"loss": embedding_BD.new_zeros(())}
        accuracies = {}
        with torch.autocast(embedding_BD.device.type, enabled=False):  # scaled cosines need more than 8 bits
            directions = torch.split(self.directions, outputs.embeddings[0].shape[1], dim=1)
            parts = zip(self.network.branches, outputs.embeddings, directions, strict=True)
            for branch, embedding_Bd, direction_Cd in parts:
                suffix = f"_{branch}" * (len(directions) > 1)
                softmax, accuracies["accuracy" + suffix] = self._classify(embedding_Bd, direction_Cd, class_B, batch)
                losses["softmax" + suffix], losses["loss"] = softmax, losses["loss"] + softmax
            if self.centres is not None:
                losses["centre"] = self.centres(embedding_BD, class_B)
                losses["loss"] = losses["loss"] + self.head.centre_weight * losses["centre"]
        if self.map_head is not None:
            losses["map"] = self._compute_map_loss(self.map_head, outputs, batch)
            losses["loss"] = losses["loss"] + self.head.map_weight * losses["map"]
        return losses | accuracies

    def _classify(
        self, embedding_BD: Tensor, direction_CD: Tensor, class_B: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Return the softmax loss of a branch's embeddings, and the accuracy."""
        cosine_BC, true_B = self._compute_cosines(embedding_BD, direction_CD, class_B, batch)
        margin = self._compute_margin(batch)
        logits_BC = compute_cosface_logits(cosine_BC, true_B, scale=self.head.scale, margin=margin)
        accuracy = (cosine_BC.detach().argmax(dim=1) == true_B).float().mean()
        return functional.cross_entropy(logits_BC, true_B), accuracy

    def _compute_map_loss(self, map_head: MinutiaMapHead, outputs: BranchOutputs, batch: Batch) -> Tensor:
        """Return the mean squared error of the minutia maps."""
        maps_B6HW = map_head(outputs.minutia_BCHW)
        with torch.autocast(maps_B6HW.device.type, enabled=False):
            target_B6HW = draw_targets(batch, outputs.pose_B23, (maps_B6HW.shape[2], maps_B6HW.shape[3]))
            return functional.mse_loss(maps_B6HW.float(), target_B6HW)

    def _compute_cosines(
        self, embedding_BD: Tensor, direction_CD: Tensor, class_B: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Return the cosines with the classes that this step compares with, and the column of each print's own."""
        if not self.sampled_classes:
            return functional.linear(embedding_BD, functional.normalize(direction_CD, dim=1)), class_B
        sampled_S = draw_classes(
            self.sampled_classes,
            classes=len(self.directions),
            seed=self.seed,
            samples_seen=batch.get("samples_seen", torch.zeros((), dtype=torch.long, device=class_B.device)),
        )
        cosine_BS = compute_sampled_cosines(embedding_BD, direction_CD, class_B, sampled_S)
        return cosine_BS, torch.zeros_like(class_B)

    def _compute_margin(self, batch: Batch) -> Tensor | float:
        """Return the current margin, a function of the samples seen by all ranks; so it needs no state."""
        samples_seen = batch.get("samples_seen")
        if samples_seen is None or self.margin_warmup_samples == 0:
            return self.margin
        return self.margin * (samples_seen.float() / self.margin_warmup_samples).clamp(max=1)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the embeddings (B, D) float32 with sample id and, where they are known, finger and impression."""
        rows = {"embedding": self.network(batch["image"]), "sample_id": batch["sample_id"]}
        return rows | {name: batch[name] for name in ("finger", "impression") if name in batch}

    def describe_predict(self) -> Signature:
        """Describe the network's inputs and outputs."""
        return Signature(
            {"image": "gray levels of a print as packing cuts it (options.packing), resized to height and width"},
            {"embedding": "unit length; the score of two prints is their inner product"},
        )

    def score(self, rows: Rows) -> dict[str, float]:
        """Return verification metrics in 0..1.

        `eer`, `zero_fmr`, ... follow the FVC protocol: genuine pairs are all pairs of a finger, impostor pairs are the
        first impressions of any two fingers. Names ending in `_all_pairs` use every cross-finger pair instead, which is
        more informative for few fingers: 10 fingers with 8 impressions have 45 FVC impostor pairs, but 2,880 in all.
        `rank1` and others are of identification (`identification`).

        Raises:
            UserError: fewer than two fingers, no finger with two impressions, or embeddings that are not finite.
        """
        metrics = compute_pair_metrics(*self._score_subsample(rows))
        return metrics | compute_identification_metrics(*self._select_prints(rows))

    def compute_intervals(self, rows: Rows) -> dict[str, float]:
        """Return the ends of the intervals of `score`'s metrics over resampled fingers."""
        return compute_pair_intervals(*self._score_subsample(rows), draws=self.evaluation.bootstrap_draws)

    def score_baselines(
        self, rows: Rows, evaluated: SampleSource, open_training: Callable[[], SampleSource]
    ) -> dict[str, Score]:
        """Return what band-limited phase-only correlation and the matcher get, which learn nothing.

        All three on the same pairs: FNMR by print quality and, with evaluation.pose_curve, of turned and moved probes.
        """
        from .conditions import compute_quality_metrics, compute_run_metrics, compute_turn_metrics, embed_moved
        from .methods import choose_trials, score_methods

        trials, device = choose_trials(evaluated, most=self.evaluation.baseline_pairs), self.directions.device
        places = np.searchsorted(rows["sample_id"], trials.ids)
        embedding = rows["embedding"][places]
        scores = score_methods(trials.images, trials.dpi, trials.one, trials.other, device=device)
        results = {name: self._score_trials(trials, score_P) for name, score_P in scores.items()}
        scores[RUN] = scoring.compare_embeddings(embedding[trials.one], embedding[trials.other])
        conditions = compute_quality_metrics(trials, scores)
        if self.evaluation.pose_curve:

            def embed(*, degrees: float, shift_px: float) -> np.ndarray:
                batches, shift = evaluated.read_batches(), shift_px / self.region_px
                return embed_moved(self.network, batches, degrees=degrees, shift=shift)[places]

            values = [
                *compute_turn_metrics(trials, scores, device=device),
                *compute_run_metrics(trials, RUN, scores[RUN], embedding, embed),
            ]
            for system, name, value in values:
                conditions.setdefault(system, {})[name] = value
        for system, metrics in conditions.items():
            known = results.get(system, Score({}))
            results[system] = replace(known, metrics={**known.metrics, **metrics})
        return results

    def _score_trials(self, trials: "Trials", score_P: np.ndarray) -> Score:
        pairs, is_fvc = trials.select_pairs(score_P)
        metrics = compute_pair_metrics(pairs, is_fvc)
        metrics |= compute_pair_intervals(pairs, is_fvc, draws=self.evaluation.bootstrap_draws)
        if (matrix_NN := trials.fill_matrix(score_P)) is not None:
            metrics |= compute_identification_metrics(
                lambda gallery: matrix_NN[:, gallery], trials.identity, trials.impression
            )
        return Score(metrics, split_kinds(pairs, is_fvc))

    def match_samples(self, data: DataInfo, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return the matcher's scores of pairs of prints: about 0 of two fingers, see `matching`."""
        from .methods import match_samples

        return match_samples(data, one, other, device=self.directions.device)

    def select_embeddings(self, rows: Rows) -> np.ndarray:
        """Return the embeddings, which are compared by their cosine."""
        return rows["embedding"]

    def select_pair_scores(self, rows: Rows) -> dict[str, np.ndarray]:
        """Return the scores of genuine pairs, of all cross-finger pairs, and of those of the FVC protocol."""
        return split_kinds(*self._score_subsample(rows))

    def _score_subsample(self, rows: Rows) -> tuple[scoring.Pairs, np.ndarray]:
        kept = subsample_fingers(rows["finger"], self.evaluation.impostors_max)
        return score_pairs(*(rows[name][kept] for name in ("embedding", "finger", "impression")))

    def _select_prints(self, rows: Rows) -> tuple[Compare, np.ndarray, np.ndarray]:
        """Return how to compare the prints that are scored, their fingers numbered from 0, and their impressions."""
        kept = subsample_fingers(rows["finger"], self.evaluation.impostors_max)
        embedding, finger, impression = (rows[name][kept] for name in ("embedding", "finger", "impression"))
        identity, _ = number_fingers(finger, impression)
        return lambda gallery: embedding @ embedding[gallery].T, identity, impression

    def report_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return the scores of genuine and impostor pairs, their error trade-off, the CMC, and the embeddings."""
        pairs, _ = self._score_subsample(rows)
        kinds = {"genuine": pairs.genuine, "impostor": pairs.impostor}
        return {
            "Scores by kind of pair": score_figures.draw_score_histogram(kinds, x_label="cosine"),
            "Error trade-off": score_figures.draw_error_trade_off({"all pairs": (pairs.genuine, pairs.impostor)}),
            "Identification": draw_cmc(*self._select_prints(rows)),
            "Embeddings by PCA": score_figures.draw_embedding_map(rows["embedding"], rows["finger"]),
        }

    def sample_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return the pairs of prints with the worst and the best scores, and whose they are."""
        data, kept = self.data(), subsample_fingers(rows["finger"], self.evaluation.impostors_max)
        ids, names = rows["sample_id"][kept], data.vocabulary["finger"]
        figures = {}
        for title, pairs in find_extreme_pairs(rows["embedding"][kept], rows["finger"][kept], count=_SHOWN).items():
            cells = []
            for score, *places in pairs:
                prints = [score_figures.decode_image(record) for record in data.read("image", ids[places])]
                labels = [f"{names[rows['finger'][kept[i]]]}-{rows['impression'][kept[i]]}" for i in places]
                cells.append((prints, f"{score:.3f}: {labels[0]}, {labels[1]}"))
            figures[title] = score_figures.draw_samples(title, cells)
        return figures

    def repeated_layers(self) -> list[nn.Module]:
        """Return the Inception blocks."""
        return self.network.list_blocks()

    def sparse_gradients(self) -> dict[str, int]:
        """Return the classes that a global batch compares with: its own and the sampled ones; centres only its own."""
        if not self.sampled_classes:
            return {}
        sparse = {"directions": self.sampled_classes + self.global_batch_size}
        return sparse if self.centres is None else sparse | {"centres.weight": self.global_batch_size}

    def parameter_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Exempt the centres from weight decay, which would pull them, and the embeddings, towards zero."""
        groups = super().parameter_groups(weight_decay)
        if self.centres is None:
            return groups
        centres = self.centres.weight
        for group in groups:
            group["params"] = [p for p in cast(list[nn.Parameter], group["params"]) if p is not centres]
        return groups + [{"params": [centres], "weight_decay": 0.0}]


def _require_record(data: DataInfo, name: str, option: str) -> None:
    """Refuse data that was packed without a record that the model trains on."""
    if not len(data.train_ids):
        return
    try:
        data.read(name, data.train_ids[:1])
    except KeyError:
        raise UserError(
            f"data.path: this packed data has no {name}, which model.name trains on: it was packed without {option}. "
            "Name the folder of raw files instead, which is packed again: data.path=FOLDER"
        ) from None


class CentreLoss(nn.Module):
    """Mean squared distance of embeddings to the centre of their class (Wen et al., ECCV 2016).

    The centres are parameters that follow the gradient of this loss, not a running mean outside the optimizer. So ranks
    average their gradients as for any parameter, and a checkpoint contains all the state. The loss is the mean over the
    batch, so its weight does not depend on the batch size as with the paper's sum.
    """

    def __init__(self, classes: int, dims: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(functional.normalize(torch.randn(classes, dims), dim=1))

    def forward(self, embedding_BD: Tensor, class_B: Tensor) -> Tensor:
        return (embedding_BD - self.weight[class_B]).square().sum(dim=1).mean()


def compute_cosface_logits(cosine_BC: Tensor, class_B: Tensor, *, scale: float, margin: Tensor | float) -> Tensor:
    """Return s * (cos - m) for the true class and s * cos for the others: CosFace (arXiv:1801.09414, equation 4)."""
    is_true_BC = class_B[:, None] == torch.arange(cosine_BC.shape[1], device=class_B.device)
    return scale * torch.where(is_true_BC, cosine_BC - margin, cosine_BC)
