"""The learning rates of each step: the schedule, the factor of the batch size, half-lives."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from bigbatch.errors import SettingError
from bigbatch.policies.controller import Controller
from bigbatch.policies.lr_scaling import LRScaling, resolve_scaling
from bigbatch.policies.policy import Fixed, has_state
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.training.scaled_lr import scale_lr
from bigbatch.training.scheduler import BaseBatchScheduler, LRChanges
from bigbatch.training.training_parts import TrainingParts
from bigbatch.training.transport import require_transportable, transported


class StepRates:
    """Sets the rates of a step, and advances the schedule after it.

        rate = scheduled rate x rule(batch size, base batch, statistics) x lr_factor of the policy

    With `transport` half-lives are kept in samples.

    Raises:
        SettingError: an unknown rule, or one that counteracts the policy; or transport does not go
            with the optimizer or the bounds.
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
        base_batch, lr_factor = self.clock.base_batch, self._controller.decision.lr_factor
        factors = tuple(self._scaling(size, base_batch, None) * lr_factor for size in batch_sizes)
        if scaling is not None:
            scaling.load_state_dict(saved)
        return factors

    def in_force(
        self, samples: int, statistics: GradientStatistics | None
    ) -> AbstractContextManager[list[float]]:
        """The rates of a step of so many samples inside the block, one per group."""
        scale: float = self._scaling(samples, self.clock.base_batch, statistics)
        scaled = scale_lr(self._optimizer, scale * self._controller.decision.lr_factor)
        return self._transported(scaled, samples, scale) if self._transports else scaled

    @contextmanager
    def _transported(
        self, scaled: AbstractContextManager[list[float]], samples: int, scale: float
    ) -> Iterator[list[float]]:
        """The same, with half-lives that are kept in samples."""
        ratio = samples / self.clock.base_batch
        with scaled as rates, transported(self._optimizer, ratio, scale):
            yield rates

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks."""
        scaling = self._scaling.state_dict() if has_state(self._scaling) else None
        return {"clock": self.clock.state_dict(), "scaling": scaling}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state; the state of another scaling rule is left out.

        Raises:
            StateError: the schedule is another one.
        """
        self.clock.load_state_dict(state["clock"])
        same_rule = state["settings"]["lr_scaling"] == self.rule
        if same_rule and has_state(self._scaling) and state["scaling"] is not None:
            self._scaling.load_state_dict(state["scaling"])
