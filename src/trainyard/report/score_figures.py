"""Plots of scores, and images of samples, that several families show."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainyard.report.figures import MARKERS, SERIES, draw_figure
from trainyard.scoring import compute_error_rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
_BINS = 60
_NAMED_CLASSES = 12  # more names and counts do not fit
_MOST_POINTS = 3_000  # more are a blot
_COLUMNS, _CELL_WIDTH, _CELL_HEIGHT, _GAP = 2, 2.2, 1.25, 0.06  # of samples, in heights of an image
_LEAST_ERRORS = 1  # rates of fewer errors are not drawn: they depend only on the number of pairs


def draw_score_histogram(scores: Mapping[str, Floats], *, x_label: str) -> bytes:
    """Plot the distribution of the scores of each kind of pair, each with area one; a kind without scores has none."""

    def draw(axes: "Axes") -> None:
        from matplotlib.ticker import MaxNLocator

        pooled = np.concatenate(list(scores.values()))
        low, high = float(pooled.min()), float(pooled.max())
        margin = 0.0 if low < high else 0.5  # of a network that gives all samples one score
        edges = np.linspace(low - margin, high + margin, _BINS + 1)
        for name, values in scores.items():
            density = len(values) > 0
            axes.hist(values, bins=list(edges), density=density, alpha=0.5, label=f"{name} ({len(values):,})")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.set_ylabel("density")
        axes.legend()

    return draw_figure("Scores by kind of pair", draw, x_label=x_label)


def draw_error_trade_off(scores: Mapping[str, tuple[NDArray[np.floating], NDArray[np.floating]]]) -> bytes:
    """Plot false rejections over false acceptances, at all thresholds: of genuine and impostor scores, by label."""

    def draw(axes: "Axes") -> None:
        from matplotlib.ticker import LogLocator

        for name, (genuine, impostor) in scores.items():
            rates = compute_error_rates(genuine, impostor)
            axes.plot(rates.fmr, rates.fnmr, drawstyle="steps-post", label=name)
        least = _LEAST_ERRORS / max(len(values) for kinds in scores.values() for values in kinds)
        axes.plot([least, 1], [least, 1], color="0.6", linestyle=":", label="equal")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(LogLocator())
        axes.set_xlim(least, 1)
        axes.set_ylim(least, 1)
        axes.set_ylabel("false rejections (share)")
        axes.legend(loc="lower left")

    return draw_figure("Error trade-off", draw, x_label="false acceptances (share)")


def draw_confusion_matrix(truth: NDArray[np.integer], predicted: NDArray[np.integer], classes: Sequence[str]) -> bytes:
    """Plot how many samples of each true class, a row each, are predicted as which, as shares of the row."""
    counts = np.zeros((len(classes), len(classes)))
    np.add.at(counts, (truth, predicted), 1)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)

    def draw(axes: "Axes") -> None:
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        axes.grid(False)
        axes.set_ylabel("true")
        ticks = range(len(classes)) if len(classes) <= _NAMED_CLASSES else []
        axes.set_xticks(ticks, [classes[i] for i in ticks], rotation=30, ha="right")
        axes.set_yticks(ticks, [classes[i] for i in ticks])
        for i, j in [(i, j) for i in ticks for j in ticks if counts[i, j]]:
            colour = "white" if shares[i, j] > 0.5 else "black"
            axes.text(j, i, f"{counts[i, j]:,.0f}", ha="center", va="center", color=colour, fontsize=8)

    return draw_figure("Confusion matrix", draw, x_label="predicted")


def draw_embedding_map(
    embeddings: NDArray[np.floating], identities: NDArray[np.integer], *, of: str = "identities"
) -> bytes:
    """Plot embeddings on their first two principal components (PCA), those of a few identities in colour.

    Exact and deterministic: eigenvectors of the covariance, each with the sign that makes its largest entry positive.
    Costs O(N D^2 + D^3). Shows no name: colours are of the identities with most samples, then lowest code. Of many
    embeddings, evenly spaced ones are drawn.

    Args:
        embeddings: (N, D), N above 1.
        identities: (N,) whose each is.
        of: what shares a colour, in the plural.
    """
    centred = embeddings.astype(np.float64) - embeddings.mean(axis=0, dtype=np.float64)
    variances, vectors = np.linalg.eigh(centred.T @ centred / len(centred))
    axes_D2 = vectors[:, :-3:-1]
    axes_D2 = axes_D2 * np.sign(axes_D2[np.abs(axes_D2).argmax(axis=0), [0, 1]])
    shown = np.unique(np.linspace(0, len(centred) - 1, min(len(centred), _MOST_POINTS)).astype(np.int64))
    places_N2, owners = centred[shown] @ axes_D2, identities[shown]
    shares = 100 * variances[:-3:-1] / max(variances.sum(), 1e-30)
    codes, counts = np.unique(owners, return_counts=True)
    coloured = codes[np.lexsort((codes, -counts))][: len(SERIES) - 1]

    def draw(axes: "Axes") -> None:
        from matplotlib.ticker import MaxNLocator

        others = ~np.isin(owners, coloured)
        axes.scatter(places_N2[others, 0], places_N2[others, 1], s=5, color="#c4c9d1")
        for colour, marker, code in zip(SERIES, MARKERS, coloured, strict=False):
            own = owners == code
            axes.scatter(places_N2[own, 0], places_N2[own, 1], s=16, color=colour, marker=marker)
        axes.set_ylabel(f"2nd component ({shares[1]:.0f} %)")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))

    title = f"Embeddings by PCA: {len(coloured)} of {len(codes):,} {of} in colour"
    return draw_figure(title, draw, x_label=f"1st component ({shares[0]:.0f} % of the variance)")


def draw_text_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> bytes:
    """Draw a table of text, as samples that have no image are shown; the last column may be cut by the edge."""

    def draw(axes: "Axes") -> None:
        axes.axis("off")
        for column, place in enumerate(np.linspace(0.0, 0.1 * (len(header) - 1), len(header))):
            for line, row in enumerate([header, *rows]):
                axes.text(
                    1.35 * place,
                    1 - (line + 0.5) / (len(rows) + 1),
                    row[column],
                    transform=axes.transAxes,
                    fontsize=7,
                    fontweight="bold" if line == 0 else "normal",
                    parse_math=False,
                    clip_on=True,
                    in_layout=False,
                )

    return draw_figure(title, draw, x_label="")


def draw_samples(title: str, cells: Sequence[tuple[Sequence[NDArray[np.generic]], str]]) -> bytes:
    """Draw samples in two columns: in each cell one image, or several side by side, and a line of text below.

    Args:
        cells: images, (H, W) or (H, W, C) uint8 with 1 or 3 channels, or (H, W) of any numbers, and the text.
    """

    def draw(axes: "Axes") -> None:
        axes.axis("off")
        rows = -(-len(cells) // _COLUMNS)
        for i, (images, text) in enumerate(cells):
            left, top = (i % _COLUMNS) * _CELL_WIDTH, -(i // _COLUMNS) * _CELL_HEIGHT
            for place, image in enumerate(images):
                width = (_CELL_WIDTH - _GAP) / len(images)
                _draw_image(axes, image, left + place * width, top, width - _GAP)
            axes.text(left, top - 1 - _GAP, text, fontsize=8, va="top", parse_math=False, clip_on=True)
        axes.set_xlim(0, _COLUMNS * _CELL_WIDTH)
        axes.set_ylim(-rows * _CELL_HEIGHT, 0)
        axes.set_aspect("equal")

    return draw_figure(title, draw, x_label="")


def _draw_image(axes: "Axes", image: NDArray[np.generic], left: float, top: float, width: float) -> None:
    """Draw an image as large as it fits into a box of height 1, in the proportions of its pixels."""
    height_px, width_px = image.shape[:2]
    flat = image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image
    scale = min(width / width_px, 1 / height_px)
    is_map = image.dtype != np.uint8  # of any proportions: it fills the box
    right, bottom = (left + width, top - 1) if is_map else (left + scale * width_px, top - scale * height_px)
    shades = {"cmap": "viridis"} if is_map else {"cmap": "gray", "vmin": 0, "vmax": 255}
    axes.imshow(flat, extent=(left, right, bottom, top), aspect="auto", **shades)


def decode_image(record: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the pixels of an image record as packed, (H, W) or (H, W, C): of a file, or resized by packing."""
    if record.ndim == 3:
        return record
    with Image.open(io.BytesIO(record.tobytes())) as image:
        return np.asarray(image.convert("L" if image.mode in ("1", "L", "I;16", "I") else "RGB"))


def draw_scatter(truth: Floats, predicted: Floats) -> bytes:
    """Plot predicted over true values, with the line on which they are equal."""

    def draw(axes: "Axes") -> None:
        axes.scatter(truth, predicted, s=6, alpha=0.5)
        ends = [float(min(truth.min(), predicted.min())), float(max(truth.max(), predicted.max()))]
        axes.plot(ends, ends, color="0.6", linestyle=":", label="equal")
        axes.set_ylabel("predicted")
        axes.legend()

    return draw_figure("Predicted and true", draw, x_label="true")
