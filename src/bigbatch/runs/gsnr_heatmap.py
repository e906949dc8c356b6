"""r of a variance-reduced run: a heat map over layers and time."""

import math

import numpy
from matplotlib.figure import Figure

from bigbatch.runs.metrics import History
from bigbatch.runs.run_directory import Row

_BINS = 80  # columns; a longer log is averaged into so many
# title, which of a layer's numbers, upper end of its colours (None: the largest seen)
_PANELS = (
    ("mean r", 0, None),
    ("share of weights at gamma", 1, 1.0),
    ("share of weights at r_max", 2, 1.0),
    ("effective learning-rate factor", 3, None),
)


def heat_maps(history: History) -> Figure | None:
    """Four panels, layers from top to bottom as the model names them, samples to the right.

    None for a run whose log tells nothing of r.
    """
    rows = [row for row in history.rows if row.get("gsnr")]
    if not rows:
        return None
    names = list(dict.fromkeys(name for row in rows for name in row["gsnr"]))
    height = 1.6 + 0.17 * len(names)
    figure = Figure(figsize=(12, 2 * height), layout="constrained")
    figure.suptitle(history.label, fontsize=10, x=0.01, ha="left")
    ends = [part[-1]["samples"] for part in _parts(rows)]
    extent = (rows[0]["samples"], ends[-1], len(names) - 0.5, -0.5)
    for axes, (title, which, most) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        table = numpy.array([_column(part, names, which) for part in _parts(rows)]).T
        image = axes.imshow(
            table, aspect="auto", interpolation="nearest", extent=extent, vmin=0, vmax=most
        )
        figure.colorbar(image, ax=axes, pad=0.01)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set_xlabel("samples", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
    return figure


def _parts(rows: list[Row]) -> list[list[Row]]:
    size = -(-len(rows) // _BINS)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _column(rows: list[Row], names: list[str], which: int) -> list[float]:
    """The mean over some steps of one number of each layer; nan where it was never known."""
    return [_mean([row["gsnr"].get(name, _UNKNOWN)[which] for row in rows]) for name in names]


_UNKNOWN = [None] * len(_PANELS)


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else math.nan
