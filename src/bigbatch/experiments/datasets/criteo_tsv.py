"""Criteo's click logs, as they are published: label, I1..I13, C1..C26, tab separated."""

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from bigbatch.errors import RunError
from bigbatch.optional_packages import import_optional

pandas = import_optional("pandas", "experiments")

INTEGERS, CATEGORIES = 13, 26

_DAMAGES = (ValueError, EOFError, gzip.BadGzipFile, zlib.error, pandas.errors.ParserError)
_CODE = re.compile(r"[0-9a-fA-F]{1,8}")
_COLUMNS = 1 + INTEGERS + CATEGORIES
_READ_AT_ONCE = 200_000  # rows; 26 columns of words take about 400 MB as pandas has them

Rows = tuple[NDArray[numpy.uint8], NDArray[numpy.float32], NDArray[numpy.uint32]]


def read_clicks(file: Path, rows: int = _READ_AT_ONCE) -> Iterator[Rows]:
    """The rows of one file, so many at a time.

    Args:
        file: text, or compressed as its ending says: `train.txt`, `day_0`, `day_0.gz`.
        rows: at a time.
    Yields:
        Labels (rows,); integers (rows, 13), nan where one is missing; categories (rows, 26), the
        eight hexadecimal digits as a number, 0 where one is missing. What lacks at a line's end
        counts as missing.
    Raises:
        RunError: the file is none of these.
    """
    integers = range(1, 1 + INTEGERS)
    kinds = {0: "float32", **dict.fromkeys(integers, "float32")}
    words = dict.fromkeys(range(1 + INTEGERS, _COLUMNS), object)
    try:
        with pandas.read_csv(
            file,
            sep="\t",
            header=None,
            dtype={**kinds, **words},
            na_values={number: [""] for number in kinds},
            keep_default_na=False,  # a missing category is an empty word
            quoting=3,
            chunksize=rows,
        ) as chunks:
            for chunk in chunks:
                yield _rows(chunk)
    except _DAMAGES as error:
        reason = " ".join(str(error).split())
        raise RunError(
            f"{file} is no click log of Criteo ({reason}); needed are {_COLUMNS} columns between "
            "tabs, without a header: label, 13 integers, 26 categories of 8 hexadecimal digits"
        ) from None


def _rows(chunk: Any) -> Rows:
    if chunk.shape[1] != _COLUMNS:
        raise ValueError(f"{chunk.shape[1]} columns")
    labels = chunk[0].to_numpy()
    if wrong := set(labels.tolist()) - {0.0, 1.0}:
        raise ValueError(f"label {min(wrong)}")
    codes = [_codes(chunk[1 + INTEGERS + number]) for number in range(CATEGORIES)]
    integers = chunk[list(range(1, 1 + INTEGERS))].to_numpy(dtype=numpy.float32)
    return labels.astype(numpy.uint8), integers, numpy.stack(codes, axis=1)


def _codes(column: Any) -> NDArray[numpy.uint32]:
    """Each different word is read once."""
    places, words = pandas.factorize(column)
    numbers = []
    for word in words:
        if word and not _CODE.fullmatch(word):
            raise ValueError(f"category {word!r}")
        numbers.append(int(word or "0", 16))
    found: NDArray[numpy.uint32] = numpy.array(numbers, dtype=numpy.uint32)[places]
    return found
