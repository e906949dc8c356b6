"""Multiplies gradients by r in place, layer by layer: by kernels where they fit, else by torch."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigbatch.kernels import native
from bigbatch.optim import functional
from bigbatch.optim.sharding import AllReduce
from bigbatch.optim.two_pass import TwoPass

_CHUNK = 1 << 16  # elements, of 256 KB in float32


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
class GsnrOptions:
    """What holds for all layers of a parameter group in one step.

    Args:
        factor: which r, a name of `functional.FACTORS`.
        gamma, r_max: its bounds.
        beta3: momentum of r, for the layers that have an average.
        weight: N, the sum of the micro-batches' weights.
        k: how many they were.
        watch: whether to return what was done.
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


@dataclass(frozen=True)
class AppliedGsnr:
    """What was done in a step.

    Args:
        k: micro-batches, or other groups, that r compared.
        layers: of each parameter what `apply_gsnr` returns, over all ranks; empty where unwatched.
        agree: whether all of them had the same gradient, where that was checked.
        out_of_range: layers on this rank whose M2 is, so that r is wrong, where that was checked.
    """

    k: int
    layers: dict[Tensor, Tensor]
    agree: bool
    out_of_range: Sequence[Tensor] = ()


_FEW = 0.01  # of a layer's elements: r of the others is hardly another


def out_of_range(parameters: Sequence[Tensor], shares: Sequence[Tensor]) -> list[Tensor]:
    """Those of which more than a few elements have an M2 that is out of range; waits once."""
    values = torch.stack(list(shares)).tolist() if shares else []
    return [p for p, share in zip(parameters, values, strict=True) if share > _FEW]


def apply_gsnr(
    options: GsnrOptions, layers: Sequence[Layer], all_reduce: AllReduce | None = None
) -> Tensor:
    """Multiplies every gradient by r, or by p_hat.

        r = FACTORS[factor];   with an average:  p <- beta3 p + (1 - beta3) r,   r <- p corrected

    Args:
        options: the settings.
        layers: what this process has of them.
        all_reduce: sums values of layers over the ranks that have the rest of them, in place; None
            where this rank has them whole.
    Returns:
        Where `options.watch`, of this rank's elements: the sum of r, elements at gamma, elements
        at r_max, |g|^2 and |p_hat g|^2; (layers, 5). Zeros where not.
    """
    o, limit = options, functional.agreement(torch.float32)
    rule = list(functional.FACTORS).index(o.factor)
    return TwoPass(
        native.Rule.GSNR,
        layers=[layer.arrays for layer in layers],
        own=[(layer.corrected, 0.0) for layer in layers],
        group=[o.weight, limit, rule, o.k - 1, o.gamma, o.r_max, o.beta3],
        first=(lambda i: _sums(o, layers[i])) if o.factor == "gsnr" else None,
        second=lambda i, sums: _scale(o, layers[i], sums),
        watch=o.watch,
    ).run(fused=o.fused, all_reduce=all_reduce)


# by torch


def _sums(options: GsnrOptions, layer: Layer) -> Tensor:
    weight, *_ = _numbers(options, layer)
    live_sums = _compiled(_live_sums) if options.compiled else _live_sums
    chunks = _chunks(options, layer.total, layer.m2)
    return torch.stack([live_sums(total, m2, weight) for total, m2 in chunks]).sum(0)


def _scale(options: GsnrOptions, layer: Layer, sums: Tensor) -> Tensor | None:
    numbers = _numbers(options, layer)
    mean = (sums[0] / sums[1].clamp_min(1)).to(layer.m2)
    multiply = _compiled(_multiply) if options.compiled else _multiply
    rows = [
        multiply(options.factor, options.watch, mean, *numbers, *chunk)
        for chunk in _chunks(options, *layer.arrays)
    ]
    stats = [row for row in rows if row is not None]  # where watched
    return torch.stack(stats).sum(0) if stats else None


def _chunks(options: GsnrOptions, *arrays: Tensor | None) -> Iterator[Sequence[Any]]:
    """The arrays in chunks that stay in a CPU's cache; whole where that cannot be or need not."""
    given = [array for array in arrays if array is not None]
    if not all(array.is_contiguous() for array in given):
        yield arrays
        return
    flat = [None if array is None else array.view(-1) for array in arrays]
    if options.compiled or given[0].device.type != "cpu":
        yield flat
        return
    for start in range(0, max(1, given[0].numel()), _CHUNK):
        yield [None if x is None else x[start : start + _CHUNK] for x in flat]


def _numbers(options: GsnrOptions, layer: Layer) -> tuple[Any, ...]:
    """The settings; as tensors for a compiler, which floats make compile again."""
    o = options
    numbers = (o.weight, o.k, o.gamma, o.r_max, o.beta3, layer.corrected)
    if not o.compiled:
        return numbers
    m2 = layer.m2
    return tuple(torch.full((), number, dtype=m2.dtype, device=m2.device) for number in numbers)


def _live_sums(total: Tensor, m2: Tensor, weight: float) -> Tensor:
    return functional.live_sums(functional.ratio(total, m2, weight))


def _multiply(
    factor: str,
    watch: bool,
    mean: Tensor,
    weight: float,
    k: float,
    gamma: float,
    r_max: float,
    beta3: float,
    corrected: float,
    total: Tensor,
    m2: Tensor,
    gradient: Tensor,
    average: Tensor | None,
) -> Tensor | None:
    q = functional.ratio(total, m2, weight)
    r = functional.FACTORS[factor](q, mean, k, gamma, r_max)
    hat = r if average is None else functional.averaged(average, r, beta3, corrected)
    if not watch:
        gradient.mul_(hat)
        return None
    before = functional.squares(gradient)
    gradient.mul_(hat)
    after = functional.squares(gradient)
    numbers = [r.sum(), (r <= gamma).sum(), (r >= r_max).sum(), before, after]
    return torch.stack([number.to(r.dtype) for number in numbers])


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)
