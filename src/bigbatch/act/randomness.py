"""The random generators that a training draws from, saved as tensors."""

import random
from typing import Any

import numpy
import torch


def random_state() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, safe for `weights_only=True`."""
    version, words, gauss = random.getstate()
    _, keys, *rest = numpy.random.get_state(legacy=True)  # noqa: NPY002  # what users' code draws from
    return {
        "python": (version, torch.tensor(words), gauss),
        "numpy": (torch.tensor(keys, dtype=torch.int64), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if _uses_cuda() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
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
