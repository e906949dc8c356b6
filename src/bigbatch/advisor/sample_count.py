"""Whether dimension 0 of a model's first tensor counts the samples."""

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from bigbatch.advisor.forward_watch import ModuleCall

_REMEDY = "state the samples of a backward and rank by --micro-batch (bb.advise: micro_batch=)"


@dataclass(frozen=True)
class SampleCount:
    """What speaks against the number of samples that was taken."""

    refusal: str = ""  # why it is not used; empty if it is
    doubt: str = ""  # what does not fit; empty if everything does


def check_sample_count(call: ModuleCall, model: nn.Module) -> SampleCount:
    """Compares the length of the first tensor with the other tensors, the layers and the loaders.

    A DataLoader of the program with batches of that length settles it. Otherwise tensors of
    different lengths, or a layer that takes its samples in dimension 1, refuse it.

    Args:
        call: the loop's call of the model.
        model: the model.
    """
    loaders = _batch_sizes()
    if call.samples in loaders:
        return SampleCount()
    lengths = [length for length in call.lengths if length != 1]
    if len(lengths) > 1:
        return SampleCount(
            f"the tensors of the model's call have {_join(lengths)} in dimension 0, so it is "
            f"unknown how many samples it has; {_REMEDY}"
        )
    layer = next((m for m in model.modules() if getattr(m, "batch_first", None) is False), None)
    if layer is not None:
        return SampleCount(
            f"{type(layer).__name__} has batch_first=False, so dimension 0 of the model's first "
            f"tensor, of length {call.samples}, may be positions and not samples; {_REMEDY}"
        )
    if not loaders:
        return SampleCount()
    return SampleCount(
        doubt=f"the model gets {call.samples} samples in a backward, and no DataLoader has such "
        f"batches, but of {_join(sorted(loaders))}; if they are not {call.samples} independent "
        f"samples (two views of each?), {_REMEDY}"
    )


def data_loaders() -> list[DataLoader[Any]]:
    """The program's loaders."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), DataLoader)]


def _batch_sizes() -> set[int]:
    """The batch sizes of the program's loaders."""
    loaders = data_loaders()
    samplers = [getattr(loader, "batch_sampler", None) for loader in loaders]
    sizes = [getattr(thing, "batch_size", None) for thing in (*loaders, *samplers)]
    return {size for size in sizes if isinstance(size, int)}


def _join(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
