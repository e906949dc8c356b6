"""Pairs of text for BERT's two tasks: to fill in what is hidden, and to tell what follows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.random import Generator, default_rng
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset

from bigbatch.errors import RunError
from bigbatch.experiments.datasets.in_memory import BatchDataset
from bigbatch.experiments.datasets.masking import Masking
from bigbatch.experiments.datasets.sequence_pair import SequencePair

Numbers = NDArray[numpy.int32]
Pairs = tuple[Tensor, ...]

_SHORTEST = 16  # tokens worth a row of their own
_DRAWN_AT_MOST = 20  # documents, for one that is long enough
_AROUND = 3  # [CLS] and two [SEP]
_LEAST_SHARE = 0.25  # of a row that the first segment has, and the second


@dataclass(frozen=True)
class Book:
    """Documents end to end.

    Args:
        tokens: of all of them.
        starts: where each begins, and where the last one ends.
    """

    tokens: Numbers
    starts: NDArray[numpy.int64]

    @classmethod
    def of(cls, documents: Iterable[Numbers], part: str) -> "Book":
        """Documents too short to be parted are left out.

        Args:
            documents: by their tokens.
            part: what of the text they are, for people.
        Raises:
            RunError: fewer than two are left.
        """
        kept = [document for document in documents if len(document) >= _SHORTEST]
        if len(kept) < 2:
            raise RunError(
                f"{part}: it has {len(kept)} documents of {_SHORTEST} tokens or more, and needs "
                "two, since half of the next sentences are another one's; give the text more, with "
                "blank lines between them"
            )
        lengths = [0, *(len(document) for document in kept)]
        return cls(numpy.concatenate(kept), numpy.cumsum(lengths, dtype=numpy.int64))

    def other(self, document: int, length: int, draw: Generator) -> Numbers:
        """So many tokens from somewhere in another document.

        A row must not tell by its length that it was pieced together: of some documents drawn the
        first that is long enough is taken, and the longest where none is.
        """
        first, end = 0, 0
        for _ in range(_DRAWN_AT_MOST):
            another = int(draw.integers(len(self.starts) - 2))
            another += another >= document
            one, after = self.starts[another : another + 2].tolist()
            if after - one > end - first:
                first, end = one, after
            if end - first >= length:
                break
        begin = first + int(draw.integers(max(1, end - first - length + 1)))
        return self.tokens[begin : min(begin + length, end)]


class SentencePairs(BatchDataset):
    """Rows of two segments, the second of which follows the first or comes from anywhere.

    Each document is cut into rows one after another. A row's place of parting, whether its second
    segment is replaced (half are), by what, and which tokens are hidden depend on the seed and the
    row's number alone: the same after an interruption and on any rank. Each row comes `draws`
    times, each time with other draws.

    Args:
        book: the documents.
        frame: of a row.
        masking: what is hidden.
        special: numbers of tokens that are never to be predicted.
        draws: of each row in one pass over the data.
        seed: of all draws.
    Source:
        J. Devlin et al., BERT, 2018, A.1 and A.2. Segments part at any token, not at sentences.
    """

    def __init__(
        self,
        book: Book,
        frame: SequencePair,
        masking: Masking,
        special: Sequence[int],
        draws: int,
        seed: int,
    ) -> None:
        self._book, self._frame, self._masking = book, frame, masking
        self._special = numpy.array(special)
        self._seed, self._draws = seed, draws
        room = frame.length - _AROUND
        begins = [
            numpy.arange(first, end - _SHORTEST + 1, room)
            for first, end in zip(book.starts, book.starts[1:], strict=False)
        ]
        self._begins = numpy.concatenate(begins)
        self._documents = numpy.repeat(numpy.arange(len(begins)), [len(rows) for rows in begins])

    def __len__(self) -> int:
        return len(self._begins) * self._draws

    def __getitems__(self, indices: Sequence[int]) -> Pairs:
        """(tokens, segments, real, places, labels, random) of these rows, a batch of them."""
        rows = [self._row(index) for index in indices]
        return tuple(torch.from_numpy(numpy.stack(column)) for column in zip(*rows, strict=True))

    def _row(self, index: int) -> tuple[NDArray[numpy.generic], ...]:
        draw = default_rng((self._seed, index))
        row = index % len(self._begins)
        document, begin = int(self._documents[row]), self._begins[row]
        end = min(begin + self._frame.length - _AROUND, self._book.starts[document + 1])
        whole = self._book.tokens[begin:end]
        least = int(_LEAST_SHARE * len(whole))
        parting = int(draw.integers(least, len(whole) - least + 1))
        second, random = whole[parting:], draw.random() < 0.5
        if random:
            second = self._book.other(document, len(second), draw)
        tokens, segments, real = self._frame.around(whole[:parting], second)
        may = real & ~numpy.isin(tokens, self._special)
        hidden, places, labels = self._masking.hide(tokens, may, draw)
        return hidden, segments, real, places, labels, numpy.array(random, dtype=numpy.int64)


def spread(pairs: SentencePairs, most: int) -> Subset[Pairs]:
    """At most so many rows, evenly spread over all; 0 for all of them."""
    rows = len(pairs)
    count = min(most or rows, rows)
    return Subset(pairs, [number * rows // count for number in range(count)])
