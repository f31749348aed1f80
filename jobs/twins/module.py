"""The twins model: losses, prediction and scoring."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn
from torch.nn import functional

from trainyard import scoring
from trainyard.errors import UserError
from trainyard.report import score_figures
from trainyard.train.module import AdaptedWeights, Batch, DataInfo, Rows, SampleSource, Score, Signature, TrainModule

from . import protocol
from .config import Config
from .network import DualCrossAttention, draw_random_partners, draw_twin_partners
from .pretraining import ImageModule
from .weights import adapt_weights


def build(config: Config, data: DataInfo) -> TrainModule:
    """Build the model for the people in the training set, or with `objective=image` for their faces alone.

    Raises:
        UserError: the patch does not divide the image, the heads do not divide the dims, or a model without embeddings
            is to embed.
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
    module: TrainModule
    image_px = (image.height_px, image.width_px)
    if config.objective == "image":
        if not data.columns:
            raise UserError(
                "This run learned to fill in masked faces (objective=image), so it has no embeddings. Start a run that "
                f"learns them from it: trainyard run {config.job} data.path=FOLDER start_from=RUN"
            )
        module = ImageModule(model, image_px=image_px, channels=image.channels)
    else:
        if model.stem == "patch" and not (model.weights or config.start_from) and len(data.train_ids):
            logger.warning(
                "the network begins with random weights, and optimizer.lr={:g} is meant for a pretrained ViT: on few "
                "faces it may learn nothing. Name weights (model.weights=FILE, start_from=RUN), or take "
                "model.stem=conv",
                config.optimizer.lr,
            )
        module = TwinsModule(DualCrossAttention(model, image_px=image_px, channels=image.channels), config, data)
    if model.weights:
        module.start_file = (f"model.weights={model.weights}", model.weights)
    return module


_PIXELS = 32  # rows and columns, at least, of the gray image that is part of an embedding, with `head.pixels`
_SHOWN = 4
_SHOWN_KINDS = {  # the kind of pair, and 1 for the lowest scores first
    "One person, lowest scores": (protocol.SAME, 1),
    "Twins, highest scores": (protocol.TWIN, -1),
    "Strangers, highest scores": (protocol.RANDOM, -1),
    "One person, highest scores": (protocol.SAME, -1),
}


class TwinsModule(TrainModule):
    """Embeds faces; learns to tell the people in the training set apart, above all twins.

    Axes: B images, D token width, C people in the training set.

    Args:
        data: each person in the training set becomes a class; no columns: to embed faces of unknown people.
    """

    identity_column = "person"
    baseline = ("chance", 0.5)
    rivals = ("raw pixels",)
    reads_noise = False
    training_only = ("class_of_code", "directions.")
    class_of_code: Tensor
    threshold: Tensor
    hard_twin: Tensor

    def __init__(self, network: DualCrossAttention, config: Config, data: DataInfo) -> None:
        super().__init__()
        head = config.head
        self.network, self.head, self.twin_share = network, head, config.model.pwca_twin_share
        self.draws = config.evaluation.bootstrap_draws
        self.data: Callable[[], DataInfo] = lambda: data  # a function: copying the module must not copy open files
        self.evaluation_set, person = protocol.EvaluationSet.make_empty(), np.empty(0, dtype=np.int64)
        if data.columns:
            self.evaluation_set = protocol.EvaluationSet.from_columns(data.columns, data.vocabulary)
            person, pairs = data.columns["person"], self.evaluation_set.pairs
            counts = ", ".join(f"{pairs.count(kind)} {name}" for kind, name in enumerate(protocol.KINDS))
            logger.info("evaluation pairs: {}; sha256 {}", counts, pairs.compute_sha256()[:16])
        person_codes = np.unique(person[data.train_ids])
        deciding = protocol.KINDS[self.evaluation_set.deciding_impostor]
        self.monitor = (f"auc_{deciding}", "max")
        self.tie_breaks = ((f"d_prime_{deciding}", "max"),)  # the area is 1 for every separation without an overlap
        self.branches = ["sa"] + ["glca"] * (network.glca is not None) + ["pwca"] * (network.pwca_layers > 0)
        dims = network.cls_token.shape[2]
        self.necks = nn.ModuleDict({name: Neck(dims) for name in self.branches})
        class_of_code = torch.full((len(data.vocabulary.get("person", ())),), -1, dtype=torch.long)
        class_of_code[torch.from_numpy(person_codes)] = torch.arange(len(person_codes))
        self.register_buffer("class_of_code", class_of_code)
        # Disabled losses get no parameters: DDP would wait for gradients that never arrive.
        if head.arcface_weight > 0:
            directions = {name: nn.Parameter(torch.randn(len(person_codes), dims)) for name in self.branches}
            self.directions = nn.ParameterDict(directions)
        if head.pair_weight > 0:
            self.pair_log_scale = nn.Parameter(torch.tensor(math.log(10.0)))
            self.pair_offset = nn.Parameter(torch.tensor(0.5))
        if head.weighting == "learned":
            self.uncertainty = nn.Parameter(torch.zeros(len(self.branches)))
        # Set when validation is scored, and saved with the weights they belong to; infinite: not set yet.
        self.register_buffer("threshold", torch.tensor(math.inf))
        self.register_buffer("hard_twin", torch.tensor(math.inf))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the total loss and the loss of each branch."""
        person_B, family_B = batch["person"], batch["family"]
        tokens = self.network(batch["image"], self._choose_partners(person_B, family_B))
        relation = Relation(person_B, family_B, batch["sample_id"])
        with torch.autocast(person_B.device.type, enabled=False):  # scaled cosines need more than 8 bits
            losses = {
                name: self._compute_branch_loss(name, getattr(tokens, f"{name}_BD").float(), person_B, relation)
                for name in self.branches
            }
            total = self._weight_losses(torch.stack(list(losses.values())))
        return {"loss": total, **losses, "pairs_per_image": self._count_pairs_per_image(relation)}

    def _choose_partners(self, person_B: Tensor, family_B: Tensor) -> Tensor | None:
        if self.network.pwca_layers == 0:
            return None
        if self.twin_share == 0:
            return draw_random_partners(len(person_B), person_B.device)
        return draw_twin_partners(person_B, family_B, share=self.twin_share)

    def _compute_branch_loss(self, name: str, token_BD: Tensor, person_B: Tensor, relation: "Relation") -> Tensor:
        feature_BD = functional.normalize(self.necks[name](token_BD), dim=1)
        cosine_BB = feature_BD @ feature_BD.T
        loss = feature_BD.new_zeros(())
        if self.head.arcface_weight > 0:
            class_B = self.class_of_code[person_B]
            cosine_BC = functional.linear(feature_BD, functional.normalize(self.directions[name], dim=1))
            logits_BC = arcface_logits(cosine_BC, class_B, scale=self.head.scale, margin=self.head.margin)
            loss = loss + self.head.arcface_weight * functional.cross_entropy(logits_BC, class_B)
        if self.head.triplet_weight > 0:
            loss = loss + self.head.triplet_weight * triplet_loss(cosine_BB, relation, margin=self.head.triplet_margin)
        if self.head.pair_weight > 0:
            logits_BB = self.pair_log_scale.exp() * (cosine_BB - self.pair_offset)
            loss = loss + self.head.pair_weight * pair_loss(logits_BB, relation, strangers=self.head.pair_strangers)
        return loss

    def _count_pairs_per_image(self, relation: "Relation") -> Tensor:
        """Return the number of pairs per encoded image; a list of pairs has 0.5."""
        different_BB = relation.different if self.head.pair_strangers else relation.twin
        return (relation.same | different_BB).sum() / 2 / len(different_BB)

    def _weight_losses(self, loss_N: Tensor) -> Tensor:
        """Sum the branch losses: half the sum of exp(-w) L + w (section 3.4 of the paper), or with fixed weights."""
        if self.head.weighting == "learned":
            return ((-self.uncertainty).exp() * loss_N + self.uncertainty).sum() / 2
        share = dict(zip(("sa", "glca", "pwca"), self.head.branch_shares, strict=True))
        return (loss_N * loss_N.new_tensor([share[name] for name in self.branches])).sum()

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return unit-length embeddings (B, D or 2 D) float32, pixels after it. The pair-wise path is not used.

        With a share p of pixels the inner product is (1 - p) of the network's cosine and p of the pixels'.
        """
        tokens = self.network(batch["image"])
        parts = [self.necks["sa"](tokens.sa_BD.float())]
        if tokens.glca_BD is not None:
            parts.append(self.necks["glca"](tokens.glca_BD.float()))
        embedding_BE = functional.normalize(torch.cat(parts, dim=1), dim=1)
        if share := self.head.pixels:
            gray_B1HW = batch["image"].float().mean(dim=1, keepdim=True)
            small_B1HW = functional.avg_pool2d(gray_B1HW, [max(1, side // _PIXELS) for side in gray_B1HW.shape[2:]])
            weighted = [(1 - share) ** 0.5 * embedding_BE, share**0.5 * normalise_pixels(small_B1HW)]
            embedding_BE = torch.cat(weighted, dim=1)
        return {"embedding": embedding_BE, "sample_id": batch["sample_id"]}

    def describe_predict(self) -> Signature:
        """Describe the network's inputs and outputs."""
        return Signature(
            {"image": "a face crop, resized to height and width"},
            {"embedding": "unit length; the score of two faces is their inner product"},
        )

    def score(self, rows: Rows) -> dict[str, float]:
        """Return verification metrics in 0..1 by kind of impostor.

        `*_twin`: same person against twins, the headline; `*_random`: against strangers; `*_mixed`: against both;
        `*_hard_twin`: against twin pairs that score above the median twin pair of the validation set. Scoring the
        validation set updates that median and the threshold, its equal error rate point, which `accuracy_*` uses.

        Raises:
            UserError: there are no genuine or no impostor pairs, or embeddings are not finite.
        """
        scores = self.evaluation_set.score_pairs(rows["embedding"], rows["sample_id"])
        if self.evaluation_set.is_validation[rows["sample_id"]].all():
            same, twin = scores.select_kinds(protocol.SAME), scores.select_kinds(protocol.TWIN)
            impostor = scores.select_kinds(self.evaluation_set.deciding_impostor)
            rates = scoring.compute_error_rates(same.score, impostor.score)
            self.threshold.fill_(rates.equal_error_rate().threshold)
            if len(twin.score):
                self.hard_twin.fill_(float(np.median(twin.score)))
        return _compute_metrics(scores, threshold=float(self.threshold), hard_twin=float(self.hard_twin))

    def compute_intervals(self, rows: Rows) -> dict[str, float]:
        """Return the ends of the intervals of `score`'s metrics over resampled families."""
        scores = self.evaluation_set.score_pairs(rows["embedding"], rows["sample_id"])
        return _compute_intervals(scores, hard_twin=float(self.hard_twin), draws=self.draws)

    def score_baselines(
        self, rows: Rows, evaluated: SampleSource, open_training: Callable[[], SampleSource]
    ) -> dict[str, Score]:
        """Return the metrics of raw pixels, and of the self-attention branch alone if the model has another.

        Without accuracy and hard twins: the threshold and the median of the validation set are the whole model's.
        """
        embeddings = {"raw pixels": embed_pixels(evaluated.read_batches())}
        if "glca" in self.branches:
            sa = rows["embedding"][:, : self.network.cls_token.shape[2]]
            embeddings["SA branch alone"] = sa / np.linalg.norm(sa, axis=1, keepdims=True)
        results = {}
        for name, embedding in embeddings.items():
            scores = self.evaluation_set.score_pairs(embedding, evaluated.ids)
            metrics = _compute_metrics(scores, threshold=math.inf, hard_twin=math.inf)
            intervals = _compute_intervals(scores, hard_twin=math.inf, draws=self.draws)
            results[name] = Score(metrics | intervals, self._split_kinds(scores))
        return results

    def select_embeddings(self, rows: Rows) -> np.ndarray:
        """Return the embeddings, which are compared by their cosine."""
        return rows["embedding"]

    def select_pair_scores(self, rows: Rows) -> dict[str, np.ndarray]:
        """Return the scores of pairs of one person, and of each kind of impostor; first the kind that decides."""
        return self._split_kinds(self.evaluation_set.score_pairs(rows["embedding"], rows["sample_id"]))

    def _split_kinds(self, scores: protocol.Scores) -> dict[str, np.ndarray]:
        decides = self.evaluation_set.deciding_impostor
        kinds = [decides, protocol.TWIN + protocol.RANDOM - decides]
        by_kind = {protocol.KINDS[kind]: scores.select_kinds(kind).score for kind in kinds}
        same = scores.select_kinds(protocol.SAME).score
        return {"genuine": same} | {name: values for name, values in by_kind.items() if len(values)}

    def report_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return the score histogram by kind of pair, the error trade-off against each impostor, and the embeddings."""
        scores = self.evaluation_set.score_pairs(rows["embedding"], rows["sample_id"])
        by_kind = {name: scores.select_kinds(kind).score for kind, name in enumerate(protocol.KINDS)}
        by_kind = {name: values for name, values in by_kind.items() if len(values)}
        same = protocol.KINDS[protocol.SAME]
        trade_offs = {name: (by_kind[same], values) for name, values in by_kind.items() if name != same}
        return {
            "Scores by kind of pair": score_figures.draw_score_histogram(by_kind, x_label="cosine"),
            "Error trade-off": score_figures.draw_error_trade_off(trade_offs),
            "Embeddings by PCA": score_figures.draw_embedding_map(
                rows["embedding"], self.evaluation_set.family[rows["sample_id"]], of="families"
            ),
        }

    def sample_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return the pairs of faces with the worst and the best scores, and whose they are."""
        data, ids = self.data(), rows["sample_id"]
        pairs = self.evaluation_set.pairs.restrict_to(ids)
        scores = self.evaluation_set.score_pairs(rows["embedding"], ids)
        people = np.array(data.vocabulary["person"])[data.columns["person"][ids]]
        figures = {}
        for title, (kind, sign) in _SHOWN_KINDS.items():
            places = np.flatnonzero(scores.kind == kind)
            cells = []
            for place in places[np.argsort(sign * scores.score[places], kind="stable")[:_SHOWN]].tolist():
                both = [int(pairs.one[place]), int(pairs.other[place])]
                faces = [score_figures.decode_image(record) for record in data.read("image", ids[both])]
                cells.append((faces, f"{scores.score[place]:.3f}: {people[both[0]]}, {people[both[1]]}"))
            if cells:
                figures[title] = score_figures.draw_samples(title, cells)
        return figures

    def adapt_weights(self, tensors: Mapping[str, Tensor]) -> AdaptedWeights:
        """Return the weights of a run of this family, or of a ViT: the necks and the losses then start from scratch."""
        if any(name.startswith("network.") for name in tensors):
            return super().adapt_weights(tensors)
        adapted = adapt_weights(self.network, tensors).add_prefix("network.")
        ours = {name.partition(".")[0] for name in self.state_dict()} - {"network"}
        return replace(adapted, new=tuple(f"{name}*" for name in sorted(ours)))

    def repeated_layers(self) -> nn.ModuleList:
        """Return the self-attention blocks."""
        return self.network.blocks


def _compute_metrics(scores: protocol.Scores, *, threshold: float, hard_twin: float) -> dict[str, float]:
    """Return `score`'s metrics; without accuracy if the threshold is infinite."""
    same = scores.select_kinds(protocol.SAME)
    metrics = {f"pairs_{name}": float(len(scores.select_kinds(kind).score)) for kind, name in enumerate(protocol.KINDS)}
    for name, impostor in _select_impostors(scores, hard_twin).items():
        metrics |= protocol.compute_metrics(same, impostor, suffix=name)
        if math.isfinite(threshold):
            metrics[f"accuracy_{name}"] = protocol.accuracy(same, impostor, threshold)
    return metrics


def _compute_intervals(scores: protocol.Scores, *, hard_twin: float, draws: int) -> dict[str, float]:
    same = scores.select_kinds(protocol.SAME)
    intervals: dict[str, float] = {}
    for name, impostor in _select_impostors(scores, hard_twin).items():
        intervals |= protocol.compute_intervals(same, impostor, suffix=name, draws=draws)
    return intervals


def _select_impostors(scores: protocol.Scores, hard_twin: float) -> dict[str, protocol.Scores]:
    """Return the pairs of each kind of impostor that there is; hard twins score above `hard_twin`."""
    twin = scores.select_kinds(protocol.TWIN)
    impostors = {
        "twin": twin,
        "random": scores.select_kinds(protocol.RANDOM),
        "mixed": scores.select_kinds(protocol.TWIN, protocol.RANDOM),
        "hard_twin": twin.select_above(hard_twin),
    }
    return {name: impostor for name, impostor in impostors.items() if len(impostor.score)}


def embed_pixels(batches: Iterable[Batch]) -> np.ndarray:
    """Return each image, as the model gets it, as a vector of mean 0 and length 1: (N, pixels) float32."""
    pixels = []
    for batch in batches:
        pixels.append(normalise_pixels(batch["image"]).cpu().numpy())
    return np.concatenate(pixels)


def normalise_pixels(images_BCHW: Tensor) -> Tensor:
    """Return each image as a vector of mean 0 and length 1: (B, C H W)."""
    pixels_BP = images_BCHW.flatten(1)
    return functional.normalize(pixels_BP - pixels_BP.mean(dim=1, keepdim=True), dim=1)


class Neck(nn.BatchNorm1d):
    """Batch normalisation without affine weights, applied before the cosines (BNNeck, arXiv:1903.07071).

    A batch of one image, which a rank may get to stay in step with the others, uses the running statistics.
    """

    def __init__(self, dims: int) -> None:
        super().__init__(dims, affine=False)

    def forward(self, token_BD: Tensor) -> Tensor:
        if self.training and len(token_BD) == 1:
            return functional.batch_norm(token_BD, self.running_mean, self.running_var, eps=self.eps)
        return super().forward(token_BD)


class Relation:
    """Relations between the images of a batch; all masks are (B, B) bool, symmetric, with an empty diagonal.

    An image repeated in a batch, to fill its family's group, does not form a pair with itself.
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

    Beyond an angle of pi - m the cosine would rise again; there it continues to fall linearly, as in the authors' code.
    """
    is_true_BC = class_B[:, None] == torch.arange(cosine_BC.shape[1], device=class_B.device)
    sine_BC = (1 - cosine_BC.square()).clamp(min=1e-7).sqrt()
    shifted_BC = cosine_BC * math.cos(margin) - sine_BC * math.sin(margin)
    penalised_BC = torch.where(cosine_BC > -math.cos(margin), shifted_BC, cosine_BC - margin * math.sin(margin))
    return scale * torch.where(is_true_BC, penalised_BC, cosine_BC)


def triplet_loss(cosine_BB: Tensor, relation: Relation, *, margin: float) -> Tensor:
    """Return the mean of max(0, m - positive + negative) over images that have both in the batch.

    Batch-hard (arXiv:1703.07737): the positive is the least similar image of the same person, the negative the most
    similar image of the twin, or of anyone else if the batch has no twin.
    """
    negative_BB = torch.where(relation.twin.any(dim=1, keepdim=True), relation.twin, relation.different)
    positive_B = cosine_BB.masked_fill(~relation.same, 2).amin(dim=1)
    negative_B = cosine_BB.masked_fill(~negative_BB, -2).amax(dim=1)
    counts_B = relation.same.any(dim=1) & negative_BB.any(dim=1)
    violation_B = functional.relu(margin - positive_B + negative_B) * counts_B
    return violation_B.sum() / counts_B.sum().clamp(min=1)


def pair_loss(logits_BB: Tensor, relation: Relation, *, strangers: bool) -> Tensor:
    """Return the cross-entropy of "same person" over all pairs; same and different pairs have equal total weight."""
    different = relation.different if strangers else relation.twin
    return (
        _masked_mean(functional.softplus(-logits_BB), relation.same)
        + _masked_mean(functional.softplus(logits_BB), different)
    ) / 2


def _masked_mean(value_BB: Tensor, mask_BB: Tensor) -> Tensor:
    return (value_BB * mask_BB).sum() / mask_BB.sum().clamp(min=1)
