"""Classification heads and their losses: cross-entropy, focal, AM-softmax, OC-softmax.

Legend: B utterances, D embedding dimensions. Labels are 1 for bona fide and 0 for spoofed, and a high score means
bona fide, whatever the loss. (AIR's own code swaps the labels.) Everything is computed in float32.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Decision(nn.Module):
    """The classification head: turns embeddings into scores and the loss."""

    threshold: float | None = None
    """A higher score is bona fide for `predict_bonafide`; None: the score alone does not decide."""

    def forward(self, embedding_BD: Tensor, label_B: Tensor) -> Tensor:
        """Return the loss, averaged over the batch."""
        raise NotImplementedError

    def score(self, embedding_BD: Tensor) -> Tensor:
        """Return (B,) float32, high for bona fide."""
        raise NotImplementedError

    def predict_bonafide(self, embedding_BD: Tensor, *offset_B: Tensor) -> Tensor:
        """Return (B,) bool: the class at the threshold that the loss implies."""
        assert self.threshold is not None
        return self.score(embedding_BD, *offset_B) > self.threshold


class CrossEntropy(Decision):
    """Weighted cross-entropy over two logits; with `gamma` above 0, the focal loss (Lin et al. 2017, arXiv:1708.02002).

    The score is the difference z1 - z0 of the logits: log-odds, which calibration metrics need. With weights it is the
    log-odds at even priors, that is, a log-likelihood ratio.

    With an offset, such as another model's log-odds, it is added to the score, and the embedding's own part pays
    `PENALTY` times its square: an offset that is right alone stays as it is.

    Weights are N / (2 N_c), so that their mean over the training set is 1. torch divides by the sum of the weights in
    the batch instead, which would make the loss depend on how the global batch is split.
    """

    PENALTY = 1.0  # less lost to the offset alone (README.md)
    weight_2: Tensor
    threshold = 0.0

    def __init__(self, dims: int, *, counts: tuple[int, int], gamma: float = 0.0) -> None:
        super().__init__()
        self.gamma = gamma
        self.logits = nn.Linear(dims, 2)
        nn.init.xavier_normal_(self.logits.weight)
        nn.init.zeros_(self.logits.bias)
        self.register_buffer("weight_2", compute_class_weights(counts))

    def forward(self, embedding_BD: Tensor, label_B: Tensor, offset_B: Tensor | None = None) -> Tensor:
        own_B = self.score(embedding_BD)
        log_odds_B = own_B if offset_B is None else own_B + offset_B
        log_p_B = functional.logsigmoid(torch.where(label_B == 1, log_odds_B, -log_odds_B))
        focus_B = (1 - log_p_B.exp()) ** self.gamma if self.gamma else 1.0
        loss = -(self.weight_2[label_B] * focus_B * log_p_B).mean()
        return loss if offset_B is None else loss + self.PENALTY * own_B.square().mean()

    def score(self, embedding_BD: Tensor, offset_B: Tensor | float = 0.0) -> Tensor:
        logits_B2 = self.logits(embedding_BD)
        log_odds_B: Tensor = logits_B2[:, 1] - logits_B2[:, 0] + offset_B
        return log_odds_B


class AmSoftmax(Decision):
    """Softmax over scaled cosines with a margin (Wang et al. 2018, arXiv:1801.05599, equation 5).

    The score is the cosine similarity to the bona fide direction.
    """

    def __init__(self, dims: int, *, scale: float, margin: float) -> None:
        super().__init__()
        self.scale, self.margin = scale, margin
        self.directions_2D = nn.Parameter(torch.empty(2, dims))
        nn.init.xavier_normal_(self.directions_2D)

    def forward(self, embedding_BD: Tensor, label_B: Tensor) -> Tensor:
        cosine_B2 = self._compute_cosines(embedding_BD)
        margin_B2 = self.margin * functional.one_hot(label_B, 2)
        return functional.cross_entropy(self.scale * (cosine_B2 - margin_B2), label_B)

    def score(self, embedding_BD: Tensor) -> Tensor:
        return self._compute_cosines(embedding_BD)[:, 1]

    def predict_bonafide(self, embedding_BD: Tensor, *offset_B: Tensor) -> Tensor:
        return self._compute_cosines(embedding_BD).argmax(dim=1) == 1

    def _compute_cosines(self, embedding_BD: Tensor) -> Tensor:
        return functional.normalize(embedding_BD, dim=1) @ functional.normalize(self.directions_2D, dim=1).T


class OcSoftmax(Decision):
    """One-class softmax (Zhang, Jiang and Duan 2021, arXiv:2010.13995, equation 5).

    Pulls bona fide embeddings to a cosine above `margin_bonafide` with one direction, and pushes spoofed ones below
    `margin_spoof`. The score is that cosine.
    """

    def __init__(self, dims: int, *, scale: float, margin_bonafide: float, margin_spoof: float) -> None:
        super().__init__()
        self.scale, self.margin_bonafide, self.margin_spoof = scale, margin_bonafide, margin_spoof
        self.threshold = (margin_bonafide + margin_spoof) / 2
        self.direction_D = nn.Parameter(torch.randn(dims))

    def forward(self, embedding_BD: Tensor, label_B: Tensor) -> Tensor:
        cosine_B = self.score(embedding_BD)
        violation_B = torch.where(label_B == 1, self.margin_bonafide - cosine_B, cosine_B - self.margin_spoof)
        return functional.softplus(self.scale * violation_B).mean()

    def score(self, embedding_BD: Tensor) -> Tensor:
        return functional.normalize(embedding_BD, dim=1) @ functional.normalize(self.direction_D, dim=0)


def compute_class_weights(counts: tuple[int, int]) -> Tensor:
    """Return N / (2 N_c) for spoofed and bona fide; on ASVspoof 2019 LA their ratio is 0.1 to 0.9."""
    total = sum(counts)
    return torch.tensor([total / (2 * count) for count in counts], dtype=torch.float32)
