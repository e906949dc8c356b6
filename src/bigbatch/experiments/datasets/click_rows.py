"""Clicks: 13 numbers and 26 categories a row, packed on disk or in memory."""

import os
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from bigbatch.errors import RunError
from bigbatch.experiments.datasets.dataset_cache import cached
from bigbatch.runs.atomic_files import open_atomically

NUMBERS, CATEGORIES = 13, 26
CLICK = numpy.dtype(
    [("label", "u1"), ("numbers", "<f4", (NUMBERS,)), ("codes", "<u4", (CATEGORIES,))]
)  # 157 bytes, side by side: a row is read at one place

_END = struct.Struct("<Qq")  # of packed rows: the bytes of their file, and when it was changed

Packed = NDArray[numpy.void]
Batch = tuple[Tensor, Tensor, Tensor]


class Clicks(Dataset[Batch]):
    """Rows of packed clicks; a batch is numbers, rows of the tables, and labels.

    Args:
        parts: packed rows, one after another.
        table_rows: that a category is hashed to, by its code's remainder.
        chosen: of these rows; None for all.
    Example:
        >>> data = Clicks([numpy.zeros(4, CLICK)], table_rows=10)
        >>> [tuple(column.shape) for column in data.__getitems__([0, 3])]
        [(2, 13), (2, 26), (2,)]
    """

    def __init__(
        self, parts: Sequence[Packed], table_rows: int, chosen: NDArray[numpy.int64] | None = None
    ) -> None:
        self._parts = parts
        self._ends = numpy.cumsum([len(part) for part in parts])
        self._chosen = chosen
        self._table_rows = table_rows

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._chosen is None else len(self._chosen)

    def __getitem__(self, index: int) -> Batch:
        numbers, rows, labels = self.__getitems__([index])
        return numbers[0], rows[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The rows of these indices: (n, 13) float32, (n, 26) int64, (n,) float32."""
        wanted = numpy.asarray(indices, dtype=numpy.int64)
        found = self._rows(wanted if self._chosen is None else self._chosen[wanted])
        rows = found["codes"].astype(numpy.int64) % self._table_rows
        labels = found["label"].astype(numpy.float32)
        return (
            torch.from_numpy(found["numbers"].copy()),
            torch.from_numpy(rows),
            torch.from_numpy(labels),
        )

    def _rows(self, wanted: NDArray[numpy.int64]) -> Packed:
        found = numpy.empty(len(wanted), CLICK)
        places = numpy.searchsorted(self._ends, wanted, side="right")
        for number in numpy.unique(places):
            in_part, part = places == number, self._parts[number]
            found[in_part] = part[wanted[in_part] - self._ends[number] + len(part)]
        return found


def packed(file: Path) -> Packed:
    """The rows of one of Criteo's files.

    They are written into the user's cache folder, once for all processes, and mapped into memory;
    their end says of which file, so that of another one, or cut short, they are written again.
    Where there can be no cache folder each process keeps the rows in memory, with a note.

    Raises:
        RunError: the file is no click log, or its rows do not fit into the cache folder.
        MissingPackageError: pandas is not installed.
    """
    now = file.stat()
    end = _END.pack(now.st_size, now.st_mtime_ns)
    with ExitStack() as stack:
        try:
            place = cached(f"{CLICK.descr}", file)
            if _end_of(place) != end:  # before it waits: of several ranks only the first is heard
                warnings.warn(
                    f"{file.parent} is packed once, into {place.parent}, {CLICK.itemsize} bytes a "
                    "row",
                    stacklevel=2,
                )
            stack.enter_context(FileLock(place.with_name(f".{place.name}.lock")))
        except OSError as error:
            warnings.warn(
                f"{file} is kept in memory by each process, as its cache folder cannot be written "
                f"({error}); let XDG_CACHE_HOME name another",
                stacklevel=2,
            )
            return numpy.concatenate([numpy.empty(0, CLICK), *_packed_rows(file)])
        if _end_of(place) != end:
            _pack(file, place, end)
        count = (place.stat().st_size - _END.size) // CLICK.itemsize
        return numpy.memmap(place, CLICK, "r", shape=(count,))


def _pack(file: Path, place: Path, end: bytes) -> None:
    try:
        with open_atomically(place) as out:
            for rows in _packed_rows(file):
                out.write(rows.tobytes())
            out.write(end)
    except OSError as error:
        raise RunError(
            f"{file} cannot be packed into {place} ({error.strerror}); its rows take "
            f"{CLICK.itemsize} bytes each: make room, or let XDG_CACHE_HOME name another folder"
        ) from None


def _end_of(packed: Path) -> bytes:
    """What stands after the rows; nothing where these are not whole, or there are none."""
    if not packed.exists():
        return b""
    size = packed.stat().st_size
    if size % CLICK.itemsize != _END.size:
        return b""
    with packed.open("rb") as file:
        file.seek(-_END.size, os.SEEK_END)
        return file.read()


def _packed_rows(file: Path) -> Iterator[Packed]:
    """Each number as log(1 + x), 0 where it is missing or negative."""
    from bigbatch.experiments.datasets.criteo_tsv import read_clicks

    for labels, integers, codes in read_clicks(file):
        rows = numpy.empty(len(labels), CLICK)
        rows["label"], rows["codes"] = labels, codes
        rows["numbers"] = numpy.log1p(numpy.maximum(numpy.nan_to_num(integers, nan=0.0), 0.0))
        yield rows
