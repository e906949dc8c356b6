"""Which tokens a masked language model has to predict, and what stands in their place."""

from dataclasses import dataclass

import numpy
from numpy.random import Generator
from numpy.typing import NDArray

Numbers = NDArray[numpy.int32]

IGNORED = -100  # label of a place where nothing is to be predicted, as torch's losses have it
_SHARE = 0.15
_MASKED, _RANDOM = 0.8, 0.1  # the rest are left as they are


@dataclass(frozen=True)
class Masking:
    """BERT's rule: of the chosen 15 %, 80 % become [MASK], 10 % a random token, 10 % stay.

    Args:
        mask: number of [MASK].
        ordinary: numbers that a random token is drawn from.
        most: places of a row, at most; rows with fewer are filled up with `IGNORED`.
    Source:
        J. Devlin et al., BERT, 2018, 3.1 and A.1.
    """

    mask: int
    ordinary: NDArray[numpy.integer]
    most: int

    def hide(
        self, tokens: Numbers, may: NDArray[numpy.bool_], draw: Generator
    ) -> tuple[Numbers, Numbers, Numbers]:
        """A copy with some tokens hidden, the places chosen, and what stood there.

        Args:
            tokens: of one row.
            may: which of them can be chosen: no special token, no padding.
            draw: where chance comes from.
        Returns:
            tokens as long as they came; places and labels, `most` each.
        """
        free = numpy.flatnonzero(may)
        count = min(self.most, max(1, round(_SHARE * len(free))), len(free))
        chosen = numpy.sort(draw.choice(free, count, replace=False))
        kind = draw.random(count)
        random = draw.choice(self.ordinary, count)
        hidden = tokens.copy()
        hidden[chosen] = numpy.where(
            kind < _MASKED, self.mask, numpy.where(kind < _MASKED + _RANDOM, random, tokens[chosen])
        )
        places = numpy.zeros(self.most, dtype=numpy.int32)
        labels = numpy.full(self.most, IGNORED, dtype=numpy.int32)
        places[:count], labels[:count] = chosen, tokens[chosen]
        return hidden, places, labels
