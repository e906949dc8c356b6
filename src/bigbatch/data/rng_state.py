"""The random generators that a training draws from, saved as tensors."""

import ctypes
import random
import struct
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_leaves

from bigbatch.data.accelerator import Accelerator
from bigbatch.errors import SettingError

RandomState = dict[str, Any]

_WORDS = 624 * 4  # bytes of MT19937's words
_SAMPLED = 4 + 64  # bytes that are compared: the position in the words, and some words


def random_state() -> RandomState:
    """The states of Python's, NumPy's and torch's generators, safe for `weights_only=True`."""
    return restorable(RandomReader().read())


class RandomReader:
    """Reads the states of the generators again and again.

    Python and NumPy copy their states word by word, which takes longer than all else. So each is
    read only if its memory has changed: every draw moves the position in the words, or makes all
    words again.
    """

    def __init__(self) -> None:
        # of each: the generator of the last read; its position and some of its words, as they are
        # now; its last state, and the memory that belongs to it
        self._python: Any = None
        self._python_memory, self._python_seen = memoryview(b""), (b"", None)
        self._python_state: Any = None
        self._numpy: Any = None
        self._numpy_memory, self._numpy_seen = memoryview(b""), b""
        self._numpy_state: Any = None
        accelerator = Accelerator()
        self._accelerator = accelerator if accelerator.kind else None

    def read(self) -> RandomState:
        """The present states."""
        return {
            "python": self._read_python(),
            "numpy": self._read_numpy(),
            "torch": torch.default_generator.get_state(),
            **({} if self._accelerator is None else self._accelerator.random_states()),
        }

    def _read_python(self) -> Any:
        generator: Any = getattr(random.getstate, "__self__", None)  # not of a wrapper
        if not isinstance(generator, random.Random):
            return random.getstate()
        if generator is not self._python:
            self._python, self._python_memory = generator, _memory_of_python(generator)
        # a normal number that is kept for the next draw is no part of the memory
        seen = self._python_memory.tobytes(), generator.gauss_next
        if seen != self._python_seen or not seen[0]:
            self._python_state, self._python_seen = random.getstate(), seen
        return self._python_state

    def _read_numpy(self) -> Any:
        generator = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
        if generator is not self._numpy:
            if type(generator) is not numpy.random.MT19937:
                raise SettingError(
                    f"NumPy's global generator is a {type(generator).__name__}, whose state is not "
                    "saved; leave the usual MT19937 in place, and hold a numpy.random.Generator of "
                    "your own"
                )
            end: int = generator.ctypes.state_address + _WORDS + 4  # words, then the position
            self._numpy, self._numpy_memory = generator, _memory_at(end - _SAMPLED)
            self._numpy_seen = b""
        seen = self._numpy_memory.tobytes()
        if seen != self._numpy_seen:
            self._numpy_state = numpy.random.get_state(legacy=True)  # noqa: NPY002
            # memory does not show a normal number that is kept for the next draw
            self._numpy_seen = b"" if self._numpy_state[3] else seen
        return self._numpy_state


def _memory_at(address: int) -> memoryview:
    return memoryview((ctypes.c_char * _SAMPLED).from_address(address))


def _memory_of_python(generator: random.Random) -> memoryview:
    """The position and the first words of a generator; empty where they are not found."""
    if type(generator).__basicsize__ < object.__basicsize__ + 4 + _WORDS:
        return memoryview(b"")
    memory = _memory_at(id(generator) + object.__basicsize__)  # the position, then words
    words: Any = generator.getstate()[1]
    first = struct.pack(f"{_SAMPLED // 4}I", words[-1], *words[: _SAMPLED // 4 - 1])
    return memory if memory.tobytes() == first else memoryview(b"")


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
    numpy.random.set_state(("MT19937", keys.cpu().numpy().astype("uint32"), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    Accelerator().restore_random_states(state)


def seed_torch(seed: int) -> None:
    """Seeds torch's generators of the CPU, and of an accelerator if that is in use.

    `torch.manual_seed` would also leave a seed for devices that are used later.
    """
    torch.default_generator.manual_seed(seed)
    Accelerator().seed(seed)
