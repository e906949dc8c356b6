"""The random generators that a training draws from, saved as tensors."""

import random
from typing import Any

import numpy
import torch

RandomState = dict[str, Any]


def random_state() -> RandomState:
    """The states of Python's, NumPy's and torch's generators, safe for `weights_only=True`."""
    return restorable(raw_random_state())


def raw_random_state() -> RandomState:
    """The same, as the generators give them: a few microseconds, for every fetch of a loader."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=True),  # noqa: NPY002  # what data sets draw from
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if _uses_cuda() else [],
    }


def restorable(raw: RandomState) -> RandomState:
    """A raw state in types that a checkpoint may hold."""
    version, words, gauss = raw["python"]
    _, keys, *rest = raw["numpy"]
    return {
        **raw,
        "python": (version, torch.tensor(words), gauss),
        "numpy": (torch.tensor(keys, dtype=torch.int64), *rest),
    }


def restore_random_state(state: RandomState) -> None:
    """Puts the generators back where `random_state` found them."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    keys, *rest = state["numpy"]
    numpy.random.set_state(("MT19937", keys.numpy().astype("uint32"), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([cuda.cpu() for cuda in state["cuda"]])


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
