"""Criteo's click logs, as they are published: label, I1..I13, C1..C26, tab separated."""

import gzip
import re
import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from bigbatch.errors import RunError

NUMBERS, CATEGORIES = 13, 26

_READ_ERRORS = (ValueError, EOFError, gzip.BadGzipFile, zlib.error)
_CODE = re.compile(r"[0-9a-fA-F]{1,8}")
_COLUMNS = 1 + NUMBERS + CATEGORIES
_CHUNK_ROWS = 200_000  # 26 columns of words take about 400 MB in pandas

Rows = tuple[NDArray[numpy.uint8], NDArray[numpy.float32], NDArray[numpy.uint32]]


def read_clicks(file: Path, rows: int = _CHUNK_ROWS) -> Iterator[Rows]:
    """The rows of one file, in chunks.

    Args:
        file: text, compressed if its name ends so: `train.txt`, `day_0`, `day_0.gz`.
        rows: rows of a chunk.
    Yields:
        Labels (rows,); integers (rows, 13), nan where one is missing; categories (rows, 26), the
        eight hexadecimal digits as a number, 0 where one is missing. Columns that a line lacks
        at its end are missing values.
    Raises:
        RunError: the file is no click log.
        MissingPackageError: pandas is not installed.
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
