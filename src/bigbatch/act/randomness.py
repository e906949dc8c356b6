"""The random generators that a training draws from, saved as tensors."""

import ctypes
import random
from typing import Any

import numpy
import torch

RandomState = dict[str, Any]

_WORDS = 624 * 4 + 4  # bytes of MT19937's state: its words and the position in them


def random_state() -> RandomState:
    """The states of Python's, NumPy's and torch's generators, safe for `weights_only=True`."""
    return restorable(RandomReader().read())


class RandomReader:
    """Reads the same again and again, as the generators give them, in a few microseconds.

    NumPy takes 30 to say its state, so it is asked only when that has changed. A change shows in
    its memory, but for a second normal number that was kept and is now drawn: a state that holds
    one is not trusted.
    """

    def __init__(self) -> None:
        self._memory = b""  # NumPy's state as it was read last
        self._numpy: Any = None  # the same in words

    def read(self) -> RandomState:
        """The states as they are now."""
        return {
            "python": random.getstate(),
            "numpy": self._numpy_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if _uses_cuda() else [],
        }

    def _numpy_state(self) -> Any:
        generator = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
        memory = b""
        if type(generator) is numpy.random.MT19937:
            memory = ctypes.string_at(generator.ctypes.state_address, _WORDS)
        if not memory or memory != self._memory or self._numpy[3]:
            self._numpy = numpy.random.get_state(legacy=True)  # noqa: NPY002
            self._memory = memory
        return self._numpy


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
