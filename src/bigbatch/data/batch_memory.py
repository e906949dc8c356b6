"""Whether a loader writes its batches into the same memory, and which leaves are no samples."""

import math
import warnings
from typing import Any, NamedTuple

import numpy
import torch

from bigbatch.data.collate import REMEDY, Batch, copy_batch, is_dense, map_leaves

_NO_CHANCE = 64  # elements that are not equal in two batches by chance
_COPIED = 5  # first batches of a training that are copied in any case
_WATCHED = 64  # batches whose memory is compared: more than a loader has buffers


class BatchMemory:
    """Watches the memory of a loader's first batches, which are held; of the first, copies are cut.

    If a later batch of the pass lies in their memory, the loader reuses its buffers, and every
    batch is copied from then on. A leaf that is the same memory with the same content in two
    batches, while others differ, is a constant: a tensor of class embeddings, as long as the batch
    by chance. Where all of its rows are equal (a mask of ones), it makes no difference.
    """

    def __init__(self) -> None:
        self.constants: set[str] = set()  # names of leaves that are not cut
        self.examined = False  # whether they are known, after two batches
        self.reuses = False  # whether earlier batches may be overwritten
        self._seen = 0
        self._watched: list[_Watched] = []  # the pass's first batch and its latest ones

    def begin_pass(self) -> None:
        """Forgets the batches of the last pass: a list gives the same tensors in every one."""
        self._watched.clear()

    def admit(self, batch: Batch) -> Batch:
        """The batch, or a copy of it that the loader cannot change."""
        if self._seen == _WATCHED:
            return copy_batch(batch) if self.reuses else batch
        self._seen += 1
        given, is_new = batch, self._seen <= _COPIED or not self.examined
        if self.reuses or is_new:
            given = copy_batch(batch)
        present = _Watched(_named_leaves(batch), _named_leaves(given) if is_new else {})
        if self._watched and not self.examined:
            self._find_constants(self._watched[-1], present)
        variable = [leaf for name, leaf in present.leaves.items() if name not in self.constants]
        watched = [leaf for one in self._watched for leaf in one.leaves.values()]
        if not self.reuses and any(_overlap(one, other) for one in variable for other in watched):
            self.reuses, self._seen = True, _WATCHED
            self._watched.clear()
            return copy_batch(batch)
        if self._seen > _COPIED:
            del self._watched[1:]
        self._watched.append(present)
        if self._seen == _WATCHED:
            self._watched.clear()
        return given

    def _find_constants(self, previous: "_Watched", present: "_Watched") -> None:
        self.examined = True
        leaves, same, equal = present.leaves, set[str](), set[str]()
        for name in leaves.keys() & previous.leaves.keys():
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
    """The leaves of a batch of the loader by their names, and those of its copy."""

    leaves: dict[str, Any]
    given: dict[str, Any]


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
        kinds = {(is_dense(t), t.dtype, t.device, t.shape) for t in (one, other)}
        if len(kinds) > 1 or not is_dense(one):
            return False
        if one.element_size() == 1:  # also of kinds that torch cannot compare
            one, other = one.view(torch.uint8), other.view(torch.uint8)
        if torch.equal(one, other):
            return True
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, numpy.ndarray) and isinstance(other, numpy.ndarray):
        return one.dtype == object or one.tobytes() == other.tobytes()
    return bool(one == other)


def _has_equal_rows(leaf: Any) -> bool:
    return all(_is_equal(leaf[:1], leaf[n : n + 1]) for n in range(1, len(leaf)))


def _may_be_labels(leaf: Any) -> bool:
    is_column = isinstance(leaf, torch.Tensor) and leaf.dim() == 1
    return is_column and not leaf.is_floating_point()
