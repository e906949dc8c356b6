"""Pairs of text for BERT's two tasks: masked tokens, and next-sentence prediction."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy
import torch
from numpy.random import Generator, default_rng
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset

from bigbatch.errors import RunError
from bigbatch_recipes.datasets.in_memory import BatchDataset
from bigbatch_recipes.datasets.sequence_pair import Numbers, SequencePair

Pairs = tuple[Tensor, ...]

IGNORED = -100  # label without a prediction, as torch's losses define it
_MASKED_SHARE = 0.15
_MASKED, _RANDOM = 0.8, 0.1  # the others are unchanged

_MIN_TOKENS = 16  # of a row
_MAX_DRAWS = 20  # of documents, for one that is long enough
_SPECIAL_TOKENS = 3  # [CLS] and two [SEP]
_MIN_SHARE = 0.25  # of a row that each segment has


@dataclass(frozen=True)
class Book:
    """Concatenated documents."""

    tokens: Numbers  # tokens of all documents
    # index of each document's first token, then the number of all tokens
    starts: NDArray[numpy.int64]

    @classmethod
    def of(cls, documents: Iterable[Numbers], name: str) -> "Book":
        """Drops documents that are too short for two segments.

        Raises:
            RunError: fewer than two documents are long enough.
        """
        long_enough = [document for document in documents if len(document) >= _MIN_TOKENS]
        if len(long_enough) < 2:
            raise RunError(
                f"{name}: it has {len(long_enough)} documents of {_MIN_TOKENS} tokens or more, and "
                "needs two, since half of the next sentences come from another document; add "
                "documents, with blank lines between them"
            )
        lengths = [0, *map(len, long_enough)]
        return cls(numpy.concatenate(long_enough), numpy.cumsum(lengths, dtype=numpy.int64))

    def draw_other(self, document: int, length: int, generator: Generator) -> Numbers:
        """So many tokens from a random position of another document.

        The length of a row must not reveal that its second segment is replaced: the first of the
        drawn documents that is long enough is taken, and the longest if none is.
        """
        start, end = 0, 0
        for _ in range(_MAX_DRAWS):
            other = int(generator.integers(len(self.starts) - 2))
            other += other >= document
            other_start, other_end = self.starts[other : other + 2].tolist()
            if other_end - other_start > end - start:
                start, end = other_start, other_end
            if end - start >= length:
                break
        begin = start + int(generator.integers(max(1, end - start - length + 1)))
        return self.tokens[begin : min(begin + length, end)]


@dataclass(frozen=True)
class Masking:
    """BERT's rule: of the chosen 15 %, 80 % become [MASK], 10 % a random token, 10 % stay.

    Source:
        J. Devlin et al., BERT, 2018, 3.1 and A.1.
    """

    mask: int  # number of [MASK]
    ordinary: NDArray[numpy.integer]  # numbers of the tokens from which a random one is drawn
    # maximum number of predictions of a row; rows with fewer are padded with `IGNORED`
    max_predictions: int

    def mask_tokens(
        self, tokens: Numbers, maskable: NDArray[numpy.bool_], generator: Generator
    ) -> tuple[Numbers, Numbers, Numbers]:
        """A copy with some tokens masked, the chosen positions, and their tokens.

        Args:
            tokens: tokens of one row.
            maskable: True at tokens that can be chosen: not special, not padding.
            generator: draws positions and replacements.
        Returns:
            Tokens of the same length; positions and labels, `max_predictions` each.
        """
        candidates = numpy.flatnonzero(maskable)
        count = min(
            self.max_predictions, max(1, round(_MASKED_SHARE * len(candidates))), len(candidates)
        )
        chosen = numpy.sort(generator.choice(candidates, count, replace=False))
        kind = generator.random(count)
        random = generator.choice(self.ordinary, count)
        masked = tokens.copy()
        masked[chosen] = numpy.where(
            kind < _MASKED, self.mask, numpy.where(kind < _MASKED + _RANDOM, random, tokens[chosen])
        )
        positions = numpy.zeros(self.max_predictions, dtype=numpy.int32)
        labels = numpy.full(self.max_predictions, IGNORED, dtype=numpy.int32)
        positions[:count], labels[:count] = chosen, tokens[chosen]
        return masked, positions, labels


class SentencePairs(BatchDataset):
    """Rows of two segments; the second follows the first or comes from another document.

    Each document is cut into rows one after another. Where a row is split, whether its second
    segment is replaced (half are), by what, and which tokens are masked depend on the seed and the
    row's number alone: the same after an interruption and on any rank. Each row occurs `draws`
    times, each time with other draws.

    Source:
        J. Devlin et al., BERT, 2018, A.1 and A.2. A row is split at any token.
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
        begins = [
            numpy.arange(start, end - _MIN_TOKENS + 1, frame.length - _SPECIAL_TOKENS)
            for start, end in pairwise(book.starts)
        ]
        self._begins = numpy.concatenate(begins)
        self._documents = numpy.repeat(numpy.arange(len(begins)), [len(rows) for rows in begins])

    def __len__(self) -> int:
        return len(self._begins) * self._draws

    def __getitems__(self, indices: Sequence[int]) -> Pairs:
        """A batch (tokens, segments, is_token, positions, labels, is_random)."""
        rows = [self._row(index) for index in indices]
        return tuple(torch.from_numpy(numpy.stack(column)) for column in zip(*rows, strict=True))

    def _row(self, index: int) -> tuple[NDArray[numpy.generic] | numpy.generic, ...]:
        generator = default_rng((self._seed, index))
        row = index % len(self._begins)
        document, begin = int(self._documents[row]), self._begins[row]
        end = min(begin + self._frame.length - _SPECIAL_TOKENS, self._book.starts[document + 1])
        text = self._book.tokens[begin:end]
        min_size = int(_MIN_SHARE * len(text))
        split = int(generator.integers(min_size, len(text) - min_size + 1))
        second, is_random = text[split:], generator.random() < 0.5
        if is_random:
            second = self._book.draw_other(document, len(second), generator)
        tokens, segments, is_token = self._frame.encode(text[:split], second)
        maskable = is_token & ~numpy.isin(tokens, self._special)
        masked, positions, labels = self._masking.mask_tokens(tokens, maskable, generator)
        return masked, segments, is_token, positions, labels, numpy.int64(is_random)


def spread(pairs: SentencePairs, max_rows: int) -> Subset[Pairs]:
    """At most so many rows, evenly spread over all; 0 for all of them."""
    rows = len(pairs)
    count = min(max_rows or rows, rows)
    return Subset(pairs, [number * rows // count for number in range(count)])
