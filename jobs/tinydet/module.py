"""The tinydet model with its losses and scores."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn

from trainyard.errors import UserError
from trainyard.train.distributed import sum_over_ranks
from trainyard.train.module import AdaptedWeights, Batch, DataInfo, Rows, Signature, TrainModule

from . import geometry, photometric
from .coco import SetSummary
from .conditional import ConditionalDETR
from .config import Config, LossSettings, ModelSettings
from .denoising import build_denoising_queries
from .evaluation import SIZES, Detections, GroundTruth, compute_f1, compute_intervals, evaluate
from .fcos import FCOS
from .figures import draw_detections, plot_precision_by_size
from .losses import compute_losses
from .matching import Objects
from .multiscale import DeformableDETR
from .network import Backbone, DenoisingQueries, Outputs, choose_best
from .pack import TRUTH, parse_key
from .vanilla import DETR
from .weights import adapt_module

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet statistics of RGB in 0..1, with which the pretrained backbones were trained."""

Network = DETR | ConditionalDETR | DeformableDETR | FCOS

FEW_IMAGES = 10_000
"""With fewer training images, a detection transformer trained from scratch is known to find little
(facebookresearch/detr, issues 9, 125 and 419)."""


@dataclass(frozen=True)
class Artifacts:
    """Statistics of the training set, see `pack.fit_artifacts`."""

    categories: list[str]
    images: int
    width_px: float
    height_px: float
    side_px: float
    per_sample: float
    most: int
    sets: list[SetSummary]

    @classmethod
    def from_data(cls, data: DataInfo) -> "Artifacts":
        """Read the artifacts of a data set."""
        names = [str(entry["name"]) for entry in json.loads(data.artifacts["categories"])]
        sets = [SetSummary(**entry) for entry in json.loads(data.artifacts["sets"])]
        return cls(names, sets=sets, **json.loads(data.artifacts["objects"]))


def build(config: Config, data: DataInfo) -> "TinyDet":
    """Build the detector for the categories of the data.

    Raises:
        UserError: the options contradict each other, or the weights do not fit the model.
    """
    model, artifacts = config.model, Artifacts.from_data(data)
    _check_options(config)
    terms = make_terms(config.loss, model.variant, nwd_px=_choose_nwd_px(config, artifacts))
    norm = "frozen" if model.backbone_weights or model.weights else "group"
    backbone = Backbone(
        model.backbone,
        norm=norm if model.norm == "auto" else model.norm,
        width=model.width,
        dilated=model.dilated and model.variant in ("vanilla", "cond"),
        coarsest=model.strides[-1] if model.variant in ("ms", "fcos") else 32,
    )
    network = build_network(model, backbone, categories=len(artifacts.categories))
    if len(data.train_ids):
        for summary in artifacts.sets:
            logger.info("{}", summary)
        _warn_of_limits(model, artifacts, has_detector=bool(model.weights or config.start_from))
    logger.info(
        "{} objects per sample on average; classification loss: {}", f"{artifacts.per_sample:.1f}", terms.classification
    )
    module = TinyDet(network, config, terms=terms, artifacts=artifacts, data=data)
    for name, file in (("weights", model.weights), ("backbone_weights", model.backbone_weights)):
        if file and not module.start_file[1]:
            module.start_file = (f"model.{name}={file}", file)
    return module


def build_network(model: ModelSettings, backbone: Backbone, *, categories: int) -> Network:
    """Build a variant's network with random weights."""
    if model.variant == "fcos":
        return FCOS(backbone, model, categories=categories)
    networks: dict[str, type[DETR | ConditionalDETR | DeformableDETR]] = {
        "vanilla": DETR,
        "cond": ConditionalDETR,
        "ms": DeformableDETR,
    }
    return networks[model.variant](backbone, model, categories=categories, temperature=choose_temperature(model))


def choose_temperature(model: ModelSettings) -> float:
    """Choose the temperature of sine positions: as set, or the published one of the variant.

    That is 10000 in facebookresearch/detr and in Atten4Vis/ConditionalDETR, for the reference points of its decoder,
    too (models/position_encoding.py and models/transformer.py, read 2026-11-22), and 20 in DAB-DETR and its successors.
    """
    return model.temperature or (20.0 if model.variant == "ms" else 10_000.0)


def make_terms(loss: LossSettings, variant: str, *, nwd_px: float) -> LossSettings:
    """Return the loss options with the automatic ones resolved.

    The category weights are those of the papers: 1 for softmax in matching and loss, 2 for focal in both, 2 and 1 for
    varifocal.
    """
    classification = loss.classification
    if classification == "auto":
        classification = "softmax" if variant == "vanilla" else "focal"
    return replace(
        loss,
        classification=classification,
        match_class=loss.match_class or (1.0 if classification == "softmax" else 2.0),
        class_weight=loss.class_weight or (2.0 if classification == "focal" else 1.0),
        nwd_px=nwd_px,
    )


def _choose_nwd_px(config: Config, artifacts: Artifacts) -> float:
    """Return NWD's constant: as set, or the mean size of the training objects when a sample is scaled to the input."""
    if config.loss.nwd_px:
        return config.loss.nwd_px
    fit = min(config.image.width_px / artifacts.width_px, config.image.height_px / artifacts.height_px)
    return max(1.0, artifacts.side_px * fit)


def _check_options(config: Config) -> None:
    model, image = config.model, config.image
    if image.channels != 3:
        raise UserError(
            f"image.channels={image.channels}: tinydet needs RGB. Use image.channels=3; gray files work too."
        )
    if image.fit != "letterbox":
        raise UserError(
            f"image.fit={image.fit}: it changes the shape of objects, and so the overlap of tiny ones. "
            "Use image.fit=letterbox."
        )
    if image.height_px % 32 or image.width_px % 32:
        near = [max(32, round(side / 32) * 32) for side in (image.height_px, image.width_px)]
        raise UserError(
            f"image.height_px={image.height_px} image.width_px={image.width_px}: expected multiples of 32, such as "
            f"image.height_px={near[0]} image.width_px={near[1]}."
        )
    if model.dims % (4 * model.heads):
        raise UserError(f"model.dims={model.dims}: expected a multiple of 4 model.heads={4 * model.heads}.")
    if 0 < model.temperature < 1:
        raise UserError(f"model.temperature={model.temperature:g}: expected 1 or more, or 0 for the published one.")
    doubling = all(b == 2 * a for a, b in zip(model.strides[:-1], model.strides[1:], strict=True))
    if not model.strides or not doubling or not set(model.strides) <= {4, 8, 16, 32}:
        raise UserError(f"model.strides={model.strides}: expected neighbours among 4, 8, 16, 32, such as [8,16,32].")
    if config.loss.classification == "softmax" and model.variant != "vanilla":
        raise UserError(
            "loss.classification=softmax: only model.variant=vanilla has a category 'no object'. Use focal."
        )
    if model.variant == "vanilla" and config.loss.classification not in ("auto", "softmax"):
        raise UserError(f"loss.classification={config.loss.classification}: model.variant=vanilla needs softmax.")
    if model.variant == "fcos" and (config.loss.classification != "auto" or config.loss.normalise != "batch"):
        raise UserError(
            f"loss.classification={config.loss.classification} loss.normalise={config.loss.normalise}: "
            "model.variant=fcos has the losses of its paper. Use loss.classification=auto loss.normalise=batch."
        )
    if model.variant == "fcos" and model.weights:
        raise UserError(
            "model.weights: model.variant=fcos reads no published detector. Use model.backbone_weights=FILE, or "
            "start_from=RUN."
        )
    if (model.backbone_weights or model.weights) and model.norm == "group":
        raise UserError("model.norm=group: pretrained weights have batch norm. Use model.norm=frozen or batch.")


def _warn_of_limits(model: ModelSettings, artifacts: Artifacts, *, has_detector: bool) -> None:
    if model.variant == "fcos":
        return
    if not has_detector and artifacts.images < FEW_IMAGES:
        start = "a pretrained backbone alone" if model.backbone_weights else "random weights"
        logger.warning(
            "{} training images, and the detector starts from {}: with fewer than {} images detection transformers are "
            "known to find little or nothing. Start from a detector trained on COCO, model.weights=FILE, or expect a "
            "long training; model.variant=fcos needs the fewest images.",
            artifacts.images,
            start,
            FEW_IMAGES,
        )
    if artifacts.most > model.queries:
        logger.warning(
            "a sample has up to {} objects, but at most model.queries={} can be found; raise it, or cut smaller tiles",
            artifacts.most,
            model.queries,
        )


class TinyDet(TrainModule):
    """Finds objects in images.

    Axes: B samples, L objects, Q queries, K categories, n detections. Boxes in a batch and in rows are in pixels of the
    stored sample; between input and losses they are relative to the input.

    Args:
        terms: the loss options with the automatic ones resolved, see `make_terms`.
        data: for `score` and `report_figures`: the objects, and the positions of tiles in images.
    """

    identity_column = "image_name"
    monitor = ("ap", "max")
    baseline = ("finding nothing", 0.0)
    mean: Tensor
    std: Tensor
    loader_mean: Tensor
    loader_std: Tensor

    def __init__(
        self, network: Network, config: Config, *, terms: LossSettings, artifacts: Artifacts, data: DataInfo
    ) -> None:
        super().__init__()
        self.network, self.config, self.evaluation, self.terms = network, config, config.evaluation, terms
        self.samples_maps = config.model.variant == "ms"
        self.categories, self.objects_per_sample = artifacts.categories, artifacts.per_sample
        self.data: Callable[[], DataInfo] = lambda: data  # a function: copying the module must not copy open files
        image = config.image
        for name, values in (("mean", MEAN), ("std", STD), ("loader_mean", image.mean), ("loader_std", image.std)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).view(-1, 1, 1), persistent=False)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss with its parts (`losses.compute_losses`), and the number of objects per sample."""
        x_BCHW, objects, denoising_queries = self._prepare(batch)
        if isinstance(self.network, FCOS):
            dense: dict[str, Tensor] = self._average_losses(*self.network.compute_losses(x_BCHW, objects), objects)
            return dense
        outputs = self.network(x_BCHW, batch["affine"], batch["image_px"], denoising_queries)
        losses: dict[str, Tensor] = self._compute_losses(outputs, denoising_queries, objects)
        return losses

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _prepare(self, batch: Batch) -> tuple[Tensor, Objects, DenoisingQueries | None]:
        """Return augmented and normalised images, the objects left in them, and the denoising queries."""
        with torch.autocast(batch["image"].device.type, enabled=False):
            x_BCHW = batch["image"] * self.loader_std + self.loader_mean
            size_px = (x_BCHW.shape[2], x_BCHW.shape[3])
            boxes, labels, valid = self._map_boxes(batch, size_px)
            if "noise" in batch:
                noise, settings = batch["noise"], self.config.photometric
                if settings.paste_p and len(x_BCHW) > 1:
                    x_BCHW, boxes, labels, valid = photometric.paste(x_BCHW, boxes, labels, valid, noise, settings)
                x_BCHW = photometric.augment(x_BCHW, noise, settings)
            scale = boxes.new_tensor([size_px[1], size_px[0]] * 2)
            centred = geometry.xyxy_to_cxcywh(boxes) / scale
            centred = torch.cat([centred[..., :2], centred[..., 2:].clamp(min=geometry.SIDE_MIN)], dim=-1)
            objects = Objects(centred, labels, valid, size_px)
            return self._normalise(x_BCHW), objects, self._build_denoising_queries(objects)

    def _map_boxes(self, batch: Batch, size_px: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return boxes in pixels of the input, labels, and which are valid; never empty, even without objects."""
        boxes, labels = batch["boxes"], batch["labels"]
        if not labels.shape[1]:
            boxes, labels = boxes.new_zeros(len(boxes), 1, 4), labels.new_zeros(len(labels), 1)
        present = torch.arange(labels.shape[1], device=labels.device) < batch["boxes_count"][:, None]
        moved = geometry.map_to_input(boxes, batch["affine"])
        rule = self.config.boxes
        clipped, valid = geometry.clip_boxes(moved, size_px, visible=rule.visible_min, side_min_px=rule.side_min_px)
        return clipped, labels, valid & present

    def _build_denoising_queries(self, objects: Objects) -> DenoisingQueries | None:
        model = self.config.model
        if model.variant != "ms" or not model.denoising or not self.training:
            return None
        return build_denoising_queries(
            objects.boxes_BL4,
            objects.labels_BL,
            objects.valid_BL,
            count=model.denoising,
            categories=len(self.categories),
            label_noise=model.label_noise,
            box_noise=model.box_noise,
        )

    def _normalise(self, x_BCHW: Tensor) -> Tensor:
        return (x_BCHW - self.mean) / self.std

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compute_losses(
        self, outputs: Outputs, denoising_queries: DenoisingQueries | None, objects: Objects
    ) -> dict[str, Tensor]:
        with torch.autocast(objects.boxes_BL4.device.type, enabled=False):  # areas need more than 8 bits
            count = objects.valid_BL.sum().float()
            losses = compute_losses(
                outputs, denoising_queries, objects, terms=self.terms, divisor=self._compute_divisor(objects)
            )
            return {**losses, "objects": count / len(objects.valid_BL)}

    def _compute_divisor(self, objects: Objects) -> Tensor:
        """Return () float32: objects in a micro-batch, averaged over ranks or expected from the training set."""
        if self.terms.normalise == "data":
            expected = max(1.0, self.objects_per_sample * len(objects.valid_BL))
            return objects.boxes_BL4.new_tensor(expected)
        return average_count(objects.valid_BL.sum().float())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _average_losses(self, sums: dict[str, Tensor], cells: Tensor, objects: Objects) -> dict[str, Tensor]:
        """Return FCOS's losses divided by the cells that have an object, and their sum (equation 2)."""
        divisor = average_count(cells)
        losses = {name: value / divisor for name, value in sums.items()}
        count = objects.valid_BL.sum().float() / len(objects.valid_BL)
        return {"loss": torch.stack(list(losses.values())).sum(), **losses, "objects": count}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the best n detections of each sample: `box` (B, n, 4) px of the sample, `score`, `label` (B, n).

        If there are fewer, the rest has score 0.
        """
        image = batch["image"] * self.loader_std + self.loader_mean
        if isinstance(self.network, FCOS):
            best = self.network.detect(self._normalise(image), most=self.evaluation.detections)
            return self._make_rows(best, batch)
        outputs = self.network(self._normalise(image), batch["affine"], batch["image_px"])
        with torch.autocast(image.device.type, enabled=False):
            best = choose_best(
                outputs.predictions.logits_DBQK[-1].float(),
                outputs.predictions.boxes_DBQ4[-1],
                size_px=(image.shape[2], image.shape[3]),
                most=self.evaluation.detections,
                is_softmax=self.terms.classification == "softmax",
            )
            return self._make_rows(best, batch)

    def _make_rows(self, best: tuple[Tensor, Tensor, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Return the rows of detections, given as `choose_best` returns them."""
        corners, score, label = best
        mapped = geometry.map_from_input(corners, batch["affine"], batch["image_px"])
        missing = self.evaluation.detections - score.shape[1]
        return {
            "sample_id": batch["sample_id"],
            "box": nn.functional.pad(mapped, (0, 0, 0, missing)),
            "score": nn.functional.pad(score, (0, missing)),
            "label": nn.functional.pad(label, (0, missing)),
        }

    def describe_predict(self) -> Signature:
        """Describe the network's inputs and outputs."""
        return Signature(
            {
                "image": "fitted into height and width: scaled by s, in the upper left corner, the rest is fill",
                "affine": "[[s, 0, 0], [0, s, 0]]: maps (x, y, 1) in pixels of the file to pixels of the input",
                "image_px": "height and width of the file",
            },
            {
                "box": "x1, y1, x2, y2 in pixels of the file, best first",
                "score": "0..1; 0 where there are fewer detections",
                "label": "index in settings.categories",
            },
            {"categories": self.categories, "draw_above": self.evaluation.draw_above},
        )

    def score(self, rows: Rows) -> dict[str, float]:
        """Return COCO's metrics on whole images, with tiles merged; see `evaluation.evaluate`."""
        truths, detections = self._merge_images(rows)
        return evaluate(truths, detections, categories=self.categories, areas=self.evaluation.areas)

    def compute_intervals(self, rows: Rows) -> dict[str, float]:
        """Return the 95 % intervals of the average precisions over resampled images."""
        truths, detections = self._merge_images(rows)
        intervals = compute_intervals(
            truths,
            detections,
            categories=len(self.categories),
            areas=self.evaluation.areas,
            draws=self.evaluation.bootstrap_draws,
        )
        return intervals.to_metrics()

    def _merge_images(self, rows: Rows) -> tuple[list[GroundTruth], list[Detections]]:
        data = self.data()
        columns, ids = data.columns, rows["sample_id"]
        x, y = (columns[name][ids] for name in ("tile_x", "tile_y"))
        tile_groups = _group_by_code(columns["image_name"][ids])
        first = np.array([tiles[np.argmin(x[tiles] + y[tiles])] for tiles in tile_groups])
        truths = [_to_ground_truth(table) for table in data.read("truth", ids[first])]
        return truths, [Detections(*self._merge_tiles(rows, tiles, x, y)[:3]) for tiles in tile_groups]

    def _merge_tiles(
        self, rows: Rows, tiles: np.ndarray, x: np.ndarray, y: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Merge the detections of an image's tiles; return boxes in its pixels, scores, labels, and the row of each."""
        is_real = rows["score"][tiles] > 0
        offset = np.stack([x[tiles], y[tiles]] * 2, axis=1)[:, None, :]
        boxes = (rows["box"][tiles] + offset)[is_real]
        scores, labels = rows["score"][tiles][is_real], rows["label"][tiles][is_real]
        row = np.broadcast_to(tiles[:, None], is_real.shape)[is_real]
        if len(tiles) > 1:
            rule = self.evaluation
            kept = geometry.merge_detections(
                boxes, scores, labels, by=rule.merge, above=rule.merge_above, nwd_px=self.terms.nwd_px
            )
            boxes, scores, labels, row = boxes[kept], scores[kept], labels[kept], row[kept]
        return boxes, scores, labels, row

    def report_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return a plot of precision by size."""
        sizes = SIZES[self.evaluation.areas]
        return {"Average precision by size": plot_precision_by_size(self.score(rows), sizes)}

    def sample_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return the samples with the worst and the best F1 scores of those that show anything, with boxes drawn."""
        data, rule, ids = self.data(), self.evaluation, rows["sample_id"]
        confident = [scores > rule.draw_above for scores in rows["score"]]
        objects, labels = (data.read(name, ids) for name in ("boxes", "labels"))
        f1 = np.array(
            [
                compute_f1(objects[row], labels[row], rows["box"][row][kept], rows["label"][row][kept])
                for row, kept in enumerate(confident)
            ]
        )
        shown = [row for row, kept in enumerate(confident) if len(objects[row]) or kept.any()]
        order = sorted(shown, key=lambda row: float(f1[row]))
        count = min(rule.draw_samples, len(order))
        chosen = [("worst", row) for row in order[: (count + 1) // 2]]
        chosen += [("best", row) for row in order[::-1][: count // 2]]
        figures: dict[str, bytes] = {}
        for kind, row in chosen:
            name = data.vocabulary["image_name"][data.columns["image_name"][ids[row]]]
            x, y = (data.columns[axis][ids[row]] for axis in ("tile_x", "tile_y"))
            title = f"{name} at {x},{y}: {kind}, F1 {f1[row]:.2f}; objects green, found above {rule.draw_above:g} red"
            figures[title] = draw_detections(
                data.read("image", ids[row : row + 1])[0],
                truth=objects[row],
                boxes=rows["box"][row][confident[row]],
                scores=rows["score"][row][confident[row]],
                names=[self.categories[label] for label in rows["label"][row][confident[row]].tolist()],
            )
        return figures

    def prediction_rows(self, rows: Rows, keys: Sequence[str]) -> Iterator[dict[str, object]]:
        """Yield a line for each sample: its position in its image, and its detections as JSON.

        A detection is [category, score, x1, y1, x2, y2] in pixels of the whole image file. One that two tiles share is
        in the line of only one of them. Tiles have their places in the image as packed (`packing.scale`).
        """
        places = [parse_key(key) for key in keys]
        names, x, y = (np.array(column) for column in zip(*places, strict=True))
        lines: list[list[list[object]]] = [[] for _ in keys]
        for tiles in _group_by_code(np.unique(names, return_inverse=True)[1]):
            boxes, scores, labels, row = self._merge_tiles(rows, tiles, x, y)
            for box, score, label, owner in zip(boxes.tolist(), scores.tolist(), labels.tolist(), row, strict=True):
                corners = [round(value / self.config.packing.scale, 2) for value in box]
                lines[owner].append([self.categories[label], round(score, 4), *corners])
        for (name, left, top), detections in zip(places, lines, strict=True):
            yield {"image_name": name, "tile_x": left, "tile_y": top, "detections": json.dumps(detections)}

    def adapt_weights(self, tensors: Mapping[str, Tensor]) -> AdaptedWeights:
        """Return the weights of a detector, or of its backbone alone, by our names: see `weights`."""
        return adapt_module(self, self.network, self.network.backbone.body, tensors)

    def repeated_layers(self) -> list[nn.Module]:
        """Return the encoder's and the decoder's layers."""
        return self.network.repeated_layers()

    def parameter_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Return groups; a pretrained backbone's learning rate is scaled by `model.backbone_lr` (DETR: a tenth)."""
        model, all_groups = self.config.model, super().parameter_groups(weight_decay)
        starts_from_weights = model.weights or model.backbone_weights or self.config.start_from
        backbone = {id(p) for p in self.network.backbone.parameters()}
        groups: list[dict[str, object]] = []
        for inside, scale in ((True, model.backbone_lr if starts_from_weights else 1.0), (False, 1.0)):
            for group in all_groups:
                chosen = [p for p in cast(list[Tensor], group["params"]) if (id(p) in backbone) == inside]
                groups.append({**group, "params": chosen, "lr_scale": scale})
        return [group for group in groups if group["params"]]


def average_count(count: Tensor) -> Tensor:
    """Return the mean over ranks of () float32, at least 1."""
    total, ranks = sum_over_ranks(torch.stack([count, torch.ones_like(count)])).unbind()
    return (total / ranks).clamp(min=1)


def _group_by_code(code: np.ndarray) -> list[np.ndarray]:
    """Return the indices at which each code occurs, in order of the codes."""
    order = np.argsort(code, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(code[order])) + 1)


def _to_ground_truth(table: np.ndarray) -> GroundTruth:
    column = {name: table[:, number] for number, name in enumerate(TRUTH)}
    boxes = np.stack([column[name] for name in ("x1", "y1", "x2", "y2")], axis=1)
    return GroundTruth(boxes, column["area"], column["label"].astype(np.int64), column["crowd"] > 0)
