"""The compiled kernels as functions of tensors; kernels.c defines what they compute."""

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

_ELEMENTS_PER_THREAD = 1 << 16  # at least
_SUMS, _STATS = 2, 5  # as in kernels.c
_REAL = ctypes.c_double

Layer = tuple[Tensor, Tensor, Tensor, Tensor | None]  # all of one length


class Rule(IntEnum):
    """The rule that `run` applies to every layer; kernels.c lists its arrays and values."""

    GSNR = 0
    LARS = 1
    LAMB = 2


_WRITTEN_ARRAYS = {Rule.GSNR: (2, 3), Rule.LARS: (0, 2), Rule.LAMB: (0, 2, 3)}


class Passes(IntEnum):
    """The passes of a rule to run; the second needs the sums of the first."""

    FIRST = 1
    SECOND = 2
    BOTH = 3


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None if no compiler built it, or another release's source."""
    spec = importlib.util.find_spec("bigbatch.kernels._kernels")
    if spec is None or spec.origin is None:
        return None
    try:
        loaded = ctypes.CDLL(spec.origin)
        welford, apply_rule = loaded.welford, loaded.apply_rule
    except (OSError, AttributeError):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    welford.argtypes = [*[pointer] * 3, size, _REAL, _REAL, ctypes.c_int, ctypes.c_int]
    apply_rule.argtypes = [*[ctypes.c_int] * 2, *[pointer] * 2, size, *[pointer] * 4, ctypes.c_int]
    welford.restype = apply_rule.restype = None
    return loaded


def fits(first: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels are built and can read these arrays.

    The arrays must be float32 on the CPU, with one shape and one dense layout. Subclasses are
    refused, since they may have no memory, and so are views of negated numbers.
    """
    if library() is None:
        if first.is_cpu and first.dtype is torch.float32:
            _warn_of_slow_steps()
        return False
    tensors, contiguous = [first], True
    for t in others:
        if t is not None and t is not first:
            if t.shape != first.shape:
                return False
            tensors.append(t)
    for t in tensors:  # without function calls, which dominate over many small layers
        is_plain = (type(t) is Tensor or type(t) is Parameter) and t.is_cpu and not t.is_neg()
        if not is_plain or t.dtype is not torch.float32:
            return False
        contiguous = contiguous and t.is_contiguous()
    if contiguous:
        return True
    strides = first.stride()
    channels_last = first.is_contiguous(memory_format=torch.channels_last)
    return channels_last and all(t.stride() == strides for t in tensors)


@functools.cache
def _warn_of_slow_steps() -> None:
    """Warns once per process, on rank 0."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(
            "the compiled kernels are not installed, so optimizer steps on the CPU are slower; "
            "install a C compiler, then install bigbatch again",
            stacklevel=3,
        )


def threads_for(elements: int) -> int:
    """The number of threads for so many elements, at most torch's."""
    return max(1, min(torch.get_num_threads(), elements // _ELEMENTS_PER_THREAD))


def welford(
    gradient: Tensor, total: Tensor, m2: Tensor, mean_of: float, weight: float, *, adds: bool
) -> None:
    """m2 += weight (gradient - mean_of total)^2; total += gradient if `adds`. All must fit."""
    n = gradient.numel()
    kernels = library()
    assert kernels is not None
    kernels.welford(
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
    layer_values: Iterable[float],
    group_values: Iterable[float],
    *,
    passes: Passes = Passes.BOTH,
    sums: Tensor | None = None,
    watch: bool = False,
) -> tuple[Tensor, Tensor]:
    """Applies a rule to a list of layers, whose arrays must all fit.

    Args:
        rule: the rule.
        layers: the arrays of each layer.
        layer_values: two numbers for each layer.
        group_values: the numbers that all layers share.
        passes: the passes to run.
        sums: sums of the first pass, (layers, 2), if only the second pass runs.
        watch: whether to return statistics of GSNR scaling.
    Returns:
        The sums of the first pass, (layers, 2), and the statistics of GSNR scaling, (layers, 5):
        the sum of r, elements at gamma, elements at r_max, |g|^2 and |r g|^2; zeros if not watched.
        Both float64.
    """
    kernels = library()
    assert kernels is not None
    count = len(layers)
    addresses = array("q", [0 if t is None else t.data_ptr() for layer in layers for t in layer])
    lengths = array("q", [layer[0].numel() for layer in layers])
    threads = threads_for(sum(lengths))
    thread_sums = torch.zeros(threads, count, _SUMS, dtype=torch.float64, device="cpu")
    if sums is not None:
        thread_sums[0] = sums
    stats = torch.zeros(threads if watch else 0, count, _STATS, dtype=torch.float64, device="cpu")
    layer_array, group_array = array("d", layer_values), array("d", group_values)
    kernels.apply_rule(
        rule,
        passes,
        _address(addresses),
        _address(lengths),
        count,
        _address(layer_array),
        _address(group_array),
        thread_sums.data_ptr(),
        stats.data_ptr() if watch else None,
        threads,
    )
    written = [arrays[i] for arrays in layers for i in _WRITTEN_ARRAYS[rule]]
    increment_version([t for t in written if t is not None])  # as torch's own operations would
    return thread_sums.sum(0), stats.sum(0)


def _address(values: "array[int] | array[float]") -> int:
    return values.buffer_info()[0]
