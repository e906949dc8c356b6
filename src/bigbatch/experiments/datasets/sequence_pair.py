"""[CLS] first [SEP] second [SEP]: how BERT reads one text or two."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

Numbers = NDArray[numpy.int32]


@dataclass(frozen=True)
class SequencePair:
    """What is put around tokens, by its numbers, and the length of every row.

    Args:
        begin, end, pad: numbers of [CLS], [SEP] and [PAD].
        length: tokens of a row.
    Example:
        >>> frame = SequencePair(begin=2, end=3, pad=0, length=8)
        >>> tokens, segments, real = frame.around([7, 8], [9])
        >>> tokens.tolist(), segments.tolist(), int(real.sum())
        ([2, 7, 8, 3, 9, 3, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0], 6)
    """

    begin: int
    end: int
    pad: int
    length: int

    def around(
        self, first: Sequence[int] | Numbers, second: Sequence[int] | Numbers = ()
    ) -> tuple[Numbers, Numbers, NDArray[numpy.bool_]]:
        """Tokens, segments (0 or 1) and which are no padding, of one row or a pair, cut to fit.

        Of a pair that is too long the longer one loses tokens at its end, then both in turn.
        """
        room = self.length - (3 if len(second) else 2)
        ends = _ends(len(first), len(second), room)
        row = [self.begin, *first[: ends[0]], self.end]
        parted = len(row)
        if len(second):
            row += [*second[: ends[1]], self.end]
        tokens = numpy.full(self.length, self.pad, dtype=numpy.int32)
        tokens[: len(row)] = row
        place = numpy.arange(self.length, dtype=numpy.int32)
        segments = ((place >= parted) & (place < len(row))).astype(numpy.int32)
        return tokens, segments, place < len(row)


def _ends(first: int, second: int, room: int) -> tuple[int, int]:
    """How much of each fits."""
    if first + second <= room:
        return first, second
    half = room // 2
    if second <= half:
        return room - second, second
    if first <= room - half:
        return first, room - first
    return room - half, half
