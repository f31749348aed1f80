"""Trains descriptors of ridges (`matching.descriptors`) on impressions of fingers with places (`places`)."""

from collections.abc import Callable, Mapping
from math import radians
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trainyard import scoring
from trainyard.report import score_figures
from trainyard.runs.evaluations import RUN
from trainyard.train.module import AdaptedWeights, Batch, DataInfo, Rows, SampleSource, Score, TrainModule

from . import matching
from .baseline import SIDE_PX, correlate_pairs
from .config import SHIPPED, Config
from .matching import Evidence
from .matching.descriptors import (
    WEIGHTS,
    DescriptorNetwork,
    compare_descriptors,
    count_cells,
    interpolate_descriptors,
    round_to_int8,
    take_signs,
)
from .methods import MATCHER, UNTRAINED
from .pairs import (
    choose_pairs,
    compute_pair_intervals,
    compute_pair_metrics,
    label_pairs,
    number_fingers,
    split_kinds,
)
from .places import CELL_PX, CELLS, LEVELS

CROP_PX = 96
INNER_PX = 16  # of a crop, around the places that are compared: nearer to its border a descriptor sees little
PLACES = 24  # of each pair of crops
APART_PX = 20  # two places of a print that are nearer are not told apart
NEAR_PX = 1.5  # a place of one crop is in the other if a pixel is so near to it
TEMPERATURE = 0.07
TURN_DEG, FINGER_TURN_DEG = 5.5, 15.0  # standard deviations: of a crop, and of both crops of a finger
STRETCH, SHEAR, BEND_PX, MISS_PX = 0.04, 0.04, 1.5, 3.0
CONTRAST, NOISE = 0.2, 0.15


class Crops(NamedTuple):
    """Parts of N prints, turned and bent a little."""

    ridges_N1HW: Tensor
    place_NHW2: Tensor  # of each pixel in the frame of its finger, y and x in px
    known_NHW: Tensor  # share of the pixel's surroundings with a known place


class DenseModule(TrainModule):
    """Describes cells of prints; trains by finding a place of one impression in another one, among all of the batch.

    Samples 2 i and 2 i + 1 of a micro-batch are impressions of one finger (data.order=pxk). Of each pair the
    surroundings of a place are cut out of both, and the descriptors of some places there are compared with those of the
    whole micro-batch: InfoNCE (van den Oord, Li and Vinyals, arXiv:1807.03748, equation 4), in both directions.

    Scores are of pairs of prints, matched by their descriptors alone.
    """

    monitor = ("eer_all_pairs", "min")
    tie_breaks = (("d_prime", "max"),)
    identity_column = "finger"
    baseline = ("phase correlation of the same ridges", "eer_all_pairs_blpoc")
    reads_noise = False
    samples_maps = True

    def __init__(self, config: Config, data: DataInfo) -> None:
        super().__init__()
        self.network = DescriptorNetwork(config.model.embedding_dims, config.model.width)
        self.evaluation = config.evaluation
        if config.model.weights == SHIPPED:
            self.start_file = (f"model.weights={config.model.weights}", str(WEIGHTS))
        self._compared: tuple[Rows, tuple[scoring.Pairs, np.ndarray]] | None = None  # of the rows scored last
        self._correlated: tuple[bytes, float] | None = None  # ids of the samples scored last, and what BLPOC gets

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss, and the share of places whose nearest descriptor in the micro-batch is the right one."""
        pairs = len(batch["finger"]) // 2
        ridges_NHW = batch["ridges"][: 2 * pairs].float() / LEVELS
        place_NIJ3 = batch["place"][: 2 * pairs]
        one, other = cut_pairs(ridges_NHW, place_NIJ3)
        map_NDhw = self.network(torch.cat([one.ridges_N1HW, other.ridges_N1HW]))
        chosen_NP2, usable_NP = choose_places(one)
        frame_NP2 = look_up(one.place_NHW2, chosen_NP2)
        found_NP2, is_found_NP = find_places(other, frame_NP2)
        one_NPD = interpolate_descriptors(map_NDhw[:pairs], chosen_NP2.float())
        other_NPD = interpolate_descriptors(map_NDhw[pairs:], found_NP2.float())
        is_same_finger_N = batch["finger"][0 : 2 * pairs : 2] == batch["finger"][1 : 2 * pairs : 2]
        valid_NP = usable_NP & is_found_NP & is_same_finger_N[:, None]
        with torch.autocast(one_NPD.device.type, enabled=False):
            loss, accuracy = contrast_places(one_NPD.float(), other_NPD.float(), frame_NP2, valid_NP)
        return {"loss": loss, "accuracy": accuracy, "places": valid_NP.float().sum() / pairs}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the ridges (B, 256, 256) int8, which `score` describes and compares, and whose they are."""
        return {name: batch[name] for name in ("ridges", "sample_id", "finger", "impression")}

    def adapt_weights(self, tensors: Mapping[str, Tensor]) -> AdaptedWeights:
        """Return the weights of a run, or of a file of the network alone, as the one that ships."""
        adapted = AdaptedWeights(tensors)
        return adapted if "network.project.weight" in tensors else adapted.add_prefix("network.")

    def score(self, rows: Rows) -> dict[str, float]:
        """Return verification metrics in 0..1, as `FingerprintModule.score`, of `evaluation.matched_pairs`.

        And `eer_all_pairs_blpoc`, which `baseline.correlate_pairs` gets on the same ridges and pairs.
        """
        return compute_pair_metrics(*self._compare(rows)) | {"eer_all_pairs_blpoc": self._correlate(rows)}

    def compute_intervals(self, rows: Rows) -> dict[str, float]:
        """Return the ends of the intervals of `score`'s metrics over resampled fingers."""
        return compute_pair_intervals(*self._compare(rows), draws=self.evaluation.bootstrap_draws)

    def report_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return the score histogram of genuine and impostor pairs, and their error trade-off."""
        pairs, _ = self._compare(rows)
        kinds = {"genuine": pairs.genuine, "impostor": pairs.impostor}
        return {
            "Scores by kind of pair": score_figures.draw_score_histogram(kinds, x_label="score"),
            "Error trade-off": score_figures.draw_error_trade_off({"all pairs": (pairs.genuine, pairs.impostor)}),
        }

    def score_baselines(
        self, rows: Rows, evaluated: SampleSource, open_training: Callable[[], SampleSource]
    ) -> dict[str, Score]:
        """Score the matcher on the same pairs: without these descriptors, with them, and with smaller templates.

        A template stores one print of a pair: the descriptors of its cells, without turning it. Its
        `template_bytes` leave out which cells they are, 128 bytes.
        """
        one, other = self._choose_pairs(rows)
        prints = matching.index_prints(*self._to_device(rows["ridges"]))
        bytes_of_floats = count_cells(prints) * 4 * self.network.project.out_channels

        def score(scores: np.ndarray, **further: float) -> Score:
            pairs, is_fvc = label_pairs(scores, rows["finger"], rows["impression"], one, other)
            intervals = compute_pair_intervals(pairs, is_fvc, draws=self.evaluation.bootstrap_draws)
            return Score(compute_pair_metrics(pairs, is_fvc) | further | intervals, split_kinds(pairs, is_fvc))

        def compare(store: Callable[[Tensor], Tensor] | None = None) -> Evidence:
            return compare_descriptors(self.network, prints, one, other, least_votes=0, store=store)

        untrained, evidence = matching.match_ridges(prints, one, other), compare()
        scores_by_name = {
            UNTRAINED: score(untrained),
            MATCHER: score(matching.add_descriptors(untrained, evidence)),
            RUN: Score({"template_bytes": bytes_of_floats}, {}),
        }
        for name, store, share in (("int8", round_to_int8, 4), ("bits", take_signs, 32)):
            scores = matching.score_descriptors(compare(store))
            scores_by_name[f"run, as {name}"] = score(scores, template_bytes=bytes_of_floats / share)
        return scores_by_name

    def _correlate(self, rows: Rows) -> float:
        samples = rows["sample_id"].tobytes()
        if self._correlated is None or self._correlated[0] != samples:
            one, other = self._choose_pairs(rows)
            scores = correlate_pairs(self._to_device(rows["ridges"])[0], one, other)
            labelled = label_pairs(scores, rows["finger"], rows["impression"], one, other)
            self._correlated = samples, compute_pair_metrics(*labelled)["eer_all_pairs"]
        return self._correlated[1]

    def select_pair_scores(self, rows: Rows) -> dict[str, np.ndarray]:
        """Return the scores of genuine pairs, of all cross-finger pairs, and of those of the FVC protocol."""
        return split_kinds(*self._compare(rows))

    def match_samples(self, data: DataInfo, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return the scores of pairs of prints by their descriptors: about 0 of two fingers."""
        ids, places = np.unique(np.stack([one, other]), return_inverse=True)
        prints = matching.index_prints(*self._to_device(np.stack(data.read("ridges", ids))))
        return matching.score_descriptors(
            compare_descriptors(self.network, prints, *places.reshape(2, -1), least_votes=0)
        )

    def _choose_pairs(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        return choose_pairs(*number_fingers(rows["finger"], rows["impression"]), most=self.evaluation.matched_pairs)

    def _to_device(self, ridges: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the ridges of prints and their masks, (N, 256, 256) float32 each."""
        ridges_NSS = torch.from_numpy(ridges).to(self.network.project.weight.device)
        return ridges_NSS.float() / LEVELS, (ridges_NSS != 0).float()

    def _compare(self, rows: Rows) -> tuple[scoring.Pairs, np.ndarray]:
        if self._compared is None or self._compared[0] is not rows:
            one, other = self._choose_pairs(rows)
            prints = matching.index_prints(*self._to_device(rows["ridges"]))
            evidence = compare_descriptors(self.network, prints, one, other, least_votes=0)
            scores = matching.score_descriptors(evidence)
            self._compared = rows, label_pairs(scores, rows["finger"], rows["impression"], one, other)
        return self._compared[1]


def cut_pairs(ridges_NHW: Tensor, place_NIJ3: Tensor) -> tuple[Crops, Crops]:
    """Return parts of the first and of the second impression of each finger that show about the same place.

    The place is drawn among the known cells of the first impression. The second one is cut around its known cell that
    is nearest to that place in the frame, missed by a few pixels. Both are rotated into the frame and then by the same
    random angle, because fingers point in any direction. Then each is rotated, stretched, sheared and bent a little, by
    different random amounts.

    Args:
        ridges_NHW: (2 N, 256, 256) float32, rows 2 i and 2 i + 1 of finger i.
        place_NIJ3: (2 N, 32, 32, 3), as `PlacedPrint.place`.
    """
    known_NG, frame_NG2 = place_NIJ3[..., 2].flatten(1), place_NIJ3[..., :2].flatten(1, 2)
    one_N = (torch.rand_like(known_NG[0::2]) * known_NG[0::2]).argmax(dim=1)
    at = torch.arange(len(one_N), device=one_N.device)
    apart_NG = (frame_NG2[1::2] - frame_NG2[0::2][at, one_N][:, None]).norm(dim=2)
    other_N = apart_NG.masked_fill(known_NG[1::2] == 0, torch.inf).argmin(dim=1)
    centres = [
        torch.stack([cell_N // CELLS, cell_N % CELLS], dim=1) * CELL_PX + CELL_PX / 2 - 0.5
        for cell_N in (one_N, other_N)
    ]
    centres[1] = centres[1] + MISS_PX * torch.randn_like(centres[1])
    turn_N = radians(FINGER_TURN_DEG) * torch.randn(len(one_N), device=one_N.device)
    one, other = (
        cut(ridges_NHW[i::2], place_NIJ3[i::2], centre_N2, turn_N - measure_turn(place_NIJ3[i::2]))
        for i, centre_N2 in enumerate(centres)
    )
    return one, other


def measure_turn(place_NIJ3: Tensor) -> Tensor:
    """Return by which angles (N,) prints have to be turned to lie as in the frame: nearest in the mean square."""
    known_NG1 = place_NIJ3[..., 2:].flatten(1, 2)
    across = torch.arange(CELLS, device=place_NIJ3.device, dtype=torch.float32)
    here_G2 = torch.cartesian_prod(across, across)
    count_N11 = known_NG1.sum(dim=1, keepdim=True).clamp(min=1)
    here_NG2, there_NG2 = (
        known_NG1 * (part - (known_NG1 * part).sum(dim=1, keepdim=True) / count_N11)
        for part in (here_G2, place_NIJ3[..., :2].flatten(1, 2))
    )
    (y_NG, x_NG), (there_y_NG, there_x_NG) = here_NG2.unbind(dim=2), there_NG2.unbind(dim=2)
    return torch.atan2((y_NG * there_x_NG - x_NG * there_y_NG).sum(dim=1), (here_NG2 * there_NG2).sum(dim=(1, 2)))


def cut(ridges_NHW: Tensor, place_NIJ3: Tensor, centre_N2: Tensor, turn_N: Tensor) -> Crops:
    """Cut a square around a place (y, x) out of each print, turned, distorted and with noise at random."""
    count, device = len(ridges_NHW), ridges_NHW.device
    turn_N = turn_N + radians(TURN_DEG) * torch.randn(count, device=device)
    cos_N, sin_N = turn_N.cos(), turn_N.sin()
    turn_N22 = torch.stack([torch.stack([cos_N, -sin_N], dim=1), torch.stack([sin_N, cos_N], dim=1)], dim=1)
    stretch_N2 = torch.exp(STRETCH * torch.randn(count, 2, device=device))
    shear_N22 = torch.diag_embed(stretch_N2)
    shear_N22[:, 0, 1] = SHEAR * torch.randn(count, device=device)
    across = torch.arange(CROP_PX, device=device) - (CROP_PX - 1) / 2
    offset_HW2 = torch.stack(torch.meshgrid(across, across, indexing="ij"), dim=-1)
    bend_N2HW = functional.interpolate(
        BEND_PX * torch.randn(count, 2, 5, 5, device=device),
        size=(CROP_PX, CROP_PX),
        mode="bicubic",
        align_corners=True,
    )
    at_NHW2 = offset_HW2 @ (turn_N22 @ shear_N22).transpose(1, 2)[:, None] + centre_N2[:, None, None]
    at_NHW2 = at_NHW2 + bend_N2HW.permute(0, 2, 3, 1)
    grid_NHW2 = (2 * at_NHW2 + 1).flip(-1) / SIDE_PX - 1
    ridges_N1HW = functional.grid_sample(ridges_NHW[:, None], grid_NHW2, align_corners=False)
    place_N3HW = functional.grid_sample(
        place_NIJ3.permute(0, 3, 1, 2), grid_NHW2, padding_mode="border", align_corners=False
    )
    is_print_N1HW = ridges_N1HW != 0
    contrast_N = torch.exp(CONTRAST * torch.randn(count, device=device))
    noise_N = NOISE * torch.rand(count, device=device)
    ridges_N1HW = ridges_N1HW * contrast_N[:, None, None, None]
    ridges_N1HW = ridges_N1HW + noise_N[:, None, None, None] * torch.randn_like(ridges_N1HW)
    return Crops(ridges_N1HW * is_print_N1HW, place_N3HW[:, :2].permute(0, 2, 3, 1), place_N3HW[:, 2])


def choose_places(crops: Crops) -> tuple[Tensor, Tensor]:
    """Draw places of each crop, (N, P, 2) px y and x, on the grid of cells; (N, P) bool: which are known."""
    known_NIJ = crops.known_NHW[:, INNER_PX:-INNER_PX:CELL_PX, INNER_PX:-INNER_PX:CELL_PX]
    known_NG, across = (known_NIJ > 0.8).flatten(1).float(), known_NIJ.shape[2]
    value_NP, chosen_NP = (known_NG + 0.5 * torch.rand_like(known_NG)).topk(PLACES, dim=1)
    return torch.stack([chosen_NP // across, chosen_NP % across], dim=2) * CELL_PX + INNER_PX, value_NP >= 1


def look_up(place_NHW2: Tensor, at_NP2: Tensor) -> Tensor:
    """Return the places (N, P, 2) in the frame of pixels (y, x)."""
    flat_NP = at_NP2[..., 0] * place_NHW2.shape[2] + at_NP2[..., 1]
    return place_NHW2.flatten(1, 2).gather(1, flat_NP[..., None].expand(-1, -1, 2))


def find_places(crops: Crops, frame_NP2: Tensor) -> tuple[Tensor, Tensor]:
    """Return which pixels (N, P, 2) y and x show places of the frame, and (N, P) bool: which are there and known."""
    place_NHW2, known_NHW = (part[:, INNER_PX:-INNER_PX:2, INNER_PX:-INNER_PX:2] for part in crops[1:])
    across = place_NHW2.shape[2]
    apart_NP, found_NP = torch.cdist(frame_NP2, place_NHW2.flatten(1, 2)).min(dim=2)
    is_found_NP = (apart_NP < NEAR_PX) & (known_NHW.flatten(1).gather(1, found_NP) > 0.8)
    return torch.stack([found_NP // across, found_NP % across], dim=2) * 2 + INNER_PX, is_found_NP


def contrast_places(one_NPD: Tensor, other_NPD: Tensor, frame_NP2: Tensor, valid_NP: Tensor) -> tuple[Tensor, Tensor]:
    """Return InfoNCE over all valid places of the batch, in both directions, and the share that is nearest.

    Places of one finger nearer than 20 px are not each other's negatives: their surroundings are almost the same.
    """
    places = valid_NP.numel()
    valid_Q, finger_Q = (
        valid_NP.flatten(),
        torch.arange(len(valid_NP), device=valid_NP.device).repeat_interleave(PLACES),
    )
    logit_QQ = one_NPD.flatten(0, 1) @ other_NPD.flatten(0, 1).T / TEMPERATURE
    apart_QQ = torch.cdist(frame_NP2.flatten(0, 1), frame_NP2.flatten(0, 1))
    is_near_QQ = (finger_Q[:, None] == finger_Q) & (apart_QQ < APART_PX)
    is_own_QQ = torch.eye(places, dtype=torch.bool, device=valid_NP.device)
    logit_QQ = logit_QQ.masked_fill((is_near_QQ | ~valid_Q) & ~is_own_QQ, -1e4)
    own_Q = torch.arange(places, device=valid_NP.device)
    there_Q, back_Q = (
        functional.cross_entropy(x, own_Q, reduction="none")
        for x in (logit_QQ, logit_QQ.T.masked_fill(~valid_Q & ~is_own_QQ, -1e4))
    )
    weight_Q = valid_Q.float() / valid_Q.float().sum().clamp(min=1)
    accuracy = ((logit_QQ.detach().argmax(dim=1) == own_Q).float() * weight_Q).sum()
    return ((there_Q + back_Q) / 2 * weight_Q).sum(), accuracy
