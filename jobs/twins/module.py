"""The twins model with its losses and its score."""

import math
from typing import cast

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn
from torch.nn import functional

from trainyard import scoring as verification
from trainyard.errors import UserError
from trainyard.report import score_figures as report_figures
from trainyard.train.module import Batch, DataInfo, Rows, TrainModule

from . import protocol
from .config import Config, EvaluationSettings, HeadSettings
from .network import DualCrossAttention, random_partners, twin_partners
from .weights import load_weights


def build(config: Config, data: DataInfo) -> "TwinsModule":
    """Return the model for the persons that train.

    Raises:
        UserError: a patch does not divide the picture, heads do not divide the dims, or the weights do not fit.
    """
    model, image = config.model, config.image
    if image.height_px % model.patch_px or image.width_px % model.patch_px:
        raise UserError(
            f"image.height_px={image.height_px} image.width_px={image.width_px}: expected multiples of "
            f"model.patch_px={model.patch_px}, such as {image.height_px // model.patch_px * model.patch_px}."
        )
    if model.dims % model.heads:
        raise UserError(f"model.dims={model.dims}: expected a multiple of model.heads={model.heads}.")
    if model.pwca_layers > model.layers:
        raise UserError(f"model.pwca_layers={model.pwca_layers}: expected 0 .. model.layers={model.layers}.")
    if model.stem == "conv" and model.patch_px & (model.patch_px - 1):
        raise UserError(f"model.patch_px={model.patch_px}: expected a power of 2 for model.stem=conv, such as 8 or 16.")
    network = DualCrossAttention(
        image_px=(image.height_px, image.width_px),
        patch_px=model.patch_px,
        channels=image.channels,
        dims=model.dims,
        layers=model.layers,
        heads=model.heads,
        glca=model.glca,
        local_share=model.local_share,
        pwca_layers=model.pwca_layers,
        drop_path=model.drop_path,
        conv_stem=model.stem == "conv",
    )
    if model.weights:
        load_weights(network, model.weights)
    exam = protocol.Exam.of(data.columns, data.vocabulary)
    told = ", ".join(f"{exam.pairs.count(kind)} {name}" for kind, name in enumerate(protocol.KINDS))
    logger.info("evaluation pairs: {}; sha256 {}", told, exam.pairs.sha256()[:16])
    return TwinsModule(
        network,
        person_codes=np.unique(data.columns["person"][data.train_ids]),
        vocabulary_size=len(data.vocabulary["person"]),
        head=config.head,
        twin_share=model.pwca_twin_share,
        exam=exam,
        evaluation=config.evaluation,
    )


class TwinsModule(TrainModule):
    """Embeds faces; learns to tell the training persons apart, twins above all.

    Axes: B pictures, D numbers of a token, C training persons.

    Args:
        person_codes: (C,) the codes of the column `person` that train; each becomes a class.
        vocabulary_size: number of codes there are.
        twin_share: how often a twin is the distracting picture of the pair-wise path.
        exam: the evaluation pairs.
    """

    def __init__(
        self,
        network: DualCrossAttention,
        *,
        person_codes: np.ndarray,
        vocabulary_size: int,
        head: HeadSettings,
        twin_share: float,
        exam: protocol.Exam,
        evaluation: EvaluationSettings,
    ) -> None:
        super().__init__()
        self.network, self.head, self.twin_share = network, head, twin_share
        self.exam, self.evaluation = exam, evaluation
        self.monitor = (f"auc_{protocol.KINDS[exam.rival]}", "max")
        self.branches = ["sa"] + ["glca"] * (network.glca is not None) + ["pwca"] * (network.pwca_layers > 0)
        dims = network.cls_token.shape[2]
        self.necks = nn.ModuleDict({name: Neck(dims) for name in self.branches})
        class_of_code = torch.full((vocabulary_size,), -1, dtype=torch.long)
        class_of_code[torch.from_numpy(person_codes)] = torch.arange(len(person_codes))
        self.register_buffer("class_of_code", class_of_code)
        # Parameters of losses that are switched off do not exist: ranks would wait for gradients that never come.
        if head.arcface_weight > 0:
            directions = {name: nn.Parameter(torch.randn(len(person_codes), dims)) for name in self.branches}
            self.directions = nn.ParameterDict(directions)
        if head.pair_weight > 0:
            self.pair_log_scale = nn.Parameter(torch.tensor(math.log(10.0)))
            self.pair_offset = nn.Parameter(torch.tensor(0.5))
        if head.weighting == "learned":
            self.uncertainty = nn.Parameter(torch.zeros(len(self.branches)))
        # Set by the validation score and saved with the weights that it belongs to; infinite: not known yet.
        self.register_buffer("threshold", torch.tensor(math.inf))
        self.register_buffer("hard_twin", torch.tensor(math.inf))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss over the branches, and of each branch its own."""
        person_B, family_B = batch["person"], batch["family"]
        seen = self.network(batch["image"], self._partners(person_B, family_B))
        relation = Relation(person_B, family_B, batch["sample_id"])
        with torch.autocast(person_B.device.type, enabled=False):  # scaled cosines need more than 8 bits
            losses = {
                name: self._branch_loss(name, getattr(seen, f"{name}_BD").float(), person_B, relation)
                for name in self.branches
            }
            total = self._weighed(torch.stack(list(losses.values())))
        return {"loss": total, **losses, "pairs_per_picture": self._pairs_per_picture(relation)}

    def _partners(self, person_B: Tensor, family_B: Tensor) -> Tensor | None:
        if self.network.pwca_layers == 0:
            return None
        if self.twin_share == 0:
            return random_partners(len(person_B), person_B.device)
        return twin_partners(person_B, family_B, share=self.twin_share)

    def _branch_loss(self, name: str, token_BD: Tensor, person_B: Tensor, relation: "Relation") -> Tensor:
        feature_BD = functional.normalize(self.necks[name](token_BD), dim=1)
        cosine_BB = feature_BD @ feature_BD.T
        loss = feature_BD.new_zeros(())
        if self.head.arcface_weight > 0:
            class_B = cast(Tensor, self.class_of_code)[person_B]
            cosine_BC = functional.linear(feature_BD, functional.normalize(self.directions[name], dim=1))
            logits_BC = arcface_logits(cosine_BC, class_B, scale=self.head.scale, margin=self.head.margin)
            loss = loss + self.head.arcface_weight * functional.cross_entropy(logits_BC, class_B)
        if self.head.triplet_weight > 0:
            loss = loss + self.head.triplet_weight * triplet_loss(cosine_BB, relation, margin=self.head.triplet_margin)
        if self.head.pair_weight > 0:
            logits_BB = self.pair_log_scale.exp() * (cosine_BB - self.pair_offset)
            loss = loss + self.head.pair_weight * pair_loss(logits_BB, relation, strangers=self.head.pair_strangers)
        return loss

    def _pairs_per_picture(self, relation: "Relation") -> Tensor:
        """Return how many pairs come of each encoding, which for a list of pairs is a half."""
        counted = relation.different if self.head.pair_strangers else relation.twin
        return (relation.same | counted).sum() / 2 / len(counted)

    def _weighed(self, loss_N: Tensor) -> Tensor:
        """Add up the branches: half the sum of exp(-w) L + w (section 3.4 of the paper), or by fixed shares."""
        if self.head.weighting == "learned":
            return ((-self.uncertainty).exp() * loss_N + self.uncertainty).sum() / 2
        share = dict(zip(("sa", "glca", "pwca"), self.head.branch_shares, strict=True))
        return (loss_N * loss_N.new_tensor([share[name] for name in self.branches])).sum()

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the embeddings (B, D or 2 D) float32 of unit length. The pair-wise path takes no part."""
        seen = self.network(batch["image"])
        parts = [self.necks["sa"](seen.sa_BD.float())]
        if seen.glca_BD is not None:
            parts.append(self.necks["glca"](seen.glca_BD.float()))
        return {"embedding": functional.normalize(torch.cat(parts, dim=1), dim=1), "sample_id": batch["sample_id"]}

    def score(self, rows: Rows) -> dict[str, float]:
        """Return verification metrics in 0..1 by kind of impostor, with 95 % intervals as `_low` and `_high`.

        `*_twin`: same against twins, the headline; `*_random`: against strangers; `*_mixed`: against both;
        `*_hard_twin`: against those twin pairs that score above the median of the validation's. Scoring the validation
        set sets that median, and the threshold at its equal error rate: `accuracy_*` are at that threshold.

        Raises:
            UserError: no pair of one person, no pair of two, or embeddings that are not finite.
        """
        scores = self.exam.scores(rows["embedding"], rows["sample_id"])
        same, twin = scores.of(protocol.SAME), scores.of(protocol.TWIN)
        if self.exam.validates[rows["sample_id"]].all():
            self._learn_from(same, scores.of(self.exam.rival), twin)
        threshold, hard_twin = (float(cast(Tensor, value)) for value in (self.threshold, self.hard_twin))
        rivals = {
            "twin": twin,
            "random": scores.of(protocol.RANDOM),
            "mixed": scores.of(protocol.TWIN, protocol.RANDOM),
            "hard_twin": twin.above(hard_twin),
        }
        metrics = {f"pairs_{name}": float(len(scores.of(kind).score)) for kind, name in enumerate(protocol.KINDS)}
        for name, impostor in rivals.items():
            if len(impostor.score):
                metrics |= protocol.metrics(same, impostor, suffix=name, draws=self.evaluation.bootstrap_draws)
                if math.isfinite(threshold):
                    metrics[f"accuracy_{name}"] = protocol.accuracy(same, impostor, threshold)
        return metrics

    def report_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return how the scores of each kind of pair are spread, and the error trade-off against each impostor."""
        scores = self.exam.scores(rows["embedding"], rows["sample_id"])
        by_kind = {name: scores.of(kind).score for kind, name in enumerate(protocol.KINDS)}
        by_kind = {name: values for name, values in by_kind.items() if len(values)}
        genuine = by_kind[protocol.KINDS[protocol.SAME]]
        impostors = {name: values for name, values in by_kind.items() if name != protocol.KINDS[protocol.SAME]}
        return {
            "Scores by kind of pair": report_figures.draw_score_histogram(by_kind, x_label="cosine"),
            "Error trade-off": report_figures.draw_error_trade_off(genuine, impostors),
        }

    def _learn_from(self, same: protocol.Scores, impostor: protocol.Scores, twin: protocol.Scores) -> None:
        """Take the threshold and the hardness of twins from the validation set."""
        point = verification.compute_error_rates(same.score, impostor.score).equal_error_rate()
        cast(Tensor, self.threshold).fill_(point.threshold)
        if len(twin.score):
            cast(Tensor, self.hard_twin).fill_(float(np.median(twin.score)))

    def repeated_layers(self) -> nn.ModuleList:
        """Return the self-attention blocks."""
        return self.network.blocks


class Neck(nn.BatchNorm1d):
    """Batch normalisation without weights between a token and its cosines (BNNeck, arXiv:1903.07071).

    A batch of one picture, which some rank may get to keep step with the others, is normalised as in evaluation.
    """

    def __init__(self, dims: int) -> None:
        super().__init__(dims, affine=False)

    def forward(self, token_BD: Tensor) -> Tensor:
        if self.training and len(token_BD) == 1:
            return functional.batch_norm(token_BD, self.running_mean, self.running_var, eps=self.eps)
        return super().forward(token_BD)


class Relation:
    """What two pictures of a batch are to each other; all (B, B) bool, symmetric, the diagonal empty.

    A picture that comes twice in a batch, to fill up its family's group, is no pair with itself.
    """

    def __init__(self, person_B: Tensor, family_B: Tensor, sample_id_B: Tensor) -> None:
        distinct = sample_id_B[:, None] != sample_id_B
        one_person = person_B[:, None] == person_B
        one_family = family_B[:, None] == family_B
        self.same = one_person & distinct
        self.twin = one_family & ~one_person
        self.stranger = ~one_family
        self.different = ~one_person


def arcface_logits(cosine_BC: Tensor, class_B: Tensor, *, scale: float, margin: float) -> Tensor:
    """Return s * cos(angle + m) for the true class and s * cos for the others: ArcFace (arXiv:1801.07698, equation 3).

    Beyond pi - m the cosine would rise again; from there on it goes on falling in a straight line, as in the authors'
    code.
    """
    is_true_BC = class_B[:, None] == torch.arange(cosine_BC.shape[1], device=class_B.device)
    sine_BC = (1 - cosine_BC.square()).clamp(min=1e-7).sqrt()
    turned_BC = cosine_BC * math.cos(margin) - sine_BC * math.sin(margin)
    falling_BC = torch.where(cosine_BC > -math.cos(margin), turned_BC, cosine_BC - margin * math.sin(margin))
    return scale * torch.where(is_true_BC, falling_BC, cosine_BC)


def triplet_loss(cosine_BB: Tensor, relation: Relation, *, margin: float) -> Tensor:
    """Return the mean of max(0, m - positive + negative) over pictures with both: the hardest of each in the batch.

    Hardest (arXiv:1703.07737): the least alike of the same person, the most alike of the twin; where the batch holds
    no twin, the most alike of anybody else.
    """
    rival_BB = torch.where(relation.twin.any(dim=1, keepdim=True), relation.twin, relation.different)
    positive_B = cosine_BB.masked_fill(~relation.same, 2).amin(dim=1)
    negative_B = cosine_BB.masked_fill(~rival_BB, -2).amax(dim=1)
    counts_B = relation.same.any(dim=1) & rival_BB.any(dim=1)
    violation_B = functional.relu(margin - positive_B + negative_B) * counts_B
    return violation_B.sum() / counts_B.sum().clamp(min=1)


def pair_loss(logits_BB: Tensor, relation: Relation, *, strangers: bool) -> Tensor:
    """Return the cross-entropy of "the same person" over all pairs; same and different ones weigh alike."""
    different = relation.different if strangers else relation.twin
    return (
        _mean(functional.softplus(-logits_BB), relation.same) + _mean(functional.softplus(logits_BB), different)
    ) / 2


def _mean(value_BB: Tensor, chosen_BB: Tensor) -> Tensor:
    return (value_BB * chosen_BB).sum() / chosen_BB.sum().clamp(min=1)
