"""The sample axis of a batch: counts, slices and concatenates, for any nesting of tensors.

A batch is a tensor, an array, or tuples, lists, mappings and dataclasses of batches. Its leaves
share their first size, the number of samples. A list or tuple of plain values (strings, numbers) is
a leaf with one value a sample.
"""

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy
import torch

from bigbatch.data.packed_sequences import Packed, is_packed
from bigbatch.errors import BatchError

Batch = Any

_PLAIN = (str, bytes, int, float, bool, type(None))
REMEDY = (
    "wrap the loader: Batches(loader, split=lambda batch, lo, hi: ..., count=lambda batch: ...)"
)
_IS_PACKED = (
    "a batch is one row of several packed sequences, which are the samples; wrap the loader: "
    "Batches(loader, packed=True)"
)


def count_samples(batch: Batch) -> int:
    """Samples in `batch`.

    Raises:
        BatchError: its leaves differ in their first size, or it has none; or it has packed
            sequences.
    Example:
        >>> count_samples({"x": torch.zeros(8, 3), "name": ["a"] * 8})
        8
    """
    if isinstance(batch, Mapping) and is_packed(batch):
        raise BatchError(_IS_PACKED)
    is_plain = type(batch) in (tuple, list) and set(map(type, batch)) == {torch.Tensor}
    leaves = batch if is_plain else _leaves(batch)  # plain as most loaders give them
    sizes = {_size(leaf) for leaf in leaves if type(leaf) is not Constant}
    if len(sizes) != 1:
        contents = "no tensor" if not sizes else f"first sizes {sorted(sizes)}"
        raise BatchError(f"a batch with {contents} cannot be cut along its samples; {REMEDY}")
    return sizes.pop()


def token_lengths(batch: Batch) -> list[int]:
    """Tokens of each sample: of packed sequences, by `attention_mask` (B, T), or T of (B, T, ...).

    Raises:
        BatchError: the batch has no tokens.
    Example:
        >>> token_lengths({"input_ids": torch.zeros(2, 3), "attention_mask": torch.eye(2, 3)})
        [1, 1]
    """
    if isinstance(batch, Packed):
        return [sequence.length for sequence in batch]
    named = batch if isinstance(batch, Mapping) else {}
    mask = named.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return [round(n) for n in mask.sum(1).tolist()]
    first = named["input_ids"] if "input_ids" in named else next(iter(_leaves(batch)), None)
    if not isinstance(first, torch.Tensor) or first.dim() < 2:
        raise BatchError(
            'unit="tokens" and a batch without tokens: its input_ids, or its first tensor, are to '
            "be (samples, tokens)"
        )
    return [first.shape[1]] * len(first)


def slice_samples(batch: Batch, lo: int, hi: int) -> Batch:
    """Samples lo to hi of `batch`: views of its tensors.

    Example:
        >>> slice_samples((torch.arange(4), ["a", "b", "c", "d"]), 1, 3)
        (tensor([1, 2]), ['b', 'c'])
    """
    return _index(batch, slice(lo, hi))


def concatenate_samples(batches: Sequence[Batch]) -> Batch | None:
    """One batch with the samples of all batches, or None if they do not fit together.

    Example:
        >>> concatenate_samples([torch.tensor([1]), torch.tensor([2, 3])])
        tensor([1, 2, 3])
    """
    return batches[0] if len(batches) == 1 else copy_samples(batches)


def copy_samples(batches: Sequence[Batch]) -> Batch | None:
    """`concatenate_samples` in memory of its own, also of a single batch."""
    try:
        return _map(_concatenate, list(batches))
    except _StructureMismatchError:
        return None


def interleave_samples(
    batches: Sequence[Batch], counts: Sequence[int], turns: int
) -> list[Batch] | None:
    """The samples of all batches, assigned in turn to new batches; None if they do not match.

    Fewer batches if there are fewer samples.

    Example:
        >>> interleave_samples([torch.tensor([0, 1, 2]), torch.tensor([3, 4])], [3, 2], 2)
        [tensor([0, 2, 4]), tensor([1, 3])]
    """
    starts = list(accumulate(counts, initial=0))
    interleaved = []
    for turn in range(min(turns, starts[-1])):
        offsets = [(turn - start) % turns for start in starts]
        strided = [
            _index(batch, slice(offset, None, turns))
            for batch, count, offset in zip(batches, counts, offsets, strict=False)
            if offset < count
        ]
        interleaved.append(copy_samples(strided))
    return None if any(batch is None for batch in interleaved) else interleaved


@dataclasses.dataclass(frozen=True)
class Constant:
    """A leaf that belongs to every sample of its batch, and is never cut."""

    value: Any


def mark_constants(batch: Batch, constants: Collection[str]) -> Batch:
    """The batch with the leaves of these names as `Constant`."""
    return map_leaves(lambda leaf, name: Constant(leaf) if name in constants else leaf, batch)


def unmark_constants(batch: Batch) -> Batch:
    """The batch as the loader gave it."""
    return map_leaves(lambda leaf, _: leaf.value if type(leaf) is Constant else leaf, batch)


def map_leaves(function: Callable[[Any, str], Any], batch: Batch, name: str = "") -> Batch:
    """The batch with every leaf, and what cannot be cut, replaced by `function(leaf, name)`.

    The name of a leaf is its keys and positions in the batch.
    """
    if (taken_apart := _try_flatten(batch)) is None:
        return function(batch, name)
    names, parts, unflatten = taken_apart
    pairs = zip(names, parts, strict=True)
    mapped = [map_leaves(function, part, f"{name}[{n!r}]") for n, part in pairs]
    try:
        return unflatten(mapped)
    except BatchError:
        return function(batch, name)


def containers_of(batch: Batch) -> Iterator[Any]:
    """The batch and the batches in it, without leaves."""
    if (taken_apart := _try_flatten(batch)) is not None:
        yield batch
        for part in taken_apart[1]:
            yield from containers_of(part)


def copy_batch(batch: Batch) -> Batch:
    """The batch in memory of its own, also one that only `split` can cut."""
    return map_leaves(lambda leaf, _: copy_leaf(leaf), batch)


def copy_leaf(leaf: Any) -> Any:
    """A copy in memory of its own, pinned if the leaf is; what has no plain memory stays."""
    if isinstance(leaf, (numpy.ndarray, list)):
        return leaf.copy()
    if not is_dense(leaf) or leaf.grad_fn is not None:  # computed: nothing writes to it
        return leaf
    copied = leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return copied.pin_memory() if leaf.is_pinned() else copied


def is_dense(leaf: Any) -> bool:
    """Whether it is a tensor with one place in memory for each of its elements."""
    if not isinstance(leaf, torch.Tensor) or leaf.is_quantized or leaf.is_nested or leaf.is_meta:
        return False
    is_plain = type(leaf).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return is_plain and leaf.layout == torch.strided


def _index(batch: Batch, samples: slice) -> Batch:
    return map_leaves(lambda leaf, _: _cut(leaf, samples), batch)


def _cut(leaf: Any, samples: slice) -> Any:
    if type(leaf) is Constant:
        return leaf
    if not _is_leaf(leaf):
        raise BatchError(f"a batch holds a {type(leaf).__name__}, which cannot be cut; {REMEDY}")
    try:
        return leaf[samples]
    except (NotImplementedError, RuntimeError) as error:  # sparse and nested tensors
        raise BatchError(f"a {type(leaf).__name__} cannot be cut ({error}); {REMEDY}") from None


class _StructureMismatchError(Exception):
    """Two batches differ in structure, shape or type."""


def _is_leaf(batch: Batch) -> bool:
    if isinstance(batch, (torch.Tensor, numpy.ndarray, Constant, Packed)):
        return True
    if not isinstance(batch, (list, tuple)) or not batch or hasattr(batch, "_fields"):
        return False
    return isinstance(batch[0], _PLAIN) and all(isinstance(value, _PLAIN) for value in batch)


def _size(leaf: Any) -> int:
    if isinstance(leaf, (list, tuple)):
        return len(leaf)
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return int(leaf.size(0))
    shape = leaf.shape
    if not shape:
        raise BatchError(
            f"a batch holds a tensor of no dimension, with no samples to cut; {REMEDY}"
        )
    return int(shape[0])


def _leaves(batch: Batch) -> list[Any]:
    """All leaves, in one order for batches of one structure."""
    if _is_leaf(batch):
        return [batch]
    return [leaf for part in _flatten(batch)[1] for leaf in _leaves(part)]


def _map(function: Callable[[list[Any]], Any], batches: list[Batch]) -> Batch:
    """Applies `function` to the leaves that stand at the same place in every batch."""
    first = batches[0]
    if any(type(batch) is not type(first) for batch in batches):
        raise _StructureMismatchError
    if _is_leaf(first):
        return function(batches)
    names, parts, unflatten = _flatten(first)
    others = [_flatten(batch) for batch in batches[1:]]
    if any(other != names for other, *_ in others):
        raise _StructureMismatchError
    columns = zip(parts, *(row for _, row, _ in others), strict=True)
    return unflatten([_map(function, list(column)) for column in columns])


def _try_flatten(batch: Batch) -> "_Parts | None":
    """The parts of a batch; None for a leaf, and for what cannot be cut."""
    try:
        return None if _is_leaf(batch) else _flatten(batch)
    except BatchError:
        return None


def _flatten(batch: Batch) -> "_Parts":
    """The parts of a batch that is no leaf."""
    if isinstance(batch, (tuple, list)):
        kind: Any = type(batch)
        make = kind._make if hasattr(batch, "_fields") else kind
        return _Parts(list(range(len(batch))), list(batch), partial(_made, batch, make))
    if isinstance(batch, Mapping):
        names, values = list(batch), list(batch.values())
        return _Parts(names, values, partial(_made, batch, partial(_with_items, batch, names)))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        computes = hasattr(batch, "__post_init__")  # the fields that are not given
        fields = dataclasses.fields(batch)
        names = [field.name for field in fields if field.init or not computes]
        make = partial(_replaced if computes else _with_attributes, batch, names)
        values = [getattr(batch, name) for name in names]
        return _Parts(names, values, partial(_made, batch, make))
    raise BatchError(f"a batch holds a {type(batch).__name__}, which cannot be cut; {REMEDY}")


class _Parts(NamedTuple):
    names: list[Any]
    values: list[Any]
    unflatten: Callable[[list[Any]], Any]  # makes a batch like it of other values


def _made(batch: Batch, make: Callable[[list[Any]], Any], values: list[Any]) -> Batch:
    try:
        return make(values)
    except Exception as error:
        raise BatchError(
            f"a batch holds a {type(batch).__name__}, which cannot be made of other values "
            f"({type(error).__name__}: {error}); {REMEDY}"
        ) from error


def _with_items(mapping: Any, names: list[Any], values: list[Any]) -> Mapping[Any, Any]:
    """A mapping of its class that has other values, and its attributes where it can be copied."""
    if not isinstance(mapping, dict) and not hasattr(mapping, "__copy__"):
        return type(mapping)(dict(zip(names, values, strict=True)))  # type: ignore[no-any-return]
    copied = copy.copy(mapping)
    for name, value in zip(names, values, strict=True):
        copied[name] = value
    return copied  # type: ignore[no-any-return]


def _replaced(batch: Any, names: list[str], values: list[Any]) -> Batch:
    return dataclasses.replace(batch, **dict(zip(names, values, strict=True)))


def _with_attributes(batch: Any, names: list[str], values: list[Any]) -> Batch:
    copied = copy.copy(batch)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(copied, name, value)  # also of a frozen one
    return copied


def _concatenate(leaves: list[Any]) -> Any:
    first = leaves[0]
    if isinstance(first, Constant):
        return first
    if isinstance(first, (list, tuple)):
        return type(first)(value for leaf in leaves for value in leaf)
    if any(leaf.shape[1:] != first.shape[1:] or leaf.dtype != first.dtype for leaf in leaves):
        raise _StructureMismatchError
    if isinstance(first, torch.Tensor):
        are_pinned = all(is_dense(leaf) and leaf.is_pinned() for leaf in leaves)
        return _cat_pinned(leaves) if are_pinned else torch.cat(leaves)
    return numpy.concatenate(leaves)


def _cat_pinned(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Concatenates into pinned memory, so that copies to the GPU stay asynchronous."""
    shape = (sum(len(leaf) for leaf in leaves), *leaves[0].shape[1:])
    return torch.cat(leaves, out=torch.empty(shape, dtype=leaves[0].dtype, pin_memory=True))
