"""Compares the groups of one backward with a backward for each group."""

import math
from collections.abc import Callable, Mapping
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
            error = "refused" if p.refusal else f"{p.error:.1e}"
            name = f"{p.name} {p.shape}" + (f": {p.refusal}" if p.refusal else "")
            lines.append(f"{p.share:8.2g}  {error:>8}  {name}")
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

    They are equal if no sample influences another and the loss is the mean over samples. `groups=`
    itself checks the model's graph up to its last output of the batch's size; this check also finds
    a loss that couples samples, a sum in place of a mean, and a mean over tokens without weights.

    Both begin with the same random state. Dropout draws other masks for a group alone, so if the
    loss is random, everything except BatchNorm is compared in eval mode. Weights, buffers, `.grad`,
    training modes and random states are as before. Call it before a GradientMeter, an AdaptiveBatch
    or fully_shard gets the model; a DDP model is checked without its ranks. It needs memory for
    k + 3 gradients. Call it under autocast if training does, with tolerance=0.1.

    Args:
        model: the model; all its parameters that require a gradient are checked.
        loss_fn: (output, y) -> mean loss, one number.
        x: the input of samples in dimension 0: a tensor, a tuple of positional arguments, or a
            mapping of keyword arguments.
        y: the second argument of `loss_fn`, cut like x; None if it needs none.
        groups: k, at most the number of samples.
        weight: the weight of each sample in the mean, (B,), as for `step.backward`; default: its
            labels in a mean cross entropy, else 1.
        tolerance: largest error of a parameter that is `ok`.
    Returns:
        A `GroupCheck`: `ok`, and for each parameter its share of |G|^2 and its error, or why it is
        refused.
    Raises:
        SettingError: fewer than two samples, a sharded model, no parameter to check, a loss that is
            not one number, or random in eval mode too.
        BatchError: x or y cannot be cut along its samples.
    Example:
        >>> model, x, y = nn.Linear(3, 1), torch.arange(24.0).view(8, 3), torch.zeros(8, 1)
        >>> check_groups(model, nn.functional.mse_loss, x, y, groups=4).ok
        True
        >>> def square_of_mean(output, y):  # not a mean over samples
        ...     return output.mean().square()
        >>> check_groups(model, square_of_mean, x, groups=4).ok
        False
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    named = model.named_parameters()
    names: dict[Tensor, str] = {p: name for name, p in named if p.requires_grad}
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
        mode = _set_mode(model, lambda: _loss(model, loss_fn, x, y))
        random = random_state()
        loss = _loss(model, loss_fn, x, y)
        labels = label_weights(loss, samples) if weight is None else None
        if labels is not None and len(labels) == samples:
            weight = labels
        compared = _ComparedGradients(model, names, grouping, weight, loss)
        for d, (lo, hi) in enumerate(pairwise(accumulate(grouping.sizes, initial=0))):
            if compared.weights[d]:
                restore_random_state(random)
                part = None if y is None else slice_samples(y, lo, hi)
                compared.add_group(d, _loss(model, loss_fn, slice_samples(x, lo, hi), part))
    one_backward, loop = compared.statistics()
    return GroupCheck(
        samples, grouping.groups, compared.parameters(), one_backward, loop, tolerance, mode
    )


class _ComparedGradients:
    """The groups' gradients of one backward, h_d, and of a backward for each group, h'_d."""

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[Tensor, str],
        grouping: Grouping,
        weight: Tensor | None,
        loss: Tensor,
    ) -> None:
        self.weights = [*(grouping.sizes if weight is None else grouping.sums(weight))]
        self._names = names
        tap = GroupTap(
            grouping.groups, lambda leaves: [p if p in names else None for p in leaves], {}, model
        )
        tap.exact = True
        tap.prepare([loss], grouping.samples, weight)
        self._whole = gradients_of(loss, list(names))  # G
        self._refusals = tap.refusals
        self._groups: dict[Tensor, Tensor] = {}  # h_d, (k, *shape)
        for parameter, gradient in self._whole.items():
            groups = tap.take(parameter, gradient)
            if groups is not None and not tap.refusals.get(parameter):
                self._groups[parameter] = groups.gradients
        tap.forget()
        self._sums = {p: torch.zeros_like(p) for p in self._groups}  # sum_d h'_d
        self._errors = dict.fromkeys(self._groups, 0.0)  # sum_d |h_d - h'_d|^2
        self._squares = dict.fromkeys(self._groups, 0.0)  # sum_d |h'_d|^2
        self._scatters = [0.0, 0.0]  # sum_d |h_d|^2 / n_d, sum_d |h'_d|^2 / n_d

    def add_group(self, d: int, loss: Tensor) -> None:
        """Runs the backward of the mean loss of group d alone."""
        share = self.weights[d] / sum(self.weights)
        gradients = gradients_of(loss, list(self._groups))
        for parameter, groups in self._groups.items():
            expected = share * gradients.get(parameter, torch.zeros_like(parameter))
            own, square = _square(groups[d]), _square(expected)
            self._sums[parameter] += expected
            self._squares[parameter] += square
            self._errors[parameter] += _square(groups[d].to(expected.dtype) - expected)
            self._scatters[0] += own / self.weights[d]
            self._scatters[1] += square / self.weights[d]

    def parameters(self) -> tuple[ParameterCheck, ...]:
        """The result of every parameter that has a gradient."""
        squares = {p: _square(g) for p, g in self._whole.items()}
        total = math.fsum(squares.values()) or 1.0
        smallest = _SMALL**2 * math.fsum(self._squares.values())
        return tuple(
            ParameterCheck(
                self._names[p],
                tuple(p.shape),
                square / total,
                self._refusals.get(p, ""),
                math.sqrt(self._errors[p] / (max(self._squares[p], smallest) or 1.0))
                if p in self._groups
                else math.nan,
            )
            for p, square in squares.items()
        )

    def statistics(self) -> tuple[GradientStatistics, GradientStatistics]:
        """Statistics of the groups of one backward, and of the loop; over covered parameters."""
        k, n = sum(map(bool, self.weights)), sum(self.weights)
        sums = (self._whole[p] for p in self._groups), self._sums.values()
        squares = (math.fsum(map(_square, gradients)) for gradients in sums)
        one_backward, loop = (
            # sums that do not fit together are what is looked for
            from_weighted_losses(scatter, square, k, n, eps=math.inf)
            for scatter, square in zip(self._scatters, squares, strict=True)
        )
        return one_backward, loop


def gradients_of(loss: Tensor, parameters: list[Tensor]) -> dict[Tensor, Tensor]:
    """The gradients of the parameters that the loss reaches; writes to no `.grad`."""
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True) if parameters else ()
    return {p: g for p, g in zip(parameters, gradients, strict=True) if g is not None}


def _loss(model: nn.Module, loss_fn: LossFunction, x: Batch, y: Batch) -> Tensor:
    """The loss of a batch, checked."""
    if isinstance(x, Mapping):
        output = model(**x)
    else:
        output = model(*x) if isinstance(x, tuple) else model(x)
    return one_number(loss_fn(output, y), "loss_fn").reshape(())


def _set_mode(model: nn.Module, loss_of: Callable[[], Tensor]) -> str:
    """Puts the model into eval mode, without BatchNorm, if its loss is random; the mode."""
    mode = "train" if model.training else "eval"
    if not _is_random(loss_of):
        return mode
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.training = False
    if _is_random(loss_of):
        raise SettingError(
            "the loss is random in eval mode too, so two backwards of the same samples differ; "
            "draw random numbers in the loader, or only if module.training"
        )
    return "eval"


@torch.no_grad()
def _is_random(loss_of: Callable[[], Tensor]) -> bool:
    """Whether the loss differs between two random states."""
    return float(loss_of()) != float(loss_of())


def _square(tensor: Tensor) -> float:
    dtype = widest_float(tensor.device)
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=dtype)) ** 2
