"""Compares the groups of one backward with a backward for each group."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch.data.collate import Batch, count_samples, slice_samples
from bigbatch.data.rng_state import random_state, restore_random_state
from bigbatch.errors import SettingError
from bigbatch.gradients import GroupTap
from bigbatch.gradients.auto import is_sharded
from bigbatch.gradients.dtypes import widest_float
from bigbatch.gradients.groups.grouping import Grouping
from bigbatch.setting_types import Groups, Positive, checked
from bigbatch.statistics.noise_scale import GradientStatistics, from_weighted_losses
from bigbatch.training.loss_check import one_number
from bigbatch.training.loss_weights import label_weights
from bigbatch.training.snapshot import ForwardSnapshot

LossFunction = Callable[[Any, Any], Tensor]
"""(output of the model, y) -> mean loss, one number."""

_SMALL = 1e-3  # of all gradients' length: an error in less is of no consequence
_SHOWN = 12  # parameters in a table


@dataclass(frozen=True)
class ParameterCheck:
    """The groups' gradients of one parameter."""

    name: str  # the parameter's name in the model
    shape: tuple[int, ...]  # its shape
    share: float  # its share of |G|^2, the squared norm of the batch's gradient
    refusal: str  # why the groups of one backward do not have it; empty if they do
    error: float  # |h - h'| / |h'| over all groups; nan if refused


@dataclass(frozen=True)
class GroupCheck:
    """What `check_groups` found; `print` shows it as a table."""

    samples: int  # B, samples of the batch
    groups: int  # k
    parameters: tuple[ParameterCheck, ...]  # every parameter that has a gradient
    one_backward: GradientStatistics  # of the groups of one backward, where it has them
    loop: GradientStatistics  # the same from one backward for each group
    tolerance: float  # largest error that is `ok`
    mode: str  # "train"; "eval" if the loss is random in training, by dropout for example

    @property
    def failures(self) -> tuple[ParameterCheck, ...]:
        """The parameters that are refused, or whose error exceeds the tolerance."""
        return tuple(p for p in self.parameters if p.refusal or not p.error <= self.tolerance)

    @property
    def ok(self) -> bool:
        """Whether `groups=` measures this model and this loss."""
        return not self.failures

    def __str__(self) -> str:
        result = "ok" if self.ok else f"{len(self.failures)} parameters are not"
        lines = [
            f"{self.groups} groups of one backward of {self.samples} samples, against "
            f"{self.groups} backwards, in {self.mode} mode: {result}",
            f"similarity {self.one_backward.similarity:.4g} against {self.loop.similarity:.4g}, "
            f"noise scale {self.one_backward.noise_scale:.4g} against {self.loop.noise_scale:.4g}",
        ]
        if any(not p.refusal for p in self.failures):
            lines.append(
                "a group's gradient depends on other samples, or the loss is not their mean: give "
                "the weights of a mean over tokens by weight=, and see docs/groups.md"
            )
        first = set(self.failures)
        order = sorted(self.parameters, key=lambda p: (p not in first, -p.share))
        lines.append(f"{'|G|^2':>8}  {'error':>8}  parameter")
        for p in order[:_SHOWN]:
            error, why = ("refused", f": {p.refusal}") if p.refusal else (f"{p.error:.1e}", "")
            lines.append(f"{p.share:8.2g}  {error:>8}  {p.name} {p.shape}{why}")
        if len(order) > _SHOWN:
            lines.append(f"and {len(order) - _SHOWN} more")
        return "\n".join(lines)


@checked
def check_groups(
    model: nn.Module,
    loss_fn: LossFunction,
    x: Batch,
    y: Batch = None,
    *,
    groups: Groups = 8,
    weight: Tensor | None = None,
    tolerance: Positive = 1e-2,
) -> GroupCheck:
    """Checks that `groups=` measures a model and a loss, against one backward for each group.

        h_d  = what group d adds to the gradient of loss_fn(model(x), y), from one backward
        h'_d = n_d / N * gradient of loss_fn(model(x_d), y_d), from a backward of group d alone

    They are equal if no sample influences another and the loss is the mean over samples. Unlike
    `groups=` itself, it also finds a loss that couples samples above the model's last output, a sum
    in place of a mean, and a mean over tokens without weights. If the loss is random, as with
    dropout, everything except BatchNorm is compared in eval mode. The model and random states are
    as before. Call it before a GradientMeter, an AdaptiveBatch or fully_shard gets the model; a DDP
    model is checked without its ranks. It needs memory for k + 3 gradients. Call it under autocast
    if training does, with tolerance=0.1.

    Args:
        model: the model; all its parameters that require a gradient are checked.
        loss_fn: (output, y) -> mean loss, one number.
        x: the input, samples in dimension 0: a tensor, a tuple of arguments, or a mapping of them.
        y: the second argument of `loss_fn`, cut like x; None if it needs none.
        groups: k, at most the number of samples.
        weight: the weight of each sample in the mean, (B,), as for `step.backward`; default: its
            labels in a mean cross entropy, else 1.
        tolerance: largest error of a parameter that is `ok`.
    Returns:
        `ok`, and for each parameter its share of |G|^2 and its error, or why it is refused.
    Raises:
        SettingError: fewer than two samples, a sharded model, no parameter to check, or a loss that
            is not one number, or is random in eval mode too.
        BatchError: x or y cannot be cut along its samples.
    Example:
        >>> model, x, y = nn.Linear(3, 1), torch.arange(24.0).view(8, 3), torch.zeros(8, 1)
        >>> check_groups(model, nn.functional.mse_loss, x, y, groups=4).ok
        True
        >>> check_groups(model, lambda output, y: output.mean().square(), x, groups=4).ok
        False
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    names: dict[Tensor, str] = {p: n for n, p in model.named_parameters() if p.requires_grad}
    if not names:
        raise SettingError("no parameter requires a gradient, so there is nothing to check")
    if any(map(is_sharded, names)):
        raise SettingError("the model is sharded; check it before fully_shard")
    samples = count_samples(x if y is None else (x, y))
    if samples < 2:
        raise SettingError(f"a batch of {samples} samples has no groups to compare; pass more")
    if weight is not None and weight.shape != (samples,):
        raise SettingError(
            f"weight= has shape {tuple(weight.shape)}; pass {samples} numbers, one for each sample"
        )
    grouping = Grouping(samples, min(groups, samples))
    with ForwardSnapshot(model), torch.enable_grad():
        mode = _set_mode(lambda: _loss(model, loss_fn, x, y), model)
        random = random_state()
        loss = _loss(model, loss_fn, x, y)
        labels = label_weights(loss, samples) if weight is None else None
        if labels is not None and len(labels) == samples:
            weight = labels
        tap = GroupTap(
            grouping.groups, lambda leaves: [p if p in names else None for p in leaves], {}, model
        )
        tap.exact = True
        tap.prepare([loss], samples, weight)
        gradients = zip(names, torch.autograd.grad(loss, [*names], allow_unused=True), strict=True)
        whole = {p: g for p, g in gradients if g is not None}
        taken = {p: tap.take(p, g) for p, g in whole.items()}
        tap.forget()
        compared = {p: h.gradients for p, h in taken.items() if h and p not in tap.refusals}
        sums = grouping.sizes if weight is None else grouping.sums(weight)
        bounds = pairwise(accumulate(grouping.sizes, initial=0))
        parts = [part for part, n in zip(bounds, sums, strict=True) if n]

        def loss_of_group(d: int) -> Tensor:
            restore_random_state(random)
            of_y = None if y is None else slice_samples(y, *parts[d])
            return _loss(model, loss_fn, slice_samples(x, *parts[d]), of_y)

        errors, scatters, sqnorm = _compare(compared, tap.weights, loss_of_group)
    lengths = {p: _square(g) for p, g in whole.items()}
    total, covered = math.fsum(lengths.values()) or 1.0, math.fsum(lengths[p] for p in compared)
    why = tap.refusals
    parameters = tuple(
        ParameterCheck(names[p], tuple(p.shape), n / total, why.get(p, ""), errors.get(p, math.nan))
        for p, n in lengths.items()
    )
    one_backward, loop = (
        # sums that do not fit together are what is looked for
        from_weighted_losses(scatter, square, len(tap.weights), sum(tap.weights), eps=math.inf)
        for scatter, square in zip(scatters, (covered, sqnorm), strict=True)
    )
    return GroupCheck(samples, grouping.groups, parameters, one_backward, loop, tolerance, mode)


def _compare(
    groups: Mapping[Tensor, Tensor],
    weights: Sequence[float],
    loss_of_group: Callable[[int], Tensor],
) -> tuple[dict[Tensor, float], list[float], float]:
    """|h - h'| / |h'| by parameter; sum_d |h_d|^2 / n_d, and that of h'_d; |sum_d h'_d|^2."""
    squares: dict[Tensor, list[list[float]]] = {p: [] for p in groups}
    sums = {p: torch.zeros_like(p) for p in groups}
    for d, n in enumerate(weights if groups else ()):
        own = torch.autograd.grad(loss_of_group(d), [*groups], materialize_grads=True)
        for (p, h), gradient in zip(groups.items(), own, strict=True):
            expected = n / sum(weights) * gradient
            sums[p] += expected
            error = h[d].to(expected.dtype) - expected
            squares[p].append([_square(error), _square(h[d]), _square(expected)])
    table = torch.tensor([*squares.values()], dtype=torch.float64, device="cpu")
    table = table.reshape(len(groups), len(weights), 3)
    errors, _, lengths = table.sum(1).unbind(1)
    lengths = lengths.clamp_min(_SMALL**2 * lengths.sum())
    relative = torch.where(lengths == 0, errors, errors / lengths).sqrt()
    scatters = (table / torch.tensor(weights, device="cpu")[:, None]).sum((0, 1))
    by_parameter = dict(zip(groups, relative.tolist(), strict=True))
    return by_parameter, scatters.tolist()[1:], math.fsum(map(_square, sums.values()))


def _loss(model: nn.Module, loss_fn: LossFunction, x: Batch, y: Batch) -> Tensor:
    arguments = x if isinstance(x, tuple) else (x,)
    output = model(**x) if isinstance(x, Mapping) else model(*arguments)
    return one_number(loss_fn(output, y), "loss_fn").reshape(())


@torch.no_grad()
def _set_mode(loss_of: Callable[[], Tensor], model: nn.Module) -> str:
    """Puts the model into eval mode, without BatchNorm, if its loss is random; the mode."""
    if float(loss_of()) == float(loss_of()):
        return "train" if model.training else "eval"
    for module in model.modules():
        module.training &= isinstance(module, nn.modules.batchnorm._BatchNorm)
    if float(loss_of()) == float(loss_of()):
        return "eval"
    raise SettingError(
        "the loss is random in eval mode too, so two backwards of the same samples differ; "
        "draw random numbers in the loader, or only if module.training"
    )


def _square(tensor: Tensor) -> float:
    dtype = widest_float(tensor.device)
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=dtype)) ** 2
