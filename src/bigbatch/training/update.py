"""What ends a step: the decision, the optimizer, the schedule, the record."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from statistics import fmean
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer

from bigbatch.errors import LoopError, SettingError
from bigbatch.optim.variance_reduced import VarianceReduced
from bigbatch.policies.controller import Controller, has_state
from bigbatch.policies.policy import Decision, TrainingState
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.training.lr_scaling import LRScaling, multiplied, scaling_named
from bigbatch.training.scheduler import BaseBatchScheduler
from bigbatch.training.step_record import StepRecord, StepStatistics


class Update:
    """Decides, steps the optimizer, advances the schedule and counts, once for every step.

    Args:
        optimizer: steps, at the learning rate that belongs to the batch.
        scaler: of its gradients, or None.
        controller: decides.
        lr_scaling: how the learning rate follows the batch.
        ranks: that policies are told of.
    Raises:
        SettingError: an unknown rule, or one that a schedule which decays would undo.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: GradScaler | None,
        controller: Controller,
        lr_scaling: LRScaling,
        ranks: int,
    ) -> None:
        self.epoch = self.samples = self.steps = self.skipped = 0
        self.clock = BaseBatchScheduler(controller.base_batch, optimizer)
        self.rule = repr(lr_scaling) if isinstance(lr_scaling, str | None) else "a function"
        self._scaling: Any = scaling_named(lr_scaling, controller.base_batch)
        self._optimizer, self._scaler = optimizer, scaler
        self._reduced = optimizer if isinstance(optimizer, VarianceReduced) else None
        self._controller = controller
        self._ranks = ranks
        self.record: StepRecord | None = None  # of the last step
        self._half_done = False  # whether one has failed after it may have changed something
        if lr_scaling is not None and getattr(controller.policy, "decays", False):
            raise SettingError(
                "the schedule grows the batch instead of lowering the learning rate, which "
                f"lr_scaling={lr_scaling!r} would raise with it; pass lr_scaling=None (a command's "
                "--lr-scaling none)"
            )

    @contextmanager
    def around(self, step: StepStatistics, *, decides: bool) -> Iterator[None]:
        """Ends a step; inside, the learning rate is that of the batch, for the optimizer's step.

        Args:
            step: what was measured.
            decides: whether the step may; the end of an epoch that is no whole one does not.
        Raises:
            LoopError: the scheduler is missing or not where it was left, and nothing is changed;
                or the step has failed here before.
        """
        self.clock.require_ready()
        if self._half_done:
            raise LoopError("update() has failed half way before; load a state from before it")
        held, seconds = self._controller.decision, fmean(seconds for seconds, _ in step.told)
        factor = self.factor(step.samples, step.statistics)
        with multiplied(self._optimizer, factor) as lr:
            self._half_done = True
            decision = self._decide(step, lr, seconds, decides=decides)
            yield
        self.samples += step.samples
        if step.finite:
            self.steps += 1
            self.clock.advance(step.samples)
        else:
            self.skipped += 1
        self._half_done = False
        self.record = StepRecord(
            step=self.steps + self.skipped,
            epoch=self.epoch,
            samples=self.samples,
            batch_size=step.samples,
            target_batch_size=held.batch_size,
            micro_batches=step.micro_batches,
            loss=step.loss,
            lr=tuple(lr),
            statistics=step.statistics,
            skipped=not step.finite,
            decision=decision,
            elapsed_seconds=seconds,
            gsnr=self._reduced.gsnr if self._reduced and step.finite else None,
        )

    def factor(self, batch_size: int, noise: GradientStatistics | None) -> float:
        """What the learning rate is multiplied by in a step of so many samples."""
        scale: float = self._scaling(batch_size, self.clock.base_batch, noise)
        return scale * self._controller.decision.lr_factor

    def step_optimizer(self, finite: bool) -> None:
        """The optimizer's own step; where the gradient is not finite, what the scaler wants."""
        if self._scaler is None:
            if finite:
                self._optimizer.step()
            return
        if finite:
            self._scaler.step(self._optimizer)
        else:
            with suppress(RuntimeError):  # unscaled already, by clipping
                self._scaler.unscale_(self._optimizer)
        self._scaler.update()

    def facts(self) -> dict[str, Any]:
        """What has to be the same on all ranks, by name."""
        scaler, record = self._scaler, self.record
        return {
            "epoch": self.epoch,
            "samples": self.samples,
            "steps": self.steps,
            "skipped": self.skipped,
            "scheduler": type(self.clock.scheduler).__name__,
            "scaler": None if scaler is None else type(scaler).__name__,
            "learning rates of the last step": None if record is None else record.lr,
        }

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on."""
        remembers = has_state(self._scaling)
        return {
            "controller": self._controller.state_dict(),
            "clock": self.clock.state_dict(),
            "scaling": [self.rule, self._scaling.state_dict() if remembers else None],
            "counts": [self.epoch, self.samples, self.steps, self.skipped],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state; what another rule remembered is left.

        Raises:
            StateError: the schedule is another one.
        """
        self._controller.load_state_dict(state["controller"])
        self.clock.load_state_dict(state["clock"])
        rule, remembered = state["scaling"]
        if rule == self.rule and has_state(self._scaling) and remembered is not None:
            self._scaling.load_state_dict(remembered)
        self.epoch, self.samples, self.steps, self.skipped = state["counts"]
        self._half_done = False

    def _decide(
        self, step: StepStatistics, lr: list[float], seconds: float, *, decides: bool
    ) -> Decision:
        held = self._controller.decision
        if not step.finite:
            return Decision(held.batch_size, "skipped: the gradient is not finite", held.lr_factor)
        if not decides:
            return Decision(held.batch_size, "the end of an epoch does not decide", held.lr_factor)
        if step.statistics is None:
            return Decision(held.batch_size, "not measured", held.lr_factor)
        now = TrainingState(
            target_batch_size=held.batch_size,
            batch_size=step.samples,
            base_batch=self.clock.base_batch,
            samples=self.samples + step.samples,
            steps=self.steps + 1,
            epoch=self.epoch,
            ranks=self._ranks,
            lr=tuple(lr),
            elapsed_seconds=seconds,
        )
        return self._controller.next(step.statistics, now)
