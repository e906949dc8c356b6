"""Criteo's click logs: label, 13 numbers and 26 categories a row, packed on disk or in memory."""

import fcntl
import gzip
import hashlib
import os
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigbatch.errors import RunError
from bigbatch.log.atomic_files import open_atomically
from bigbatch_recipes.datasets.in_memory import BatchDataset
from bigbatch_recipes.datasets.locations import CRITEO, CRITEO_FILES

NUMBERS, CATEGORIES = 13, 26
CLICK = numpy.dtype(
    [("label", "u1"), ("numbers", "<f4", (NUMBERS,)), ("codes", "<u4", (CATEGORIES,))]
)  # 157 bytes, contiguous, so that one read gives a row

_TEST_SHARE, _SPLIT_SEED = 0.1, 0
_READ_ERRORS = (ValueError, EOFError, gzip.BadGzipFile, zlib.error)
_CODE = re.compile(r"[0-9a-fA-F]{1,8}")
_COLUMNS = 1 + NUMBERS + CATEGORIES
_CHUNK_ROWS = 200_000  # 26 columns of words take about 400 MB in pandas


Packed = NDArray[numpy.void]
Batch = tuple[Tensor, Tensor, Tensor]
Rows = tuple[NDArray[numpy.uint8], NDArray[numpy.float32], NDArray[numpy.uint32]]


class Clicks(BatchDataset):
    """Rows of packed clicks; a batch is numbers, rows of the tables, and labels."""

    def __init__(
        self, parts: Sequence[Packed], table_rows: int, indices: NDArray[numpy.int64] | None = None
    ) -> None:
        self._parts = parts
        self._ends = numpy.cumsum([len(part) for part in parts])
        self._indices = indices
        self._table_rows = table_rows

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._indices is None else len(self._indices)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The rows of these indices: (n, 13) float32, (n, 26) int64, (n,) float32."""
        positions = numpy.asarray(indices, dtype=numpy.int64)
        clicks = self._read(positions if self._indices is None else self._indices[positions])
        rows = torch.from_numpy(clicks["codes"].astype(numpy.int64) % self._table_rows)
        labels = torch.from_numpy(clicks["label"].astype(numpy.float32))
        return torch.from_numpy(clicks["numbers"].copy()), rows, labels

    def _read(self, positions: NDArray[numpy.int64]) -> Packed:
        clicks = numpy.empty(len(positions), CLICK)
        part_numbers = numpy.searchsorted(self._ends, positions, side="right")
        for number in numpy.unique(part_numbers):
            in_part, part = part_numbers == number, self._parts[number]
            clicks[in_part] = part[positions[in_part] - self._ends[number] + len(part)]
        return clicks


def read_criteo(folder: Path, table_rows: int) -> tuple[Clicks, Clicks]:
    """Training and test rows of a folder, from the files of days if there are any, else one file.

    The last of several days is the test set. Of one file a tenth of the rows is drawn as test set.
    A file that exists both compressed and not is read once.

    Raises:
        RunError: no such file exists, or one is no click log.
    """
    plain = {file for file in folder.glob("day_*") if not file.suffix}
    days = sort_days(plain | {f for f in folder.glob("day_*.gz") if f.with_suffix("") not in plain})
    files = days or [folder / name for name in CRITEO_FILES if (folder / name).exists()][:1]
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


def read_packed(file: Path) -> Packed:
    """The rows of one of Criteo's files.

    They are written into the user's cache folder once, and mapped into memory. The copy's name has
    the path, size and date of the file: after a change the rows are written again.

    Raises:
        RunError: the file is no click log, or the cache folder cannot be written.
    """
    copy = _copy_of(file)
    try:
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            warnings.warn(
                f"{file.parent} is packed once, into {copy.parent}, {CLICK.itemsize} bytes a row",
                stacklevel=2,
            )
            with copy.with_name(f".{copy.name}.lock").open("w") as lock:
                _wait_for(lock)  # of several ranks one packs, and the others wait
                if not copy.exists():
                    _pack(file, copy)
    except OSError as error:
        raise RunError(
            f"{file} cannot be packed into {copy} ({error.strerror}); its rows take "
            f"{CLICK.itemsize} bytes each: make room, or let XDG_CACHE_HOME name another folder"
        ) from None
    return numpy.memmap(copy, CLICK, "r") if copy.stat().st_size else numpy.empty(0, CLICK)


def _wait_for(lock: IO[str]) -> None:
    """Locks a file, whose folder may be on a file system that has no locks.

    Raises:
        RunError: it has none, so several processes could write one copy at once.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise RunError(
            f"{lock.name} cannot be locked ({error.strerror}); let XDG_CACHE_HOME name a folder on "
            "a file system that has locks, a local disk for example"
        ) from None


def _copy_of(file: Path) -> Path:
    """The path of the packed copy of a file in the cache folder.

    Source:
        XDG Base Directory Specification 0.8: $XDG_CACHE_HOME, or ~/.cache where that names no
        absolute path.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (cache if cache.is_absolute() else Path.home() / ".cache") / "bigbatch"
    stat = file.stat()
    place = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:16]
    version = hashlib.sha256(f"{CLICK.descr} {stat.st_size} {stat.st_mtime_ns}".encode())
    return folder / f"{file.name}-{place}-{version.hexdigest()[:16]}.packed"


def _pack(file: Path, copy: Path) -> None:
    """Writes the packed rows of a file; removes the copies of its earlier versions."""
    for earlier in copy.parent.glob(f"{copy.name.rpartition('-')[0]}-*.packed"):
        earlier.unlink(missing_ok=True)
    with open_atomically(copy) as out:
        for rows in _packed_rows(file):
            out.write(rows.tobytes())


def _packed_rows(file: Path) -> Iterator[Packed]:
    """Each number as log(1 + x), 0 where it is missing or negative."""
    for labels, integers, codes in read_clicks(file):
        rows = numpy.empty(len(labels), CLICK)
        rows["label"], rows["codes"] = labels, codes
        rows["numbers"] = numpy.log1p(numpy.maximum(numpy.nan_to_num(integers, nan=0.0), 0.0))
        yield rows


def read_clicks(file: Path, rows: int = _CHUNK_ROWS) -> Iterator[Rows]:
    """The rows of one file, in chunks.

    Yields:
        Labels (rows,); integers (rows, 13), nan where one is missing; categories (rows, 26), the
        eight hexadecimal digits as a number, 0 where one is missing. Columns that a line lacks
        at its end are missing values.
    Raises:
        RunError: the file is no click log.
    """
    pandas: Any = import_module("pandas")
    numbers = dict.fromkeys(range(1 + NUMBERS), "float32")
    words = dict.fromkeys(range(1 + NUMBERS, _COLUMNS), object)
    try:
        with pandas.read_csv(
            file,
            sep="\t",
            header=None,
            dtype={**numbers, **words},
            na_values={column: [""] for column in numbers},
            keep_default_na=False,  # a missing category is an empty word
            quoting=3,
            chunksize=rows,
        ) as chunks:
            for chunk in chunks:
                yield _rows_of(chunk)
    except _READ_ERRORS as error:
        reason = " ".join(str(error).split())
        raise RunError(
            f"{file} is no click log of Criteo ({reason}); needed are {_COLUMNS} columns between "
            "tabs, without a header: label, 13 integers, 26 categories of 8 hexadecimal digits"
        ) from None


def _rows_of(chunk: Any) -> Rows:
    if chunk.shape[1] != _COLUMNS:
        raise ValueError(f"{chunk.shape[1]} columns")
    labels = chunk[0].to_numpy()
    if wrong := set(labels.tolist()) - {0.0, 1.0}:
        raise ValueError(f"label {min(wrong)}")
    codes = [_codes_of(chunk[column]) for column in range(1 + NUMBERS, _COLUMNS)]
    integers = chunk[list(range(1, 1 + NUMBERS))].to_numpy(dtype=numpy.float32)
    return labels.astype(numpy.uint8), integers, numpy.stack(codes, axis=1)


def _codes_of(column: Any) -> NDArray[numpy.uint32]:
    """The codes of a column's words; each different word is parsed once."""
    indices, words = column.factorize()
    for word in words:
        if word and not _CODE.fullmatch(word):
            raise ValueError(f"category {word!r}")
    numbers = [int(word or "0", 16) for word in words]
    codes: NDArray[numpy.uint32] = numpy.array(numbers, dtype=numpy.uint32)[indices]
    return codes


_SEED = 0  # one log for every seed and arm
_FACTORS = 4
_SPREAD = 1.6  # standard deviation of the logit
_MEAN = -1.5  # of the logit: about a quarter of the rows is clicked
_SHARES = (0.4, 0.4, 0.2)  # of its variance: numbers, categories, pairs of categories
_MIN_CATEGORIES, _MAX_CATEGORIES = 4, 1_000  # of a column
_ZIPF = 1.1


@dataclass(frozen=True)
class SyntheticClicks:
    """Packed rows, and the true probability of each click."""

    rows: Packed  # rows in Criteo's packed form
    truth: NDArray[numpy.float64]  # probabilities, (rows,)


def generate(rows: int) -> SyntheticClicks:
    """Draws so many rows: the same ones in every call, but not the first rows of a longer log."""
    rng = numpy.random.default_rng(_SEED)
    log = numpy.empty(rows, CLICK)
    log["numbers"] = numpy.log1p(rng.poisson(rng.lognormal(1.0, 1.0, (rows, NUMBERS))))
    effect_of_one = numpy.zeros(rows)
    total, squares = numpy.zeros((rows, _FACTORS)), numpy.zeros(rows)
    for column, count in enumerate(
        numpy.geomspace(_MIN_CATEGORIES, _MAX_CATEGORIES, CATEGORIES).astype(int)
    ):
        frequencies = 1.0 / numpy.arange(1, count + 1) ** _ZIPF
        codes = rng.choice(count, rows, p=frequencies / frequencies.sum())
        log["codes"][:, column] = codes
        effect_of_one += rng.normal(size=count)[codes]
        factors = rng.normal(size=(count, _FACTORS))[codes]
        total += factors
        squares += (factors**2).sum(1)
    pairs = ((total**2).sum(1) - squares) / 2  # sum of products of factors over pairs of columns
    numbers = log["numbers"].astype(numpy.float64) @ rng.normal(size=NUMBERS)
    effects = (numbers, effect_of_one, pairs)
    logit = _MEAN + _SPREAD * sum(
        share**0.5 * (effect - effect.mean()) / effect.std()
        for share, effect in zip(_SHARES, effects, strict=True)
    )
    truth = 1 / (1 + numpy.exp(-logit))
    log["label"] = rng.random(rows) < truth
    return SyntheticClicks(log, truth)
