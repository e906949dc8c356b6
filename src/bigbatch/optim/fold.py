"""The fold: r g where g was, over lists of layers; by kernels where they fit, else by torch."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigbatch.kernels import native
from bigbatch.optim import rules
from bigbatch.optim.passes import Passes
from bigbatch.optim.ranks import Join

_PIECE = 1 << 16  # elements, of 256 KB in float32


@dataclass
class Layer:
    """One parameter: its moments, its gradient, and p where r is averaged.

    Args:
        total, m2: S and M2 of its micro-batch gradients.
        gradient: what is multiplied, in place.
        average: p, moved in place; None for no momentum on r.
        corrected: 1 / (1 - beta3^t).
    """

    total: Tensor
    m2: Tensor
    gradient: Tensor
    average: Tensor | None = None
    corrected: float = 1.0

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As the kernel takes them."""
        return self.total, self.m2, self.gradient, self.average


@dataclass(frozen=True)
class How:
    """What holds for all layers of a parameter group in one step.

    Args:
        factor: which r, a name of `rules.FACTORS`.
        gamma, r_max: its bounds.
        beta3: momentum of r, for the layers that have an average.
        weight: N, the sum of the micro-batches' weights.
        k: how many they were.
        watch: whether to tell what was done.
        fused: whether kernels may be used; layers that do not fit them go by torch.
        compiled: whether what goes by torch is given to `torch.compile`.
    """

    factor: str
    gamma: float
    r_max: float
    beta3: float
    weight: float
    k: int
    watch: bool = False
    fused: bool = True
    compiled: bool = False


def fold(how: How, layers: Sequence[Layer], join: Join | None = None) -> Tensor:
    """Multiplies every gradient by r, or by p_hat.

        r from `rules`;   with an average:  p <- beta3 p + (1 - beta3) r,   r <- p corrected

    Args:
        how: the settings.
        layers: what this process has of them.
        join: adds up numbers of layers over the ranks that hold the rest; None: all is here.
    Returns:
        Where `how.watch`, of the parts that are here: the sum of r, elements at gamma, elements at
        r_max, |g|^2 and |p_hat g|^2; (layers, 5). Zeros where not.
    """
    rule, limit = list(rules.FACTORS).index(how.factor), rules.agreement(torch.float32)
    return Passes(
        native.Rule.FOLD,
        layers=[layer.arrays for layer in layers],
        own=[(layer.corrected, 0.0) for layer in layers],
        group=[how.weight, limit, rule, how.k - 1, how.gamma, how.r_max, how.beta3],
        first=(lambda i: _sums(how, layers[i])) if how.factor == "gsnr" else None,
        second=lambda i, sums: _fold(how, layers[i], sums),
        watch=how.watch,
    ).run(fused=how.fused, join=join)


# by torch


def _sums(how: How, layer: Layer) -> Tensor:
    weight, *_ = _numbers(how, layer)
    live_sums = _live_sums(how.compiled)
    pieces = _pieces(layer.total, layer.m2)
    return torch.stack([live_sums(total, m2, weight) for total, m2 in pieces]).sum(0)


def _fold(how: How, layer: Layer, sums: Tensor) -> Tensor | None:
    numbers = _numbers(how, layer)
    multiply = _multiply(how.factor, how.gamma, how.r_max, how.beta3, how.watch, how.compiled)
    told = [multiply(*piece, sums, *numbers) for piece in _pieces(*layer.arrays)]
    return torch.stack([seen for seen in told if seen is not None]).sum(0) if how.watch else None


def _pieces(*arrays: Tensor | None) -> Iterator[Sequence[Tensor | None]]:
    """The arrays in pieces that stay in a CPU's cache; whole where that cannot be."""
    given = [array for array in arrays if array is not None]
    if given[0].device.type != "cpu" or not all(array.is_contiguous() for array in given):
        yield arrays
        return
    for start in range(0, max(1, given[0].numel()), _PIECE):
        yield [None if x is None else x.view(-1)[start : start + _PIECE] for x in arrays]


def _numbers(how: How, layer: Layer) -> tuple[Any, Any, Any]:
    """What changes from step to step; as tensors for a compiler, which floats make compile anew."""
    numbers = how.weight, how.k, layer.corrected
    if not how.compiled:
        return numbers
    weight, k, corrected = layer.m2.new_tensor(numbers).unbind()
    return weight, k, corrected


@functools.cache
def _live_sums(compiled: bool) -> Callable[..., Tensor]:
    def live_sums(total: Tensor, m2: Tensor, weight: float) -> Tensor:
        return rules.live_sums(rules.ratio(total, m2, weight))

    return _maybe_compiled(live_sums, compiled)


@functools.cache
def _multiply(
    factor: str, gamma: float, r_max: float, beta3: float, watch: bool, compiled: bool
) -> Callable[..., Tensor | None]:
    """The fold of one array; what it closes over never changes."""

    def multiply(
        total: Tensor,
        m2: Tensor,
        gradient: Tensor,
        average: Tensor | None,
        sums: Tensor,
        weight: float,
        k: int,
        corrected: float,
    ) -> Tensor | None:
        q = rules.ratio(total, m2, weight)
        r = rules.FACTORS[factor](q, sums, k, gamma, r_max)
        hat = r if average is None else rules.averaged(average, r, beta3, corrected)
        if not watch:
            gradient.mul_(hat)
            return None
        before = rules.squares(gradient)
        gradient.mul_(hat)
        told = [r.sum(), (r <= gamma).sum(), (r >= r_max).sum(), before, rules.squares(gradient)]
        return torch.stack([number.to(r.dtype) for number in told])

    return _maybe_compiled(multiply, compiled)


def _maybe_compiled(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True) if compiled else function
