"""Which samples of a data set are trained on."""

from array import array
from collections.abc import Sequence

import numpy
import torch


def drawn(there: int, wanted: int) -> Sequence[int]:
    """Indices of the samples that are used: all, or so many drawn once for all seeds.

    Fewer are always among more. An index takes 4 bytes, 8 from 2^32 samples on; while they are
    drawn, each sample that is there takes 8 too.

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
    code, size = ("I", numpy.uint32) if there < 2**32 else ("Q", numpy.uint64)
    return array(code, order.numpy().astype(size).tobytes())  # as a list, an index takes 40 bytes


def some_drawn(there: int, wanted: int, most: int) -> Sequence[int]:
    """At most so many of `drawn(there, wanted)`, from anywhere: files are often in order of class.

    Example:
        >>> set(some_drawn(90, 50, 20)) <= set(drawn(90, 50)), len(some_drawn(90, 0, 20))
        (True, 20)
    """
    return drawn(there, min(wanted or there, most))
