"""The sample axis of a batch: counting, cutting and gluing, for any nesting of tensors.

A batch is a tensor, an array, or tuples, lists, mappings and dataclasses of batches. Its leaves
share their first size, the number of samples. A list or tuple of plain values (strings, numbers) is
a leaf with one value a sample.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import accumulate
from typing import Any

import numpy
import torch

from bigbatch.errors import BatchError

Batch = Any

_PLAIN = (str, bytes, int, float, bool, type(None))
REMEDY = (
    "wrap the loader: Batches(loader, split=lambda batch, lo, hi: ..., count=lambda batch: ...)"
)


def count_samples(batch: Batch) -> int:
    """Samples in `batch`.

    Raises:
        BatchError: its leaves differ in their first size, or it has none.
    Example:
        >>> count_samples({"x": torch.zeros(8, 3), "name": ["a"] * 8})
        8
    """
    sizes = {_size(leaf) for leaf in _leaves(batch)}
    if len(sizes) != 1:
        found = "no tensor" if not sizes else f"first sizes {sorted(sizes)}"
        raise BatchError(f"a batch with {found} cannot be cut along its samples; {REMEDY}")
    return sizes.pop()


def slice_samples(batch: Batch, lo: int, hi: int) -> Batch:
    """Samples lo to hi of `batch`: views of its tensors.

    Example:
        >>> slice_samples((torch.arange(4), ["a", "b", "c", "d"]), 1, 3)
        (tensor([1, 2]), ['b', 'c'])
    """
    return _map(lambda leaves: leaves[0][lo:hi], [batch])


def concatenate_samples(batches: Sequence[Batch]) -> Batch | None:
    """One batch with the samples of all, or None where they do not fit together.

    Example:
        >>> concatenate_samples([torch.tensor([1]), torch.tensor([2, 3])])
        tensor([1, 2, 3])
    """
    return batches[0] if len(batches) == 1 else _copied(batches)


def interleave_samples(
    batches: Sequence[Batch], counts: Sequence[int], turns: int
) -> list[Batch] | None:
    """The samples of all batches, assigned in turn to new batches; None where they do not match.

    Fewer batches where there are fewer samples.

    Args:
        batches: as they follow each other.
        counts: samples in each.
        turns: number of new batches.
    Example:
        >>> interleave_samples([torch.tensor([0, 1, 2]), torch.tensor([3, 4])], [3, 2], 2)
        [tensor([0, 2, 4]), tensor([1, 3])]
    """
    starts = list(accumulate(counts, initial=0))
    parts = list(zip(batches, counts, starts, strict=False))
    interleaved = []
    for turn in range(min(turns, starts[-1])):
        firsts = [(batch, (turn - start) % turns, count) for batch, count, start in parts]
        own = [_strided(batch, first, turns) for batch, first, count in firsts if first < count]
        interleaved.append(_copied(own))
    return None if any(batch is None for batch in interleaved) else interleaved


def _strided(batch: Batch, first: int, step: int) -> Batch:
    return _map(lambda leaves: leaves[0][first::step], [batch])


def _copied(batches: Sequence[Batch]) -> Batch | None:
    try:
        return _map(_concatenate, list(batches))
    except _NotAlikeError:
        return None


class _NotAlikeError(Exception):
    """Two batches differ in structure, shape or type."""


def _is_leaf(batch: Batch) -> bool:
    if isinstance(batch, (torch.Tensor, numpy.ndarray)):
        return True
    if not isinstance(batch, (list, tuple)) or not batch or hasattr(batch, "_fields"):
        return False
    return isinstance(batch[0], _PLAIN) and all(isinstance(value, _PLAIN) for value in batch)


def _size(leaf: Any) -> int:
    if isinstance(leaf, (list, tuple)):
        return len(leaf)
    if not leaf.shape:
        raise BatchError(
            f"a batch holds a tensor of no dimension, with no samples to cut; {REMEDY}"
        )
    return int(leaf.shape[0])


def _leaves(batch: Batch) -> list[Any]:
    """All leaves, in one order for batches of one structure."""
    found, left = [], [batch]
    while left:
        part = left.pop()
        if _is_leaf(part):
            found.append(part)
        else:
            left += _opened(part)[0]
    return found


def _map(function: Callable[[list[Any]], Any], batches: list[Batch]) -> Batch:
    """Applies `function` to the leaves that stand at the same place in every batch."""
    first = batches[0]
    if any(type(batch) is not type(first) for batch in batches):
        raise _NotAlikeError
    if _is_leaf(first):
        return function(batches)
    parts, closed = _opened(first)
    others = [_opened(batch)[0] for batch in batches[1:]]
    alike = not isinstance(first, Mapping) or all(list(batch) == list(first) for batch in batches)
    if not alike or any(len(other) != len(parts) for other in others):
        raise _NotAlikeError
    return closed([_map(function, list(group)) for group in zip(parts, *others, strict=True)])


def _opened(batch: Batch) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """What a batch that is no leaf consists of, and how to put such parts together again."""
    if isinstance(batch, Mapping):
        values = list(batch.values())
        return values, lambda parts: _like(batch, dict(zip(batch, parts, strict=True)))
    if isinstance(batch, (tuple, list)):
        kind: Any = type(batch)
        return list(batch), kind._make if hasattr(batch, "_fields") else kind
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        values = [getattr(batch, name) for name in names]
        return values, lambda parts: dataclasses.replace(
            batch, **dict(zip(names, parts, strict=True))
        )
    raise BatchError(f"a batch holds a {type(batch).__name__}, which cannot be cut; {REMEDY}")


def _like(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """`values` in a mapping of the same kind, with what else that kind carries."""
    if not isinstance(mapping, MutableMapping):
        return type(mapping)(values)  # type: ignore[call-arg]
    copied = copy.copy(mapping)
    copied.update(values)
    return copied


def _concatenate(leaves: list[Any]) -> Any:
    first = leaves[0]
    if isinstance(first, (list, tuple)):
        return type(first)(value for leaf in leaves for value in leaf)
    if any(leaf.shape[1:] != first.shape[1:] or leaf.dtype != first.dtype for leaf in leaves):
        raise _NotAlikeError
    if isinstance(first, torch.Tensor):
        return _pinned(leaves) if all(leaf.is_pinned() for leaf in leaves) else torch.cat(leaves)
    return numpy.concatenate(leaves)


def _pinned(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Glued into pinned memory again, so that copies to the GPU stay asynchronous."""
    shape = (sum(len(leaf) for leaf in leaves), *leaves[0].shape[1:])
    return torch.cat(leaves, out=torch.empty(shape, dtype=leaves[0].dtype, pin_memory=True))
