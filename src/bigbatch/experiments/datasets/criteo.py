"""Criteo's click logs as training and test rows; Kaggle's log, the terabyte's days, or a part."""

from collections.abc import Iterable
from pathlib import Path

import numpy
from numpy.typing import NDArray

from bigbatch.errors import RunError
from bigbatch.experiments.datasets.click_rows import Clicks, packed
from bigbatch.experiments.datasets.location import DatasetLocation

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
    """Training and test rows of what is in the folder: days if there are some, else one file.

    Of several days the last is the test. Of one file a tenth of the rows is drawn for it. Of a file
    that is there both packed and not, one is read.

    Args:
        folder: with files that `CRITEO` names.
        table_rows: that a category is hashed to.
    Raises:
        RunError: there is no such file, or one is no click log.
        MissingPackageError: pandas is not installed.
    """
    plain = {file for file in folder.glob("day_*") if not file.suffix}
    days = in_order(plain | {f for f in folder.glob("day_*.gz") if f.with_suffix("") not in plain})
    one = [folder / name for name in _ONE_FILE if (folder / name).exists()][:1]
    if not days + one:
        raise RunError(f"{folder} has no {' or '.join(CRITEO.files)} itself; put it there again")
    parts = [packed(file) for file in days or one]
    if len(parts) > 1:
        return Clicks(parts[:-1], table_rows), Clicks(parts[-1:], table_rows)
    train, test = split(len(parts[0]))
    return Clicks(parts, table_rows, train), Clicks(parts, table_rows, test)


def in_order(files: Iterable[Path]) -> list[Path]:
    """day_2 before day_10."""
    return sorted(files, key=lambda file: (len(file.name.removesuffix(".gz")), file.name))


def split(rows: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
    """Rows to train on and to test with, drawn once for every seed and arm."""
    drawn = numpy.random.default_rng(_SPLIT_SEED).permutation(rows)
    test_rows = round(rows * _TEST_SHARE)
    return numpy.sort(drawn[test_rows:]), numpy.sort(drawn[:test_rows])
