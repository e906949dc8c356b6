"""Whether a loader writes its batches into the same memory, and which leaves are no samples."""

import math
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch

from bigbatch.data.collate import REMEDY, Batch, copy_leaf

_NO_CHANCE = 64  # elements that are not equal in two batches by chance
_FIRST = 4  # first batches of a training: more than the buffers that a loader takes in turn


class BatchMemory:
    """Watches the memory of a loader's first batches; they are held, and copies are given out.

    If one of them has changed when a later batch arrives, the loader reuses its buffers, and every
    batch is copied from then on. A leaf that is the same memory with the same content in two
    batches, while others differ, is a constant: a tensor of class embeddings, as long as the batch
    by chance. Where all of its rows are equal (a mask of ones), it makes no difference.

    Args:
        map_leaves: (function, batch) -> the batch with every leaf replaced by function(leaf).
    """

    def __init__(self, map_leaves: Callable[[Callable[[Any], Any], Batch], Batch]) -> None:
        self._map = map_leaves
        # leaves that are not cut: each the number of a leaf, and how many its batch has
        self.constants: set[tuple[int, int]] = set()
        self.examined = False  # whether they are known, after two batches
        self._reuses = False
        self._seen = 0
        self._watched: deque[_Watched] = deque()

    def admit(self, batch: Batch) -> Batch:
        """The batch, or a copy of it that the loader cannot change."""
        if self._seen > _FIRST:
            return self._map(copy_leaf, batch) if self._reuses else batch
        self._seen += 1
        present = _Watched([], [])
        copied = self._map(present.copy, batch)
        changed = [one.changed_leaves() for one in self._watched]
        self._reuses = self._reuses or any(changed)
        if self._watched and not self.examined:
            self._find_constants(self._watched[-1], present, changed[-1])
        self._watched.append(present)
        if self._seen > _FIRST:
            self._watched.clear()
        return copied

    def _find_constants(self, previous: "_Watched", present: "_Watched", changed: set[int]) -> None:
        self.examined = True
        if len(previous.leaves) != len(present.leaves):
            return
        same, equal = set(), set()
        for number, (one, other) in enumerate(zip(previous.leaves, present.leaves, strict=True)):
            if _is_same_memory(one, other) and number not in changed:
                same.add(number)
            elif _is_equal(previous.copies[number], present.copies[number]):
                equal.add(number)
        if len(same | equal) == len(present.leaves):  # one batch, given again
            return
        leaves = present.leaves
        differing = {number for number in same | equal if not _has_equal_rows(leaves[number])}
        self.constants = {(number, len(leaves)) for number in same & differing}
        for number in equal & differing:
            shape = getattr(leaves[number], "shape", ())
            if math.prod(shape) >= _NO_CHANCE:
                warnings.warn(
                    f"a part of the batch, of shape {tuple(shape)}, is equal in the loader's first "
                    "two batches; it is cut like the others. If its first axis is no samples (a "
                    f"table of classes), keep it out of the batch, or {REMEDY}",
                    stacklevel=9,
                )


class _Watched(NamedTuple):
    """The leaves of a batch of the loader, and their copies."""

    leaves: list[Any]
    copies: list[Any]

    def copy(self, leaf: Any) -> Any:
        """Adds a leaf; its copy."""
        self.leaves.append(leaf)
        self.copies.append(copy_leaf(leaf))
        return self.copies[-1]

    def changed_leaves(self) -> set[int]:
        """Numbers of the leaves that were written to since they were copied."""
        pairs = enumerate(zip(self.leaves, self.copies, strict=True))
        return {number for number, (leaf, copy) in pairs if not _is_equal(leaf, copy)}


def _is_same_memory(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        places = ((t.data_ptr(), t.shape, t.stride()) for t in (one, other))
        return len(set(places)) == 1
    return one is other


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two leaves have the same content; nan is equal to nan."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.element_size() == 1:  # also of kinds that torch cannot compare
            one, other = one.view(torch.uint8), other.view(torch.uint8)
        if one.shape != other.shape or torch.equal(one, other):
            return bool(one.shape == other.shape)
        is_same = (one == other) | (one.isnan() & other.isnan())
        return bool(is_same.all())
    if isinstance(one, numpy.ndarray) and isinstance(other, numpy.ndarray):
        return one.dtype == object or one.tobytes() == other.tobytes()
    return bool(one == other)


def _has_equal_rows(leaf: Any) -> bool:
    return all(_is_equal(leaf[:1], leaf[n : n + 1]) for n in range(1, len(leaf)))
