"""Rows of BERT for two texts: [CLS] first [SEP] second [SEP]."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

Numbers = NDArray[numpy.int32]


@dataclass(frozen=True)
class SequencePair:
    """Encodes pairs of token sequences as rows of one length.

    Example:
        >>> frame = SequencePair(begin=2, end=3, pad=0, length=8)
        >>> tokens, segments, is_token = frame.encode([7, 8], [9])
        >>> tokens.tolist(), segments.tolist(), int(is_token.sum())
        ([2, 7, 8, 3, 9, 3, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0], 6)
    """

    begin: int  # begin, end, pad: numbers of [CLS], [SEP] and [PAD]
    end: int
    pad: int
    length: int  # number of tokens of a row

    def encode(
        self, first: Sequence[int] | Numbers, second: Sequence[int] | Numbers
    ) -> tuple[Numbers, Numbers, NDArray[numpy.bool_]]:
        """Tokens, segments (0 or 1) and a mask that is False at padding.

        If the pair is too long, the longer text is cut at its end first, then both equally.
        """
        first_size, second_size = self._sizes(len(first), len(second))
        row = [self.begin, *first[:first_size], self.end, *second[:second_size], self.end]
        tokens = numpy.full(self.length, self.pad, dtype=numpy.int32)
        tokens[: len(row)] = row
        index = numpy.arange(self.length, dtype=numpy.int32)
        segments = ((index >= first_size + 2) & (index < len(row))).astype(numpy.int32)
        return tokens, segments, index < len(row)

    def _sizes(self, first: int, second: int) -> tuple[int, int]:
        """Number of tokens of each text that fit, from the lengths of both."""
        room = self.length - 3  # [CLS] and two [SEP]
        if first + second <= room:
            return first, second
        second_size = min(second, max(room - first, room // 2))
        return min(first, room - second_size), second_size
