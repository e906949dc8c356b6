"""Criteo's click logs as training and test rows."""

from collections.abc import Iterable
from pathlib import Path

import numpy
from numpy.typing import NDArray

from bigbatch.errors import RunError
from bigbatch_recipes.datasets.click_rows import Clicks, read_packed
from bigbatch_recipes.datasets.location import DatasetLocation

_ONE_FILE = ("train.txt", "train.txt.gz", "criteo_kaggle_rows.tsv.gz")  # Kaggle's, or rows of it
_TEST_SHARE, _SPLIT_SEED = 0.1, 0

CRITEO = DatasetLocation(
    "Criteo's click log",
    folders=("criteo", "dac"),
    files=(*_ONE_FILE, "day_[0-9]*"),
    source="Criteo's Kaggle challenge (train.txt) or its terabyte log (day_0 to day_23)",
    size="45,840,617 rows, or 4,373,472,329",
    otherwise="a generated click log",
)


def read_criteo(folder: Path, table_rows: int) -> tuple[Clicks, Clicks]:
    """Training and test rows of a folder, from the files of days if there are any, else one file.

    The last of several days is the test set. Of one file a tenth of the rows is drawn as test set.
    A file that exists both compressed and not is read once.

    Args:
        folder: a folder with files of `CRITEO`.
        table_rows: rows of a table, see `Clicks`.
    Raises:
        RunError: no such file exists, or one is no click log.
        MissingPackageError: pandas is not installed.
    """
    plain = {file for file in folder.glob("day_*") if not file.suffix}
    days = sort_days(plain | {f for f in folder.glob("day_*.gz") if f.with_suffix("") not in plain})
    files = days or [folder / name for name in _ONE_FILE if (folder / name).exists()][:1]
    if not files:
        raise RunError(f"{folder} has no {' or '.join(CRITEO.files)} itself; put it there again")
    parts = [read_packed(file) for file in files]
    if len(parts) > 1:
        return Clicks(parts[:-1], table_rows), Clicks(parts[-1:], table_rows)
    train, test = split(len(parts[0]))
    return Clicks(parts, table_rows, train), Clicks(parts, table_rows, test)


def sort_days(files: Iterable[Path]) -> list[Path]:
    """The files by the number of the day: day_2 before day_10."""
    return sorted(files, key=lambda file: (len(file.name.removesuffix(".gz")), file.name))


def split(rows: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
    """Indices of the training and the test rows, the same for every seed and arm."""
    order = numpy.random.default_rng(_SPLIT_SEED).permutation(rows)
    test_rows = round(rows * _TEST_SHARE)
    return numpy.sort(order[test_rows:]), numpy.sort(order[:test_rows])
