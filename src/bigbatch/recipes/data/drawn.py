"""Which samples of a data set are trained on."""

from array import array
from collections.abc import Sequence

import torch

_AT_ONCE = 65_536  # indices that are Python's numbers for a moment


def drawn(there: int, wanted: int) -> Sequence[int]:
    """Indices of the samples that are used: all, or so many drawn once for all seeds.

    Fewer are always among more. As a list, 400 million of them would take 16 GB in every process.

    Args:
        there: samples of the data set.
        wanted: `samples` of the settings; 0 for all.
    Example:
        >>> drawn(3, 0), sorted(drawn(3, 3)), set(drawn(9, 2)) <= set(drawn(9, 5))
        (range(0, 3), [0, 1, 2], True)
    """
    if not 0 < wanted < there:
        return range(there)
    order = torch.randperm(there, generator=torch.Generator().manual_seed(0))[:wanted]
    chosen = array("I" if there < 2**32 else "Q")
    for begin in range(0, wanted, _AT_ONCE):
        chosen.extend(order[begin : begin + _AT_ONCE].tolist())
    return chosen
