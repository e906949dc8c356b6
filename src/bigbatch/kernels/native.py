"""The compiled kernels as functions of lists of tensors; kernels.c defines what they compute."""

import ctypes
import functools
import importlib.util
import math
import operator
import warnings
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

_ELEMENTS_PER_THREAD = 1 << 16  # at least
_SUMS, _STATS, _GROUP_VALUES = 2, 5, 12  # as in kernels.c
_PLAIN = {Tensor, Parameter}  # subclasses may have no memory
_DTYPE, _SHAPE = operator.attrgetter("dtype"), operator.attrgetter("shape")
_IS_CPU = operator.attrgetter("is_cpu")

Column = Sequence[Tensor] | None
"""One array of each layer; None if no layer has it."""


class Rule(IntEnum):
    """The rule that `run` applies to every layer; kernels.c lists its columns and values."""

    SQUARES = 0
    WELFORD = 1
    GSNR = 2
    GSNR_SGD = 3
    GSNR_ADAM = 4
    LARS = 5
    LAMB = 6


# by number of the rule: the columns that it writes to
_WRITTEN = ((), (1, 2), (2, 3), (2, 3, 4, 5), (2, 3, 4, 5, 6), (0, 2), (0, 2, 3))


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
        run_rule = loaded.run_rule
    except (OSError, AttributeError):
        return None
    number, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
    run_rule.argtypes = [number, number, number, pointer, size, pointer, number, number]
    run_rule.restype = None
    return loaded


def fits(*columns: Column) -> bool:
    """Whether the kernels are built and can read these arrays; no Python runs for each of them.

    The arrays must be float32 on the CPU. Those of a layer must have one shape and one dense
    layout. Subclasses are refused, since they may have no memory, and so are views of negated
    numbers.
    """
    present = [column for column in columns if column is not None]
    first = present[0]
    if library() is None:
        if any(t.is_cpu and t.dtype is torch.float32 for t in first):
            _warn_of_slow_steps()
        return False
    shapes = list(map(_SHAPE, first))
    for column in present:
        if not are_plain(column) or (column is not first and list(map(_SHAPE, column)) != shapes):
            return False
    if all(set(map(Tensor.is_contiguous, column)) <= {True} for column in present):
        return True
    strides = list(map(Tensor.stride, first))
    return all(map(_is_dense, first)) and all(
        list(map(Tensor.stride, column)) == strides for column in present
    )


def are_plain(arrays: Sequence[Tensor]) -> bool:
    """Whether the arrays are float32 numbers in the CPU's memory, in any layout."""
    return (
        set(map(type, arrays)) <= _PLAIN
        and set(map(_DTYPE, arrays)) <= {torch.float32}
        and set(map(_IS_CPU, arrays)) <= {True}
        and set(map(Tensor.is_neg, arrays)) <= {False}
    )


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


@functools.cache
def _warn_of_slow_steps() -> None:
    """Warns once per process, on rank 0."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(
            "the compiled kernels are not installed, so optimizer steps on the CPU are slower; "
            "install a C compiler, then install bigbatch again",
            stacklevel=3,
        )


def addresses(column: Sequence[Tensor]) -> "array[int]":
    """Where the arrays lie in memory."""
    return array("q", map(Tensor.data_ptr, column))


def lengths(column: Sequence[Tensor]) -> "array[int]":
    """The number of elements of each array."""
    return array("q", map(Tensor.numel, column))


def run(
    rule: Rule,
    columns: Sequence[Column],
    group_values: Iterable[float],
    layer_values: Iterable[float] | None = None,
    *,
    passes: Passes = Passes.BOTH,
    sums: Tensor | None = None,
    watch: bool = False,
) -> tuple[Tensor, Tensor]:
    """Applies a rule to a list of layers, whose arrays must all fit.

    Args:
        rule: the rule.
        columns: the arrays of each layer, by column; the first has all layers.
        group_values: the numbers that all layers share.
        layer_values: two numbers for each layer; None if the rule reads none.
        passes: the passes to run.
        sums: sums of the first pass, (layers, 2), if only the second pass runs.
        watch: whether to return statistics of GSNR scaling.
    Returns:
        The sums of the first pass, (layers, 2), and the statistics of GSNR scaling, (layers, 5):
        the sum of r, elements at gamma, elements at r_max, |g|^2 and |r g|^2; zeros if not watched.
        Both float64.
    """
    assert columns[0] is not None
    elements, count = lengths(columns[0]), len(columns[0])
    places = [None if column is None else addresses(column) for column in columns]
    numbers = run_at(
        rule, places, elements, group_values, layer_values, passes=passes, sums=sums, watch=watch
    )
    for number in _WRITTEN[rule]:
        if column := columns[number]:
            increment_version(column)  # as torch's own operations would
    if not count:
        return torch.zeros(0, _SUMS, dtype=torch.float64), torch.zeros(0, _STATS)
    threads = _threads_for(elements)
    found = torch.frombuffer(numbers, dtype=torch.float64)[_GROUP_VALUES + 2 * count :]
    total = found[: threads * count * _SUMS].view(threads, count, _SUMS).sum(0)
    if not watch:
        return total, torch.zeros(count, _STATS, dtype=torch.float64)
    return total, stats_of(numbers, elements)


def run_at(
    rule: Rule,
    columns: "Sequence[array[int] | None]",
    elements: "array[int]",
    group_values: Iterable[float],
    layer_values: Iterable[float] | None = None,
    *,
    passes: Passes = Passes.BOTH,
    sums: Tensor | None = None,
    watch: bool = False,
) -> "array[float]":
    """The same for layers of so many elements at these addresses; no version is incremented.

    It may be called every micro-batch, so it calls few functions.

    Returns:
        The numbers that the kernel reads and writes, as kernels.c describes them.
    """
    kernels: Any = library()
    count, threads = len(elements), _threads_for(elements)
    table = array("q")
    for column in columns:
        table += array("q", bytes(8 * count)) if column is None else column
    table += elements
    numbers = array("d", group_values)
    numbers += array("d", bytes(8 * (_GROUP_VALUES - len(numbers))))
    numbers += array("d", bytes(16 * count) if layer_values is None else layer_values)
    shared = sums.flatten().tolist() if sums is not None else ()
    numbers += array("d", shared)
    per_thread = (_SUMS + _STATS) if watch else _SUMS
    numbers += array("d", bytes(8 * (threads * count * per_thread - len(shared))))
    (table_at, _), (numbers_at, _) = table.buffer_info(), numbers.buffer_info()
    width = len(columns)
    kernels.run_rule(rule, passes, width, table_at, count, numbers_at, threads, watch)
    return numbers


def stats_of(numbers: "array[float]", elements: "array[int]") -> Tensor:
    """The statistics in the numbers of a watched call over layers of so many elements."""
    shape = _threads_for(elements), len(elements), _STATS
    return torch.frombuffer(numbers, dtype=torch.float64)[-math.prod(shape) :].view(shape).sum(0)


def _threads_for(elements: "array[int]") -> int:
    """The number of threads for layers of so many elements, at most torch's."""
    most = torch.get_num_threads()
    return most if most == 1 else max(1, min(most, sum(elements) // _ELEMENTS_PER_THREAD))


def squared_norms(gradients: Sequence[Tensor]) -> Tensor:
    """|gradient|^2 of each, in double (layers,). All must fit."""
    return run(Rule.SQUARES, [gradients], ())[0][:, 0]
