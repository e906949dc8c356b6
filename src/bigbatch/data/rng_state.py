"""The random generators that a training draws from, saved as tensors."""

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch

from bigbatch.errors import SettingError

RandomState = dict[str, Any]

_WORDS = 624 * 4  # bytes of MT19937's words
_SHOWN = 4 + 64  # those looked at: of its position in them, and of some


def random_state() -> RandomState:
    """The states of Python's, NumPy's and torch's generators, safe for `weights_only=True`."""
    return restorable(RandomReader().read())


class RandomReader:
    """Reads the same again and again, as the generators give them.

    Python and NumPy say their states word by word, which takes longer than all else, so they are
    asked only when something has changed in memory: every draw moves the position, or makes all
    words again.
    """

    def __init__(self) -> None:
        self._python = _Twister(
            random.getstate, _memory_of_python(), lambda said: said[2] is not None
        )
        self._numpy = _Twister(_numpy_state, _memory_of_numpy, lambda said: said[3] != 0)

    def read(self) -> RandomState:
        """The states as they are now."""
        return {
            "python": self._python.state(),
            "numpy": self._numpy.state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if _uses_cuda() else [],
        }


class _Twister:
    """A generator whose state is asked for again where its memory has changed.

    What memory does not show is a normal number that was kept for the next draw: a state that holds
    one is not trusted.

    Args:
        ask: for its state.
        memory: the generator's, empty where nobody can look.
        kept: whether a state holds a normal number.
    """

    def __init__(
        self, ask: Callable[[], Any], memory: Callable[[], bytes], kept: Callable[[Any], bool]
    ) -> None:
        self._ask, self._look, self._kept = ask, memory, kept
        self._state: Any = None
        self._memory = b""  # as it was with that state

    def state(self) -> Any:
        """As it is now."""
        memory = self._look()
        if not memory or memory != self._memory:
            self._state = self._ask()
            self._memory = b"" if self._kept(self._state) else memory
        return self._state


def _memory_of_python() -> Callable[[], bytes]:
    """CPython keeps position and words right behind the object's header; found so, or not used."""
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    header, size = object.__basicsize__, type(generator).__mro__[1].__basicsize__
    if sys.implementation.name == "cpython" and size >= header + _WORDS + 4:
        *words, position = generator.getstate()[1]
        address = id(generator) + header
        said = struct.pack("625I", position, *words)
        if ctypes.string_at(address, len(said)) == said:
            return partial(ctypes.string_at, address, _SHOWN)
    return bytes


def _memory_of_numpy() -> bytes:
    generator = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not numpy.random.MT19937:
        raise SettingError(
            f"NumPy's global generator is a {type(generator).__name__}, whose state is not saved; "
            "leave the usual MT19937 in place, and hold a numpy.random.Generator of your own"
        )
    end: int = generator.ctypes.state_address + _WORDS + 4  # words, then the position
    return ctypes.string_at(end - _SHOWN, _SHOWN)


def _numpy_state() -> Any:
    return numpy.random.get_state(legacy=True)  # noqa: NPY002


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
    for device, cuda in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(cuda.cpu(), device)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
