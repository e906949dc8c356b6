"""Heat maps of a run: what its log has of each layer, over time."""

from math import nan
from statistics import fmean
from typing import Any

from bigbatch.log.chart import HeatMap
from bigbatch.log.history import History
from bigbatch.log.row_schema import Row

_COLUMNS = 80  # most columns; a longer log is averaged
# key of the row, title, index in the numbers of a layer, upper end (None: the largest), logarithmic
_MAPS = (
    ("gsnr", "mean r", 0, None, False),
    ("gsnr", "share of weights at gamma", 1, 1.0, False),
    ("gsnr", "share of weights at r_max", 2, 1.0, False),
    ("gsnr", "effective learning-rate factor", 3, None, False),
    ("layers", "noise scale, samples", 0, None, True),
    ("layers", "similarity", 1, 1.0, False),
)


def heat_maps(history: History) -> list[HeatMap]:
    """GSNR, noise scale and similarity: layers from top to bottom, samples from left to right.

    None of what the log does not have.
    """
    maps = []
    for key, title, index, high, is_log in _MAPS:
        rows = [row for row in history.rows if row.get(key)]
        names = list(dict.fromkeys(name for row in rows for name in row[key]))
        size = max(1, -(-len(rows) // _COLUMNS))
        bins = [rows[start : start + size] for start in range(0, len(rows), size)]
        values = [[_mean(one, key, name, index) for one in bins] for name in names]
        if rows:
            ends = float(rows[0]["samples"]), float(rows[-1]["samples"])
            shades: Any = {"low": None if is_log else 0.0, "high": high, "log": is_log}
            maps.append(HeatMap(title, names, values, x_label="samples", x_range=ends, **shades))
    return maps


def _mean(rows: list[Row], key: str, layer: str, index: int) -> float:
    """The mean over some steps of one number of a layer; nan where no step has it."""
    values = [row[key][layer][index] for row in rows if layer in row[key]]
    known = [value for value in values if value is not None]
    return fmean(known) if known else nan
