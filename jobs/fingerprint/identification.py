"""Identification of prints in a gallery with one print of each finger: closed set (rank-n, CMC) and open set (FNIR).

Each gallery has impression g of every finger, and all other prints are probes; metrics are means over all g. In the
open set fingers are dealt into ten folds, and the prints of a fold are strangers: they search the gallery without the
fingers of their fold.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainyard.report.figures import draw_figure
from trainyard.scoring import Identification

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDS = 10
RANKS = (1, 10)
MOST_RANKS = 20  # of the CMC figure

Compare = Callable[[NDArray[np.int64]], NDArray[np.floating]]
"""The scores (N, F) of all prints with F of them, by their rows."""


def compute_identification_metrics(
    compare: Compare, identity: NDArray[np.int64], impression: NDArray[np.int64]
) -> dict[str, float]:
    """Return `rank1`, `rank10` of more than ten fingers, and FNIR at each FPIR that these prints can establish.

    Args:
        identity: (N,) fingers, numbered from 0.
        impression: (N,) numbers, which order the prints of a finger.
    """
    searches = list(_search_galleries(compare, identity, impression))
    fingers = int(identity.max()) + 1
    cmc = _compute_cmc(searches, fingers)
    metrics = {f"rank{rank}": float(cmc[rank - 1]) for rank in RANKS if rank == 1 or rank < fingers}
    for fpir in searches[0][1].list_supported():
        name = f"fnir_at_fpir_1e{round(np.log10(fpir))}"
        metrics[name] = float(np.mean([result.find_fnir(fpir)[0] for _, result in searches]))
    return metrics


def draw_cmc(compare: Compare, identity: NDArray[np.int64], impression: NDArray[np.int64]) -> bytes:
    """Plot the cumulative match characteristic: the share of probes whose finger is among the first n candidates."""
    cmc = _compute_cmc(list(_search_galleries(compare, identity, impression)), int(identity.max()) + 1)[:MOST_RANKS]

    def draw(axes: "Axes") -> None:
        axes.plot(np.arange(1, len(cmc) + 1), cmc, marker="o", markersize=3)
        axes.set_ylabel("probes found (share)")

    return draw_figure("Identification, closed set (CMC)", draw, x_label="rank")


def _search_galleries(
    compare: Compare, identity: NDArray[np.int64], impression: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], Identification]]:
    """Yield for each gallery the ranks of its probes' own fingers, and the open-set search.

    Of a finger with n prints, gallery g has the one at place g modulo n, so it always has all fingers. Equal scores
    count against the own finger.
    """
    order = np.lexsort((impression, identity))
    count = np.bincount(identity)
    begin, every = np.cumsum(count) - count, np.arange(len(identity))
    fold = np.random.default_rng(0).permutation(len(count)) % FOLDS
    for g in range(count.max()):
        gallery_F = order[begin + g % count]
        score_NF = compare(gallery_F)
        own_N, is_probe = score_NF[every, identity], ~np.isin(every, gallery_F)
        rank = (score_NF >= own_N[:, None]).sum(axis=1)[is_probe]
        top_N = np.where(fold[identity][:, None] == fold, -np.inf, score_NF).max(axis=1)
        rank1 = float(np.mean(rank == 1))
        yield rank, Identification(int(is_probe.sum()), len(top_N), rank1, own_N[is_probe], top_N)


def _compute_cmc(searches: list[tuple[NDArray[np.int64], Identification]], fingers: int) -> NDArray[np.float64]:
    """Return the share of probes found up to each rank, (F,), averaged over galleries."""
    cmc: NDArray[np.float64] = np.mean(
        [np.cumsum(np.bincount(rank - 1, minlength=fingers)) / len(rank) for rank, _ in searches], axis=0
    )
    return cmc
