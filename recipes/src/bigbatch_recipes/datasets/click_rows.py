"""Click logs: 13 numbers and 26 categories a row, packed on disk or in memory."""

import hashlib
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

from bigbatch.errors import RunError
from bigbatch.log.atomic_files import open_atomically
from bigbatch_recipes.datasets.criteo_tsv import CATEGORIES, NUMBERS, read_clicks
from bigbatch_recipes.datasets.in_memory import BatchDataset

CLICK = numpy.dtype(
    [("label", "u1"), ("numbers", "<f4", (NUMBERS,)), ("codes", "<u4", (CATEGORIES,))]
)  # 157 bytes, contiguous, so that one read gives a row

_FOOTER = struct.Struct("<Qq")  # after the packed rows: size and modification time of their file

Packed = NDArray[numpy.void]
Batch = tuple[Tensor, Tensor, Tensor]


class Clicks(BatchDataset):
    """Rows of packed clicks; a batch is numbers, rows of the tables, and labels.

    Args:
        parts: packed rows, one after another.
        table_rows: rows of a table; a category's row is its code modulo this number.
        indices: the rows to use; None for all.
    Example:
        >>> data = Clicks([numpy.zeros(4, CLICK)], table_rows=10)
        >>> [tuple(column.shape) for column in data.__getitems__([0, 3])]
        [(2, 13), (2, 26), (2,)]
    """

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


def read_packed(file: Path) -> Packed:
    """The rows of one of Criteo's files.

    They are written into the user's cache folder, once for all processes, and mapped into memory.
    A footer names the version of the file: rows of another version, or an incomplete cache file,
    are written again. Without a cache folder each process keeps the rows in memory, with a note.

    Raises:
        RunError: the file is no click log, or its rows do not fit into the cache folder.
        MissingPackageError: pandas is not installed.
    """
    stat = file.stat()
    footer = _FOOTER.pack(stat.st_size, stat.st_mtime_ns)
    with ExitStack() as stack:
        try:
            cache = cache_file(f"{CLICK.descr}", file)
            if _footer_of(cache) != footer:  # before the lock, since only rank 0's warnings show
                warnings.warn(
                    f"{file.parent} is packed once, into {cache.parent}, {CLICK.itemsize} bytes a "
                    "row",
                    stacklevel=2,
                )
            stack.enter_context(FileLock(cache.with_name(f".{cache.name}.lock")))
        except OSError as error:
            warnings.warn(
                f"{file} is kept in memory by each process, as its cache folder cannot be written "
                f"({error}); let XDG_CACHE_HOME name another",
                stacklevel=2,
            )
            return numpy.concatenate([numpy.empty(0, CLICK), *_packed_rows(file)])
        if _footer_of(cache) != footer:
            _pack(file, cache, footer)
        count = (cache.stat().st_size - _FOOTER.size) // CLICK.itemsize
        return numpy.memmap(cache, CLICK, "r", shape=(count,))


def _pack(file: Path, cache: Path, footer: bytes) -> None:
    try:
        with open_atomically(cache) as out:
            for rows in _packed_rows(file):
                out.write(rows.tobytes())
            out.write(footer)
    except OSError as error:
        raise RunError(
            f"{file} cannot be packed into {cache} ({error.strerror}); its rows take "
            f"{CLICK.itemsize} bytes each: make room, or let XDG_CACHE_HOME name another folder"
        ) from None


def _footer_of(cache: Path) -> bytes:
    """The bytes after the rows; none if the file is missing or incomplete."""
    if not cache.exists() or cache.stat().st_size % CLICK.itemsize != _FOOTER.size:
        return b""
    with cache.open("rb") as file:
        file.seek(-_FOOTER.size, os.SEEK_END)
        return file.read()


def _packed_rows(file: Path) -> Iterator[Packed]:
    """Each number as log(1 + x), 0 where it is missing or negative."""
    for labels, integers, codes in read_clicks(file):
        rows = numpy.empty(len(labels), CLICK)
        rows["label"], rows["codes"] = labels, codes
        rows["numbers"] = numpy.log1p(numpy.maximum(numpy.nan_to_num(integers, nan=0.0), 0.0))
        yield rows


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/bigbatch, or ~/.cache/bigbatch where that names no absolute path.

    Raises:
        OSError: the user has no home.
    Source:
        XDG Base Directory Specification 0.8.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (folder if folder.is_absolute() else Path.home() / ".cache") / "bigbatch"
    except RuntimeError as error:
        raise OSError(str(error)) from None


def cache_file(layout: str, file: Path) -> Path:
    """The path in the cache folder for the packed form of a file; creates the folder.

    One absolute path of a file and one layout have one cache file; the caller replaces outdated
    contents.

    Args:
        layout: layout of the packed form, which another version of bigbatch may change.
        file: a file of the user's data.
    Raises:
        OSError: the folder cannot be created or written.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(f"{layout}\0".encode() + os.fsencode(file.resolve())).hexdigest()[:16]
    return folder / f"{file.name}-{key}.packed"
