"""Multiplies gradients by r in place, layer by layer, with kernels if they fit, else with torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigbatch.kernels import native
from bigbatch.optim import functional
from bigbatch.optim.sharding import AllReduce
from bigbatch.optim.two_pass import TwoPass

_CHUNK = 1 << 16  # elements, of 256 KB in float32
_MAX_SHARE = 0.01  # of a layer out of range; below it, r of the other elements hardly changes


class Layer(NamedTuple):
    """The moments of a parameter, its gradient, and p if r has momentum."""

    # total, m2: S and M2 of the micro-batch gradients
    total: Tensor
    m2: Tensor
    gradient: Tensor  # the gradient, multiplied in place
    average: Tensor | None = None  # p, updated in place; None without momentum of r
    correction: float = 1.0  # 1 / (1 - beta3^t)


@dataclass(frozen=True)
class GsnrOptions:
    """The options of all layers of a parameter group in one step."""

    # gamma, r_max, beta3, watch: see `VarianceReduced`
    gamma: float
    r_max: float
    beta3: float
    weight: float  # N, the sum of the micro-batches' weights
    watch: bool = False
    fused: bool = True  # whether kernels may be used; torch does the layers that do not fit them


@dataclass(frozen=True)
class AppliedGsnr:
    """The effect of scaling in one step."""

    k: int  # number of micro-batches, or other groups, that r compared
    # the row of `apply_gsnr` of each parameter, over all ranks; empty if not watched
    layers: dict[Tensor, Tensor]
    agree: bool  # whether all groups had the same gradient, if that was checked
    # layers on this rank whose M2 is out of range, so that r is wrong, if that was checked
    out_of_range: Sequence[Tensor] = ()


@dataclass(frozen=True)
class LayerGsnr:
    """r of one step, by layer; only reading a number waits for the device."""

    names: Sequence[str]  # parameter names if the optimizer was given them, else numbers
    elements: Sequence[int]  # of each layer, over all ranks
    # (layers, 5), from `apply_gsnr`: the sum of r, elements at gamma, elements at r_max, |g|^2 and
    # |p_hat g|^2
    rows: Tensor
    k: int  # number of micro-batches in the step

    @property
    def mean(self) -> Tensor:
        """Mean r of each layer, (layers,)."""
        return self._share(0)

    @property
    def at_gamma(self) -> Tensor:
        """Share of each layer's elements at the lower clip, in [0, 1]."""
        return self._share(1)

    @property
    def at_r_max(self) -> Tensor:
        """Share of each layer's elements at the upper clip, in [0, 1]."""
        return self._share(2)

    @property
    def lr_factor(self) -> Tensor:
        """Change of each layer's gradient norm, |r g| / |g|, with beta3 |p_hat g| / |g|.

        nan if the gradient is 0.
        """
        return (self.rows[:, 4] / self.rows[:, 3]).sqrt()

    def by_layer(self) -> dict[str, list[float]]:
        """Name -> [mean r, share at gamma, share at r_max, lr factor]; one wait for the device."""
        columns = [self.mean, self.at_gamma, self.at_r_max, self.lr_factor]
        return dict(zip(self.names, torch.stack(columns, dim=1).tolist(), strict=True))

    def _share(self, column: int) -> Tensor:
        return self.rows[:, column] / self.rows.new_tensor(self.elements).clamp_min_(1)


def out_of_range(shares: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The parameters with a large share of elements whose M2 is out of range; waits once."""
    values = torch.stack([share for _, share in shares]).tolist() if shares else []
    return [p for (p, _), share in zip(shares, values, strict=True) if share > _MAX_SHARE]


def apply_gsnr(
    options: GsnrOptions, layers: Sequence[Layer], all_reduce: AllReduce | None = None
) -> Tensor:
    """Multiplies every gradient by r, or by p_hat.

        r = gsnr(S, M2, N);   with an average:  p <- beta3 p + (1 - beta3) r,   r <- p correction

    Args:
        options: the options of the layers.
        layers: this process's elements of the layers.
        all_reduce: sums values of layers over the ranks that have the rest of them, in place; None
            where this rank has them whole.
    Returns:
        With `options.watch`, for this rank's elements: the sum of r, elements at gamma, elements at
        r_max, |g|^2 and |p_hat g|^2; (layers, 5). Zeros without.
    """
    o, limit = options, functional.agreement(torch.float32)
    return TwoPass(
        native.Rule.GSNR,
        layers=[layer[:4] for layer in layers],
        layer_values=[(layer.correction, 0.0) for layer in layers],
        group_values=[o.weight, limit, o.gamma, o.r_max, o.beta3],
        first_pass=lambda i: _sums(o, layers[i]),
        second_pass=lambda i, sums: _scale(o, layers[i], sums),
        watch=o.watch,
    ).run(fused=o.fused, all_reduce=all_reduce)


# torch operations


def _sums(options: GsnrOptions, layer: Layer) -> Tensor:
    chunks = _chunks(layer.total, layer.m2)
    ratios = (functional.ratio(total, m2, options.weight) for total, m2 in chunks)
    return torch.stack([functional.live_sums(q) for q in ratios]).sum(0)


def _scale(options: GsnrOptions, layer: Layer, sums: Tensor) -> Tensor | None:
    o, stats = options, list[Tensor]()
    mean = (sums[0] / sums[1].clamp_min(1)).to(layer.m2)
    for total, m2, gradient, average in _chunks(*layer[:4]):
        q = functional.ratio(total, m2, o.weight)
        r = hat = functional.normalized(q, mean, o.gamma, o.r_max)
        if average is not None:
            hat = functional.update_average(average, r, o.beta3, layer.correction)
        before = functional.squares(gradient) if o.watch else None
        gradient.mul_(hat)
        if before is not None:
            after = functional.squares(gradient)
            row = [r.sum(), (r <= o.gamma).sum(), (r >= o.r_max).sum(), before, after]
            stats.append(torch.stack([value.to(r.dtype) for value in row]))
    return torch.stack(stats).sum(0) if stats else None


def _chunks(*arrays: Tensor | None) -> Iterator[Sequence[Any]]:
    """The arrays in chunks that fit a CPU's cache; whole on GPUs, or if they are not contiguous."""
    present = [array for array in arrays if array is not None]
    if not all(array.is_cpu and array.is_contiguous() for array in present):
        yield arrays
        return
    for start in range(0, max(1, present[0].numel()), _CHUNK):
        yield [None if x is None else x.view(-1)[start : start + _CHUNK] for x in arrays]
