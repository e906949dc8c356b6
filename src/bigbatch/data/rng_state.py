"""The random generators that a training draws from, saved as tensors."""

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_leaves

from bigbatch.errors import SettingError

RandomState = dict[str, Any]

_WORDS = 624 * 4  # bytes of MT19937's words
_SAMPLED = 4 + 64  # bytes that are compared: the position in the words, and some words


def random_state() -> RandomState:
    """The states of Python's, NumPy's and torch's generators, safe for `weights_only=True`."""
    return restorable(RandomReader().read())


class RandomReader:
    """Reads the states of the generators again and again.

    Python and NumPy copy their states word by word, which takes longer than all else. So they are
    read only if their memory has changed: every draw moves the position, or makes all words again.
    """

    def __init__(self) -> None:
        read_numpy = partial(numpy.random.get_state, legacy=True)
        self._python = _CachedState(
            random.getstate, _python_memory(), lambda state: state[2] is not None
        )
        self._numpy = _CachedState(read_numpy, _NumpyMemory(), lambda state: state[3] != 0)

    def read(self) -> RandomState:
        """The present states."""
        initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return {
            "python": self._python.get(),
            "numpy": self._numpy.get(),
            "torch": torch.default_generator.get_state(),
            "cuda": torch.cuda.get_rng_state_all() if initialized else [],
        }


@dataclass
class _CachedState:
    """A generator's state, read again if its memory has changed.

    Memory does not show a normal number that is kept for the next draw, so a state that has one is
    not cached.
    """

    read: Callable[[], Any]
    memory: Callable[[], bytes]  # reads the generator's memory; empty if that is impossible
    has_normal: Callable[[Any], bool]  # whether a state has a normal number
    state: Any = None
    state_memory: bytes = b""  # the memory that belongs to the state

    def get(self) -> Any:
        """The present state."""
        memory = self.memory()
        if not memory or memory != self.state_memory:
            self.state = self.read()
            self.state_memory = b"" if self.has_normal(self.state) else memory
        return self.state


def _python_memory() -> Callable[[], bytes]:
    """Reads position and words behind the object's header, if CPython has them there."""
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    header, size = object.__basicsize__, type(generator).__mro__[1].__basicsize__
    if sys.implementation.name == "cpython" and size >= header + _WORDS + 4:
        *words, position = generator.getstate()[1]
        address = id(generator) + header
        expected = struct.pack("625I", position, *words)
        if ctypes.string_at(address, len(expected)) == expected:
            return _memory_reader(address)
    return bytes


class _NumpyMemory:
    """Reads the last words and the position of NumPy's global generator, whichever it is now."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._read: Callable[[], bytes] = bytes

    def __call__(self) -> bytes:
        generator = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
        if generator is not self._generator:
            if type(generator) is not numpy.random.MT19937:
                raise SettingError(
                    f"NumPy's global generator is a {type(generator).__name__}, whose state is not "
                    "saved; leave the usual MT19937 in place, and hold a numpy.random.Generator of "
                    "your own"
                )
            end: int = generator.ctypes.state_address + _WORDS + 4  # words, then the position
            self._generator, self._read = generator, _memory_reader(end - _SAMPLED)
        return self._read()


def _memory_reader(address: int) -> Callable[[], bytes]:
    """Reads the sampled bytes at an address; without a foreign call each time."""
    return memoryview((ctypes.c_char * _SAMPLED).from_address(address)).tobytes


def restorable(raw: RandomState) -> RandomState:
    """A state from `RandomReader` in types that a checkpoint may have."""
    version, words, gauss = raw["python"]
    _, keys, *rest = raw["numpy"]
    return {
        **raw,
        "python": (version, torch.tensor(words), gauss),
        "numpy": (torch.tensor(keys, dtype=torch.int64), *rest),
    }


def same_random_state(first: RandomState, second: RandomState) -> bool:
    """Whether two states from `random_state` are equal."""
    leaves = tree_leaves(first), tree_leaves(second)
    return len(leaves[0]) == len(leaves[1]) and all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(*leaves, strict=True)
    )


def restore_random_state(state: RandomState) -> None:
    """Restores the generators to a state from `random_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    keys, *rest = state["numpy"]
    numpy.random.set_state(("MT19937", keys.numpy().astype("uint32"), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    for device, cuda in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(cuda.cpu(), device)


def seed_torch(seed: int) -> None:
    """Seeds torch's generators of the CPU, and of CUDA if that is in use.

    `torch.manual_seed` would also leave a seed for devices that are used later.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
