"""Remedies for a micro-batch that runs out of memory, or that other ranks do not join."""

import sys
from typing import Any

import torch
from torch import nn

from bigbatch.gradients import note_waiting

_SIGNS = ("out of memory", "DefaultCPUAllocator", "ALLOC_FAILED", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU, the CPU's allocator or Python had no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


class OomHints:
    """A forward hook that adds a remedy to an error that ends a model's forward.

    `samples` is the size of the present micro-batch, 0 if there is none. The hook has to stay on:
    torch.compile compiles functions that call the model again when hooks come and go. In compiled
    functions torch calls no hook after an error.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.samples, self._rank, self._ranks = 0, rank, ranks

    def __call__(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Called by torch with the output, or with None after an error."""
        if output is None and self.samples and (error := sys.exception()) is not None:
            self.advise(error)

    def advise(self, error: BaseException) -> None:
        """Adds a remedy to an error of the present micro-batch, once, if one is known."""
        notes = getattr(error, "__notes__", ())
        if is_out_of_memory(error) and not any(note.startswith("bigbatch:") for note in notes):
            half, several = self.samples // 2, self._ranks > 1
            on_rank = f" on rank {self._rank} of {self._ranks}" * several
            find = "bb.largest_micro_batch(model, optimizer, loader, loss_of)"
            remedy = (
                f"set micro_batch={half}{' on every rank' * several}, or find it by {find}; a "
                f"trainer's loader needs batch_size={half}"
            )
            had = f"{self.samples} sample{'s' * (self.samples > 1)}"
            remedy = remedy if half else "activation checkpointing needs less memory"
            error.add_note(f"bigbatch: this micro-batch{on_rank} had {had}; {remedy}")
        note_waiting(error, self._rank, self._ranks)
