"""Packed sequences: several in one row of tokens, cut and joined at their boundaries.

A packed batch is a mapping of tensors (1, T, ...) with the tokens of S sequences one after the
other, as padding-free training has them. Where each begins is said by its `cu_seq_lens_q`,
`cu_seq_lens_k` or `cu_seqlens` (S + 1), or else by `position_ids` (1, T), which start again.
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor

from bigbatch.errors import BatchError

_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
_LONGEST = ("max_length_q", "max_length_k", "max_seqlen")
_NUMBERS = "seq_idx"  # the number of each token's sequence


class Sequence(NamedTuple):
    """One sequence of a packed batch."""

    tensors: dict[str, Tensor]  # (1, t, ...), views of the batch's
    length: int  # t, in tokens
    batch: Mapping[str, Any]  # it was cut from, for the values that belong to all of its tokens


class Packed(list[Sequence]):
    """The sequences of packed batches; the axis along which batches are cut has one for each."""

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        return Packed(super().__getitem__(place)) if isinstance(place, slice) else self.at(place)

    def at(self, place: SupportsIndex) -> Sequence:
        """One sequence."""
        return super().__getitem__(place)

    def copy(self) -> "Packed":
        """The same sequences in another list."""
        return Packed(self)


def unpack(batch: Any) -> Packed:
    """The sequences of a packed batch.

    Raises:
        BatchError: it is no mapping of one row of tokens, or does not say where sequences begin.
    Example:
        >>> batch = {"input_ids": torch.tensor([[5, 6, 7]]), "cu_seqlens": torch.tensor([0, 2, 3])}
        >>> [sequence.tensors["input_ids"].tolist() for sequence in unpack(batch)]
        [[[5, 6]], [[7]]]
    """
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"packed=True and a batch that is a {type(batch).__name__}: a packed batch is a "
            "mapping with input_ids (1, tokens) and cu_seq_lens_q or position_ids"
        )
    starts = _starts(batch)
    tokens = starts[-1]
    rows: dict[str, Tensor] = {}
    for name, value in batch.items():
        if name in _BOUNDARIES or name in _LONGEST or value is None:
            continue
        if not isinstance(value, Tensor) or tuple(value.shape[:2]) != (1, tokens):
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise BatchError(
                f"packed=True: {name} is {shape}, and the {len(starts) - 1} sequences have "
                f"{tokens} tokens; every tensor of a packed batch is (1, tokens, ...)"
            )
        rows[name] = value
    return Packed(
        Sequence({name: row[:, lo:hi] for name, row in rows.items()}, hi - lo, batch)
        for lo, hi in pairwise(starts)
    )


def pack(sequences: Iterable[Sequence]) -> dict[str, Any]:
    """One packed batch of these sequences, with boundaries and longest length of its own.

    Example:
        >>> batch = {"input_ids": torch.tensor([[5, 6, 7]]), "cu_seqlens": torch.tensor([0, 2, 3])}
        >>> pack([*unpack(batch), *unpack(batch)])["cu_seqlens"]
        tensor([0, 2, 3, 5, 6])
    """
    sequences = list(sequences)
    lengths = [sequence.length for sequence in sequences]
    packed: dict[str, Any] = {}
    for name, value in sequences[0].batch.items():
        if value is None:
            packed[name] = None
        elif name in _BOUNDARIES:
            ends = [*accumulate(lengths, initial=0)]
            packed[name] = torch.tensor(ends, dtype=value.dtype, device=value.device)
        elif name in _LONGEST:
            longest = max(lengths)
            packed[name] = torch.full_like(value, longest) if isinstance(value, Tensor) else longest
        elif name == _NUMBERS:
            numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
            packed[name] = torch.tensor([numbers], dtype=value.dtype).to(value.device)
        else:
            rows = [sequence.tensors[name] for sequence in sequences]
            packed[name] = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
    return packed


def is_packed(batch: Mapping[str, Any]) -> bool:
    """Whether a batch is one row of several sequences that says where they begin.

    Positions start again in a padded sample too, whose `attention_mask` says which are padding.
    """
    if any(batch.get(name) is not None for name in _BOUNDARIES):
        return True
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and not mask.all():
        return False
    positions = batch.get("position_ids")
    return isinstance(positions, Tensor) and _is_row(positions) and len(_restarts(positions)) > 1


def _starts(batch: Mapping[str, Any]) -> list[int]:
    """Where each sequence begins, and the number of tokens."""
    found = {name: batch.get(name) for name in _BOUNDARIES}
    stated = {name: ends.flatten().tolist() for name, ends in found.items() if ends is not None}
    starts: list[int]
    if stated:
        starts, *others = stated.values()
        rises = all(lo < hi for lo, hi in pairwise(starts))
        if any(other != starts for other in others) or starts[:1] != [0] or not rises:
            raise BatchError(
                f"{' and '.join(stated)} must be the same, begin with 0 and rise, one number more "
                "than sequences; a batch with padding after its last sequence is not packed"
            )
        return starts
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or not _is_row(positions):
        raise BatchError(
            "packed=True and a batch that does not say where its sequences begin: it needs "
            "cu_seq_lens_q, cu_seqlens, or position_ids (1, tokens) that start again"
        )
    return [*_restarts(positions), positions.shape[1]]


def _is_row(positions: Tensor) -> bool:
    return positions.dim() == 2 and len(positions) == 1


def _restarts(positions: Tensor) -> list[int]:
    """Where a position in (1, T) is not the one before it plus one."""
    row = positions[0]
    breaks = (row[1:] != row[:-1] + 1).nonzero().flatten() + 1
    return [0, *breaks.tolist()]
