"""Figures as PNG, in one style, without pyplot and without a display."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainyard.text import make_printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

BLUE = "#0072B2"
SERIES = (BLUE, "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that people with any colour vision can tell apart (Okabe and Ito 2008, https://jfly.uni-koeln.de/color/)."""
MARKERS = "os^Dv*P"
_STYLE: Any = {  # matplotlib 3.11 types it by its 300 keys, 3.9 as a plain dict
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelcolor": "#374151",
    "axes.edgecolor": "#9ca3af",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": "#e5e7eb",
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "agg.path.chunksize": 10_000,  # curves have a point for every step
}


@dataclass(frozen=True)
class Plot:
    name: str  # file name without its extension
    title: str
    png: bytes


def draw_figure(title: str, draw: Callable[["Axes"], None], *, x_label: str = "optimizer step") -> bytes:
    """Draw one pair of axes as PNG. Without pyplot, no global figure remains and no display is needed."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 3.1), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
        draw(axes)
        axes.set_xlabel(x_label)
        _show_names_as_they_are(axes, axes.set_title(title))
        out = io.BytesIO()
        figure.savefig(out, format="png")
    return out.getvalue()


def _show_names_as_they_are(axes: "Axes", title: "Text") -> None:
    """Read no name of a metric, set or class as TeX, which may be broken, or as control characters."""
    from matplotlib.ticker import LogFormatter

    legend = axes.get_legend()
    named = [title, axes.xaxis.label, axes.yaxis.label, *(legend.get_texts() if legend else ())]
    for axis in (axes.xaxis, axes.yaxis):
        is_log = isinstance(axis.get_major_formatter(), LogFormatter)  # its powers of ten are TeX
        named += [] if is_log else axis.get_ticklabels()
    for text in named:
        text.set_parse_math(False)
        text.set_text(make_printable(text.get_text()))
