"""What to say where a micro-batch found no memory, or other ranks did not come."""

import sys
from typing import Any

import torch
from torch import nn

from bigbatch.gradients import note_waiting

_SIGNS = ("out of memory", "DefaultCPUAllocator", "ALLOC_FAILED", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU, the CPU's allocator or Python had no memory to give."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def advise_size(
    error: BaseException, samples: int, rank: int = 0, ranks: int = 1, *, cut_here: bool = True
) -> None:
    """Notes on an out-of-memory error, once, how large the micro-batch was and what to do.

    Args:
        error: of which something is only said where memory was missing.
        samples: of the micro-batch.
        rank: of this process, where there are several.
        ranks: how many.
        cut_here: whether micro-batches are cut by us; else they are the loader's batches.
    """
    notes = getattr(error, "__notes__", ())
    if not is_out_of_memory(error) or any(note.startswith("bigbatch:") for note in notes):
        return
    this_rank, all_ranks = (
        (f" on rank {rank} of {ranks}", " on every rank") if ranks > 1 else ("", "")
    )
    advice = (
        f"bigbatch: this micro-batch{this_rank} had 1 sample; activation checkpointing needs less "
        "memory"
    )
    if samples > 1:
        remedy = (
            f"set micro_batch={samples // 2}{all_ranks}, or find it by "
            "bb.largest_micro_batch(model, optimizer, loader, loss_of)"
            if cut_here
            else f"give the loader batch_size={samples // 2}{all_ranks}"
        )
        advice = f"bigbatch: this micro-batch{this_rank} had {samples} samples; {remedy}"
    error.add_note(advice)


class OomHints:
    """A forward hook: what to do about the error that a model's forward is left by.

        advice = OomHints()
        handle = model.register_forward_hook(advice, always_call=True)

    `samples` is the present micro-batch's, 0 where there is none. It is to stay on: for hooks that
    come and go torch.compile compiles the functions that call the model again. In those, as long as
    they are compiled, torch calls no hook after an error.

    Args:
        rank, ranks: of this process, where there are several.
        cut_here: whether micro-batches are cut by us; else they are the loader's batches.
    """

    def __init__(self, rank: int = 0, ranks: int = 1, *, cut_here: bool = True) -> None:
        self.samples = 0
        self._rank, self._ranks, self._cut_here = rank, ranks, cut_here

    def __call__(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Called by torch with the output, or with None where there is none."""
        if output is None and self.samples:
            error = sys.exc_info()[1]
            if error is not None:
                self.advise(error)

    def advise(self, error: BaseException) -> None:
        """Notes on an error of the present micro-batch what to do, where that is known."""
        advise_size(error, self.samples, self._rank, self._ranks, cut_here=self._cut_here)
        note_waiting(error, self._rank, self._ranks)
