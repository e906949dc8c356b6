"""Heat maps of a VR run: r over layers and time."""

from math import nan
from statistics import fmean

import numpy
from matplotlib.figure import Figure

from bigbatch.log.curves import bins_of
from bigbatch.log.history import History
from bigbatch.log.row_schema import Row

_COLUMNS = 80  # most columns; a longer log is averaged
# title, index in the log's numbers of a layer, upper end of the colours (None: the largest value)
_PANELS = (
    ("mean r", 0, None),
    ("share of weights at gamma", 1, 1.0),
    ("share of weights at r_max", 2, 1.0),
    ("effective learning-rate factor", 3, None),
)


def heat_maps(history: History) -> Figure | None:
    """Four panels: layers from top to bottom in the model's order, samples from left to right.

    None for a run whose log has no r.
    """
    rows = [row for row in history.rows if row.get("gsnr")]
    if not rows:
        return None
    names = list(dict.fromkeys(name for row in rows for name in row["gsnr"]))
    height = 1.6 + 0.17 * len(names)
    figure = Figure(figsize=(12, 2 * height), layout="constrained")
    figure.suptitle(history.label, fontsize=10, x=0.01, ha="left")
    bins = bins_of(rows, _COLUMNS)
    extent = (rows[0]["samples"], rows[-1]["samples"], len(names) - 0.5, -0.5)
    panels = figure.subplots(2, 2, sharey=True).flat
    for axes, (title, index, maximum) in zip(panels, _PANELS, strict=True):
        means = numpy.array([_layer_means(bin_rows, names, index) for bin_rows in bins]).T
        image = axes.imshow(
            means, aspect="auto", interpolation="none", extent=extent, vmin=0, vmax=maximum
        )
        figure.colorbar(image, ax=axes, pad=0.01)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set_xlabel("samples", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
    return figure


def _layer_means(rows: list[Row], names: list[str], index: int) -> list[float]:
    """The mean over some steps of one number of each layer; nan where no step has it."""
    layers = [[row["gsnr"][name][index] for row in rows if name in row["gsnr"]] for name in names]
    finite = [[value for value in values if value is not None] for values in layers]
    return [fmean(values) if values else nan for values in finite]
