"""Whether a loader writes its batches into the same memory, and which leaves are no samples."""

import math
import warnings
from itertools import product
from typing import Any, NamedTuple

import numpy
import torch

from bigbatch.data.collate import REMEDY, Batch, containers_of, copy_batch, is_dense, map_leaves

_NO_CHANCE = 64  # elements that are not equal in two batches by chance
_WATCHED = 64  # batches that are copied and compared: more than a loader has buffers


class BatchMemory:
    """Watches the memory of a loader's first 64 batches, of which copies are given out.

    If one of them lies in the memory of an earlier one of the pass, or is the same container, the
    loader reuses it, and every batch is copied from then on. A leaf that is the same memory with
    the same content in two batches, while others differ, is a constant: a tensor of class
    embeddings, as long as the batch by chance. Where all of its rows are equal (a mask of ones), it
    makes no difference.
    """

    def __init__(self) -> None:
        self.constants: set[str] = set()  # names of leaves that are not cut
        self.examined = False  # whether they are known, after two batches
        self.reuses = False  # whether earlier batches may be overwritten
        self._seen = 0
        self._watched: list[_Watched] = []  # the pass's first batch and its latest three

    def begin_pass(self) -> None:
        """Forgets the batches of the last pass: a list gives the same tensors in every one."""
        self._watched.clear()

    def admit(self, batch: Batch) -> Batch:
        """The batch, or a copy of it that the loader cannot change."""
        if self._seen == _WATCHED:
            return copy_batch(batch) if self.reuses else batch
        self._seen += 1
        given = copy_batch(batch)
        present = _Watched(_named_leaves(batch), _named_leaves(given), [*containers_of(batch)])
        if self._watched and not self.examined:
            self._find_constants(self._watched[-1], present)
        self.reuses = any(present.overlaps(other, self.constants) for other in self._watched)
        if self.reuses:
            self._seen = _WATCHED
        kept = [*self._watched[:1], *self._watched[1:][-2:], present]
        self._watched = [] if self._seen == _WATCHED else kept
        return given

    def _find_constants(self, previous: "_Watched", present: "_Watched") -> None:
        self.examined = True
        leaves, same, equal = present.leaves, set[str](), set[str]()
        both = leaves.keys() & previous.leaves.keys()
        for name in both & present.given.keys() & previous.given.keys():
            if _is_equal(previous.given[name], present.given[name]):
                is_same = _is_same_memory(previous.leaves[name], leaves[name])
                (same if is_same else equal).add(name)
        if len(same | equal) == len(leaves):  # one batch, given again
            return
        differing = {name for name in same | equal if not _has_equal_rows(leaves[name])}
        self.constants = same & differing
        for name in differing:
            shape = tuple(getattr(leaves[name], "shape", ()))
            found = f"a part of the batch, of shape {shape}, is"
            if name in equal and math.prod(shape) >= _NO_CHANCE:
                warnings.warn(
                    f"{found} equal in the loader's first two batches; it is cut like the others. "
                    "If its first axis is no samples (a table of classes), keep it out of the "
                    f"batch, or {REMEDY}",
                    stacklevel=9,
                )
            elif name in same and _may_be_labels(leaves[name]):
                warnings.warn(
                    f"{found} the same tensor in the loader's first two batches; it is not cut. If "
                    "it has a label for each sample, give a copy of it in each batch, y.clone()",
                    stacklevel=9,
                )


class _Watched(NamedTuple):
    """The leaves of a batch of the loader by their names, those of its copy, and its containers."""

    leaves: dict[str, Any]
    given: dict[str, Any]
    containers: list[Any]

    def overlaps(self, other: "_Watched", constants: set[str]) -> bool:
        """Whether writing to this batch may have changed the other one, apart from constants."""
        variable = [leaf for name, leaf in self.leaves.items() if name not in constants]
        return any(_overlap(*pair) for pair in product(variable, other.leaves.values())) or any(
            one is another and not isinstance(one, tuple)
            for one, another in product(self.containers, other.containers)
        )


def _named_leaves(batch: Batch) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    map_leaves(lambda leaf, name: leaves.setdefault(name, leaf), batch)
    return leaves


def _overlap(one: Any, other: Any) -> bool:
    """Whether writing to one leaf may change the other."""
    if isinstance(one, numpy.ndarray) and isinstance(other, numpy.ndarray):
        return numpy.may_share_memory(one, other)
    if is_dense(one) and is_dense(other):
        (start, stop), (other_start, other_stop) = _extent(one), _extent(other)
        return one.device == other.device and start < other_stop and other_start < stop
    return one is other and isinstance(one, list)


def _extent(leaf: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first byte, and after its last."""
    last = sum((n - 1) * step for n, step in zip(leaf.shape, leaf.stride(), strict=True))
    start = leaf.data_ptr()
    return start, start + (last + 1) * leaf.element_size() if leaf.numel() and start else start


def _is_same_memory(one: Any, other: Any) -> bool:
    if is_dense(one) and is_dense(other):
        places = ((t.data_ptr(), t.shape, t.stride()) for t in (one, other))
        return len(set(places)) == 1
    return one is other


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two leaves have the same content; nan is equal to nan."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if not (is_dense(one) and is_dense(other)):
            return False
        if len({(t.dtype, t.device, t.shape) for t in (one, other)}) > 1:
            return False
        if one.element_size() == 1:  # also of kinds that torch cannot compare
            one, other = one.view(torch.uint8), other.view(torch.uint8)
        if torch.equal(one, other):
            return True
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, numpy.ndarray) and isinstance(other, numpy.ndarray):
        return one.dtype == object or one.tobytes() == other.tobytes()
    return type(one) in (list, tuple) and type(one) is type(other) and one == other


def _has_equal_rows(leaf: Any) -> bool:
    return all(_is_equal(leaf[:1], leaf[n : n + 1]) for n in range(1, len(leaf)))


def _may_be_labels(leaf: Any) -> bool:
    """Whether it has one number for each row."""
    return hasattr(leaf, "shape") and math.prod(leaf.shape) == len(leaf)
