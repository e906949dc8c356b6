"""Multiplies gradients by r in place, with kernels if they fit, else with torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigbatch.gradients.dtypes import stacked
from bigbatch.kernels import native
from bigbatch.optim import functional
from bigbatch.optim.sharding import AllReduce
from bigbatch.optim.two_pass import Chunk, TwoPass, chunks

_MAX_SHARE = 0.01  # of a layer out of range; below it, r of the other elements hardly changes


@dataclass(frozen=True)
class Layers:
    """The moments of a list of parameters, their gradients, and p if r has momentum."""

    totals: Sequence[Tensor]  # S
    m2s: Sequence[Tensor]  # M2
    gradients: Sequence[Tensor]  # multiplied in place; may be S
    averages: Sequence[Tensor] | None = None  # p, updated in place; None without momentum of r
    corrections: Sequence[float] | None = None  # 1 / (1 - beta3^t) of each

    @property
    def layer_values(self) -> list[tuple[float, float]]:
        """The numbers of each layer that a kernel reads."""
        return [(c, 0.0) for c in self.corrections or [1.0] * len(self.totals)]


@dataclass(frozen=True)
class AppliedGsnr:
    """The effect of scaling in one step."""

    k: int  # number of micro-batches, or other groups, that r compared
    layers: dict[Tensor, Tensor]  # rows of `apply_gsnr` over all ranks; empty if not watched
    agree: bool  # whether all groups had the same gradient, if that was checked
    out_of_range: Sequence[Tensor] = ()  # layers here whose M2 is so, if that was checked
    stepped: bool = False  # whether the base optimizer's step is done too


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


def are_normal(m2s: Sequence[Tensor]) -> bool:
    """Whether every M2 is a normal number, as in most steps, which is quick to see; waits once."""
    normal = []
    for chunk in chunks((m2s,)):
        if sum(chunk.sizes):
            low, high = chunk.flat(0).aminmax()
            normal.append((low >= torch.finfo(low.dtype).tiny) & high.isfinite())
    return not normal or bool(stacked(normal).all())


def shares_out_of_range(totals: Sequence[Tensor], m2s: Sequence[Tensor], weight: float) -> Tensor:
    """Share of each layer's elements with a wrong ratio: (layers,); 0 without elements."""
    shares = torch.zeros(len(totals), device=totals[0].device if totals else None)
    for chunk in chunks((totals, m2s)):
        are_out = functional.out_of_range(chunk.flat(0), chunk.flat(1), weight)
        sizes = [max(1, total.numel()) for total in totals[chunk.layers]]
        counts = chunk.sums(are_out.float())[:, 0].to(shares)
        shares[chunk.layers] += counts / shares.new_tensor(sizes)
    return shares


def out_of_range(parameters: Sequence[Tensor], shares: Sequence[Tensor]) -> list[Tensor]:
    """The parameters whose layers have a large share of such elements; waits once."""
    values = torch.cat([*shares]).tolist() if shares else []
    return [p for p, share in zip(parameters, values, strict=True) if share > _MAX_SHARE]


def kernel_values(group: Mapping[str, Any], weight: float) -> list[float]:
    """The numbers of a parameter group that a kernel reads; weight is N."""
    limit = functional.agreement(torch.float32)
    return [weight, limit, group["gamma"], group["r_max"], group["beta3"] or 0.0]


def apply_gsnr(
    layers: Layers,
    group: Mapping[str, Any],
    weight: float,
    all_reduce: AllReduce | None = None,
    *,
    fused: bool = True,
    watch: bool = False,
) -> Tensor:
    """Multiplies every gradient by r, or by p_hat.

        r = gsnr(S, M2, N);   with an average:  p <- beta3 p + (1 - beta3) r,   r <- p correction

    Args:
        layers: this process's elements of the layers.
        group: their parameter group, with gamma, r_max and beta3.
        weight: N, the sum of the micro-batches' weights.
        all_reduce: sums values of layers over the ranks, in place; None where each has them whole.
        fused: whether kernels may be used; torch does the layers that do not fit them.
        watch: whether to return what scaling did.
    Returns:
        With `watch`, for this rank's elements: the sum of r, elements at gamma, elements at r_max,
        |g|^2 and |p_hat g|^2; (layers, 5). Zeros without.
    """

    def ratio(chunk: Chunk) -> Tensor:
        return functional.ratio(chunk.flat(0), chunk.flat(1), weight)

    def scale(chunk: Chunk, sums: Tensor) -> Tensor | None:
        gamma, r_max = group["gamma"], group["r_max"]
        q = ratio(chunk)
        means = (sums[:, 0] / sums[:, 1].clamp_min(1)).to(q)
        r = hat = functional.normalized(q, chunk.spread(means), gamma, r_max)
        if chunk.columns[3] is not None:
            average, correction = chunk.flat(3), chunk.spread_value(0, q)
            hat = functional.update_average(average, r, group["beta3"], correction)
            chunk.write(3, average)
        before = chunk.squares(chunk.flat(2)) if watch else None
        torch._foreach_mul_(chunk.columns[2], chunk.views(hat, 2))  # type: ignore[call-overload]
        if before is None:
            return None
        bounds = [(r <= gamma).to(r), (r >= r_max).to(r)]
        return torch.cat([chunk.sums(r, *bounds), before, chunk.squares(chunk.flat(2))], dim=1)

    return TwoPass(
        native.Rule.GSNR,
        columns=[layers.totals, layers.m2s, layers.gradients, layers.averages],
        layer_values=layers.layer_values,
        group_values=kernel_values(group, weight),
        first_pass=lambda chunk: chunk.sums(*functional.live(ratio(chunk))),
        second_pass=scale,
        watch=watch,
    ).run(fused=fused, all_reduce=all_reduce)
