"""Tensors and weights: copies of them, what two have in common, a state that was in a file."""

import contextlib
import io
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def values(model: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    params = model.parameters() if isinstance(model, nn.Module) else model
    return [p.detach().clone() for p in params]


def same(expected: nn.Module | Iterable[Tensor], actual: nn.Module | Iterable[Tensor]) -> bool:
    """To the bit."""
    both = [values(x) for x in (expected, actual)]
    return all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def difference(
    expected: nn.Module | Iterable[Tensor], actual: nn.Module | Iterable[Tensor]
) -> float:
    """Largest difference of any element over the largest element of its tensor; nan stays nan."""
    both = [[x.cpu().double() for x in values(either)] for either in (expected, actual)]
    assert [a.shape for a in both[0]] == [b.shape for b in both[1]]
    errors = [
        (b - a).abs().max() / a.abs().max().clamp_min(1e-300)
        for a, b in zip(*both, strict=True)
        if a.numel()
    ]
    return torch.stack(errors).max().item()


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
