"""The compiled kernels, as functions of tensors; what each computes is in kernels.c."""

import ctypes
import functools
import importlib.util
import warnings
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

_ELEMENTS_A_THREAD = 1 << 16  # fewer are not worth one
_SUMS, _SEEN = 2, 5  # as in kernels.c
_REAL = ctypes.c_double

Layer = tuple[Tensor, Tensor, Tensor, Tensor | None]  # of one length


class Rule(IntEnum):
    """What `run` does to every layer; its arrays and settings are listed in kernels.c."""

    GSNR = 0
    LARS = 1
    LAMB = 2


_WRITTEN = {Rule.GSNR: (2, 3), Rule.LARS: (0, 2), Rule.LAMB: (0, 2, 3)}  # arrays of a layer


class Which(IntEnum):
    """Which passes of a rule: the second needs the sums that the first leaves."""

    FIRST = 1
    SECOND = 2
    BOTH = 3


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None where no compiler built it at installation."""
    found = importlib.util.find_spec("bigbatch.kernels._kernels")
    if found is None or found.origin is None:
        return None
    try:
        loaded = ctypes.CDLL(found.origin)
    except OSError:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    loaded.welford.argtypes = [*[pointer] * 3, size, _REAL, _REAL, ctypes.c_int, ctypes.c_int]
    loaded.run.argtypes = [*[ctypes.c_int] * 2, *[pointer] * 2, size, *[pointer] * 4, ctypes.c_int]
    loaded.welford.restype = loaded.run.restype = None
    return loaded


def fits(first: Tensor, *others: Tensor | None) -> bool:
    """Whether kernels exist and take these arrays.

    They are float32 on the CPU, of one shape and one dense layout, and of no subclass: that may
    have no memory. A view may hold negated numbers.
    """
    if library() is None:
        if first.is_cpu and first.dtype is torch.float32:
            _warn_of_slow_steps()
        return False
    given, contiguous = [first], True
    for t in others:
        if t is not None and t is not first:
            if t.shape != first.shape:
                return False
            given.append(t)
    for t in given:  # without a call: over many small layers, looking is what costs
        plain = (type(t) is Tensor or type(t) is Parameter) and t.is_cpu and not t.is_neg()
        if not plain or t.dtype is not torch.float32:
            return False
        contiguous = contiguous and t.is_contiguous()
    if contiguous:
        return True
    strides = first.stride()
    channels_last = first.is_contiguous(memory_format=torch.channels_last)
    return channels_last and all(t.stride() == strides for t in given)


@functools.cache
def _warn_of_slow_steps() -> None:
    """Warns once a process, on rank 0."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(
            "the compiled kernels are not installed, so optimizer steps on the CPU are slower; "
            "install a C compiler, then install bigbatch again",
            stacklevel=3,
        )


def threads_for(elements: int) -> int:
    """As many as torch would use, where there is work for them."""
    return max(1, min(torch.get_num_threads(), elements // _ELEMENTS_A_THREAD))


def welford(
    gradient: Tensor, total: Tensor, m2: Tensor, mean_of: float, weight: float, *, adds: bool
) -> None:
    """m2 += weight (gradient - mean_of total)^2; if it adds, then total += gradient; all fit."""
    n = gradient.numel()
    called = library()
    assert called is not None
    called.welford(
        gradient.data_ptr(),
        total.data_ptr(),
        m2.data_ptr(),
        n,
        mean_of,
        weight,
        adds,
        threads_for(n),
    )
    if adds:
        increment_version(total)


def run(
    rule: Rule,
    layers: Sequence[Layer],
    own: Iterable[float],
    group: Iterable[float],
    *,
    passes: Which = Which.BOTH,
    sums: Tensor | None = None,
    watch: bool = False,
) -> tuple[Tensor, Tensor]:
    """Applies a rule to a list of layers; every array of a layer `fits`.

    Args:
        rule: which.
        layers: the arrays of each.
        own: two numbers a layer.
        group: settings of all of them.
        passes: which of the rule's passes.
        sums: of the first pass, one row of two a layer, where only the second is to run.
        watch: whether to report what GSNR scaling did.
    Returns:
        The sums of the first pass, (layers, 2), and of GSNR scaling the sum of r, the elements at
        gamma and at r_max, |g|^2 and |r g|^2, (layers, 5), zeros where not watched; float64.
    """
    called = library()
    assert called is not None
    count = len(layers)
    addresses = array("q", [0 if t is None else t.data_ptr() for layer in layers for t in layer])
    lengths = array("q", [layer[0].numel() for layer in layers])
    threads = threads_for(sum(lengths))
    made = torch.zeros(threads, count, _SUMS, dtype=torch.float64, device="cpu")
    if sums is not None:
        made[0] = sums
    seen = torch.zeros(threads if watch else 0, count, _SEEN, dtype=torch.float64, device="cpu")
    own_, group_ = array("d", own), array("d", group)
    called.run(
        rule,
        passes,
        _address(addresses),
        _address(lengths),
        count,
        _address(own_),
        _address(group_),
        made.data_ptr(),
        seen.data_ptr() if watch else None,
        threads,
    )
    written = [arrays[i] for arrays in layers for i in _WRITTEN[rule]]
    increment_version([t for t in written if t is not None])  # as torch's own operations would
    return made.sum(0), seen.sum(0)


def _address(numbers: "array[int] | array[float]") -> int:
    return numbers.buffer_info()[0]
