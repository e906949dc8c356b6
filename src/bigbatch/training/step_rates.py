"""The rates of each step: the schedule, the factor of the batch size, half-lives in samples."""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import AdamW, Optimizer

from bigbatch.errors import LoopError, SettingError
from bigbatch.optim.optimizer_settings import rates_of
from bigbatch.policies.controller import Controller
from bigbatch.policies.lr_scaling import LRScaling, resolve_scaling
from bigbatch.policies.policy import Fixed, has_state
from bigbatch.setting_types import Count, Share, checked
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.training.scheduler import RATE_OF, BaseBatchScheduler, LRChanges, RateSnapshot
from bigbatch.training.training_parts import TrainingParts

RatesInForce = AbstractContextManager[list[float]]  # those of each group, inside the block

_TRANSPORTED = "betas", "weight_decay"

RANGE = 4  # the range that transport was measured in: B / B_base from 1/4 to 4


class StepRates:
    """Sets the rates of a step, and advances the schedule after it.

        rate = scheduled rate x rule(batch size, base batch, statistics) x lr_factor of the policy

    With `transport` half-lives are kept in samples.
    """

    def __init__(
        self,
        parts: TrainingParts,
        lr_scaling: LRScaling,
        controller: Controller,
        *,
        transport: bool,
    ) -> None:
        optimizer, is_vr = parts.optimizer, parts.reader is not None
        self.rule = repr(lr_scaling) if isinstance(lr_scaling, str | None) else "a function"
        self.clock = BaseBatchScheduler(controller.base_batch, optimizer)
        self.clock.follows_rates = controller.needs.lr_decay
        policy = type(controller.policy).__name__
        follower = policy if controller.needs.lr_decay else ""
        self.changes = LRChanges(optimizer, warns=parts.warns, follower=follower)
        self._optimizer, self._controller, self._transports = optimizer, controller, transport
        self._scaling: Any = resolve_scaling(lr_scaling, controller.base_batch)
        if (needed := controller.needs.lr_scaling) not in ("any", lr_scaling):
            raise SettingError(
                f"lr_scaling={lr_scaling!r} with {policy}, which changes the learning rate itself, "
                f"gives a wrong one; pass lr_scaling={needed!r}"
            )
        if transport:
            is_fixed, size = isinstance(controller.policy, Fixed), controller.decision.batch_size
            bounds = (size, size) if is_fixed else (controller.min_batch, controller.max_batch)
            require_transportable(optimizer, controller.base_batch, *bounds, is_vr=is_vr)

    def factors_of(self, batch_sizes: Sequence[int]) -> tuple[float, ...]:
        """The factor that a step of each size would have, not measured; keeps the rule's state."""
        scaling = self._scaling if has_state(self._scaling) else None
        saved = None if scaling is None else copy.deepcopy(scaling.state_dict())
        base_batch, lr_factor = self._controller.base_batch, self._controller.decision.lr_factor
        factors = tuple(self._scaling(size, base_batch, None) * lr_factor for size in batch_sizes)
        if scaling is not None:
            scaling.load_state_dict(saved)
        return factors

    def in_force(self, samples: int, statistics: GradientStatistics | None) -> RatesInForce:
        """The rates of a step of so many samples inside the block, one per group."""
        scale: float = self._scaling(samples, self._controller.base_batch, statistics)
        rates = scale_lr(self._optimizer, scale * self._controller.decision.lr_factor)
        if self._transports:
            ratio = samples / self._controller.base_batch
            rates = transported(rates, self._optimizer, ratio, scale)
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks."""
        scaling = self._scaling.state_dict() if has_state(self._scaling) else None
        return {"clock": self.clock.state_dict(), "scaling": scaling}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state; the state of another scaling rule is left out."""
        self.clock.load_state_dict(state["clock"])
        same_rule = state["settings"]["lr_scaling"] == self.rule
        if same_rule and has_state(self._scaling) and state["scaling"] is not None:
            self._scaling.load_state_dict(state["scaling"])


def scale_lr(optimizer: Optimizer, factor: float) -> RatesInForce:
    """Multiplies every group's learning rate inside the block and restores it afterwards.

        lr <- factor lr,   and after the block lr as it was, to the last bit

    Gives the rates in force, one per group; nan for a group without one. A tensor stays the same
    tensor, as compiled and captured steps need; one that several groups share is multiplied once.
    A factor of 1 changes nothing, so an optimizer may then set rates inside its `step()`; with any
    other one a rate that was set inside the block raises LoopError at its end.
    """
    factor = float(factor)
    if not 0 <= factor < math.inf:
        raise SettingError(f"the learning-rate factor {factor} is not finite, or negative")
    return nullcontext(rates_of(optimizer)) if factor == 1 else _scaled(optimizer, factor)


@contextmanager
def _scaled(optimizer: Optimizer, factor: float) -> Iterator[list[float]]:
    groups = [*optimizer.param_groups]
    saved: list[Any] = [*map(RATE_OF, groups)]
    for number, lr in enumerate(saved):
        if lr is None:
            raise SettingError(
                f"parameter group {number} has no learning rate to scale; give it lr=, or pass "
                "lr_scaling=None"
            )
    tensors = {lr: lr.detach().clone() for lr in saved if isinstance(lr, Tensor)}
    rates_of(optimizer)  # raises an error for what is no rate
    try:
        for tensor in tensors:
            tensor.detach().mul_(factor)
        for group, lr in zip(groups, saved, strict=True):
            if not isinstance(lr, Tensor):
                group["lr"] = lr * factor
        rates = rates_of(optimizer)
        scaled = RateSnapshot(groups)
        yield rates
        for number, _, lr in scaled.changes():
            other = lr.item() if isinstance(lr, Tensor) else lr
            if other != rates[number]:
                raise LoopError(
                    f"the learning rate of parameter group {number} was set to {other} during the "
                    f"step, where AdaptiveBatch had set {rates[number]}; set it between the steps, "
                    "or pass lr_scaling=None"
                )
    finally:
        for group, lr in zip(groups, saved, strict=True):
            group["lr"] = lr
        for tensor, value in tensors.items():
            tensor.detach().copy_(value)


def require_transportable(
    optimizer: Optimizer, base_batch: int, min_batch: int, max_batch: int | None, *, is_vr: bool
) -> None:
    """Raises SettingError for an optimizer or batch sizes with which `transported` cannot help."""
    name, problem = type(optimizer).__name__, ""
    if is_vr:
        problem = f"{name}, whose own averages (beta3, those of GSNR) would not follow"
    for number, group in enumerate(optimizer.param_groups):
        betas, decay = group.get("betas"), group.get("weight_decay", 0)
        if betas is None or any(isinstance(beta, Tensor) for beta in betas):
            kind = "no betas" if betas is None else "betas that are tensors"
            problem = problem or f"parameter group {number} of {name} has {kind}"
        elif decay and not _is_decoupled(optimizer, group):
            problem = problem or (
                f"the weight_decay={decay} of {name} is added to the gradient, or does not say "
                "that it is decoupled (decoupled_weight_decay=True in its group)"
            )
    if problem:
        raise SettingError(f"transport=True: {problem}; use AdamW, or leave transport out")
    low, high = -(-base_batch // RANGE), RANGE * base_batch
    if min_batch < low or max_batch is None or max_batch > high:
        raise SettingError(
            f"transport=True: batch sizes from {min_batch} to {max_batch} around base_batch="
            f"{base_batch}; it helps within a factor of {RANGE} (docs/policies.md); pass a policy, "
            f"or a Controller, with min_batch={low} and max_batch={high}"
        )


@contextmanager
def transported(
    scaled: RatesInForce, optimizer: Optimizer, ratio: float, lr_factor: float
) -> Iterator[list[float]]:
    """`scaled`, with half-lives and weight decay per sample kept inside; restored afterwards.

        betas <- betas^ratio,    weight decay <- ratio / lr_factor x weight decay

    `lr_factor` is in the learning rate already, so the decay of a step, rate x weight decay, is
    multiplied by `ratio`. A ratio beyond the measured range, such as that of the last samples of an
    epoch, counts as its end.
    """
    ratio = min(max(ratio, 1 / RANGE), RANGE)
    groups = [*optimizer.param_groups]
    saved = [{name: group[name] for name in _TRANSPORTED if name in group} for group in groups]
    try:
        for group in groups:
            betas, decay = group["betas"], group.get("weight_decay", 0)
            group["betas"] = type(betas)(beta**ratio for beta in betas)
            if decay and lr_factor and _is_decoupled(optimizer, group):
                group["weight_decay"] = decay * ratio / lr_factor
        with scaled as rates:
            yield rates
    finally:
        for group, values in zip(groups, saved, strict=True):
            group.update(values)


def _is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a group's weight decay shrinks the weights by rate x decay, past the gradient."""
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))


@checked
def ema_decay(decay: Share, batch_size: Count, base_batch: Count) -> float:
    """The decay of an exponential average that keeps its half-life in samples.

        decay_B = decay^(B / B_base)

    One update of a step of B samples then forgets as much as B / B_base updates of base batches.

    Args:
        decay: decay for an update after every step of `base_batch` samples.
        batch_size: B, samples of the step that the average is updated after.
        base_batch: B_base, samples of the step that `decay` was chosen for.
    Raises:
        SettingError: a decay outside [0, 1), or a size below 1.
    Source:
        Marek et al. 2025 (arXiv 2507.07101), for Adam's beta2.
    Example:
        >>> ema_decay(0.5, batch_size=512, base_batch=128)
        0.0625
    """
    return float(decay ** (batch_size / base_batch))
