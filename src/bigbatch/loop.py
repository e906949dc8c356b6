"""Measure, decide, act, around the user's own loop."""

import math
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bigbatch.act.batches import Batches
from bigbatch.act.learning_rate import AdaScale, Scaling, multiplied, scaling_named
from bigbatch.act.progress import BaseBatchClock
from bigbatch.act.randomness import random_state, restore_random_state
from bigbatch.act.samples import Batch
from bigbatch.decide.controller import Controller
from bigbatch.decide.plan import BatchPlan, require_positive
from bigbatch.decide.policy import Decision, Policy, Progress
from bigbatch.errors import LoopError, SettingError, StateError
from bigbatch.measure.meter import GradientMeter
from bigbatch.optim.diagnostics import Factors
from bigbatch.optim.variance_reduced import VarianceReduced
from bigbatch.step import Reading, Step, StepRecord

_STATE_VERSION = 1


class AdaptiveBatch:
    """A training loop whose batch size follows a policy; everything else stays the user's.

        for epoch in train.epochs(10):
            for step in train:                          # one optimizer update each
                for x, y in step:                       # its micro-batches
                    step.backward(loss_fn(model(x), y))
                record = step.update()

    Args:
        model: whose gradients are measured.
        optimizer: any torch optimizer; a `VarianceReduced` one shares the measurement.
        loader: any iterable of batches, or `Batches` with options of its own.
        policy: decides the batch size after every step.
        batch_size: where it starts, in samples; default: that of a `Fixed` policy, or the loader's.
        base_batch: batch size that the learning rate was tuned for; default `batch_size`.
        micro_batch: most samples in one backward; default: the loader's own batch size.
        min_micro_batches: least backwards per step, at least 2; default 4, and 8 with a
            `VarianceReduced` optimizer.
        lr_scaling: "sqrt", "linear", "adascale", None, or a function of (batch, base, noise).
        scheduler: a scheduler that counts steps, advanced once per base batch of samples.
        scaler: a GradScaler, where float16 needs one.
        meter: a GradientMeter of your own.
    Raises:
        SettingError: a setting that cannot work, with the remedy.
    Source:
        SimiGrad (Qin et al., NeurIPS 2021); docs/theory.md.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Iterable[Batch] | Batches,
        *,
        policy: Policy,
        batch_size: int | None = None,
        base_batch: int | None = None,
        micro_batch: int | None = None,
        min_micro_batches: int | None = None,
        lr_scaling: str | Scaling | None = "sqrt",
        scheduler: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        meter: GradientMeter | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.batches = loader if isinstance(loader, Batches) else Batches(loader)
        self.scaler = scaler
        self.epoch = self.samples = self.steps = self.skipped = 0
        self._max_micro = self._given_or_loaders("micro_batch", micro_batch)
        own = getattr(policy, "batch_size", None) if batch_size is None else batch_size
        start = self._given_or_loaders("batch_size", own)
        least = 8 if isinstance(optimizer, VarianceReduced) else 4
        self._min_micro_batches = least if min_micro_batches is None else min_micro_batches
        require_positive(min_micro_batches=self._min_micro_batches)
        if self._min_micro_batches < 2:
            raise SettingError("min_micro_batches=1 leaves nothing to compare; at least 2")
        base_batch = start if base_batch is None else base_batch
        self._require_samples(policy)
        self.controller = Controller(policy, start, base_batch, max_batch=self.batches.samples)
        self._raise_lower_bound(policy)
        if self.controller.decision.batch_size != start:
            warnings.warn(
                f"batch_size={start} is out of bounds; training starts with "
                f"{self.controller.decision.batch_size}",
                stacklevel=2,
            )
        self._scaling = scaling_named(lr_scaling, base_batch)
        self._clock = BaseBatchClock(base_batch, optimizer)
        self.scheduler = scheduler
        self.meter = self._share_source(meter or GradientMeter(model))
        self.plan = self._fit(self.controller.decision)
        self._step: Step | None = None
        self._seconds_before = 0.0
        self._started = time.perf_counter()

    @property
    def scheduler(self) -> LRScheduler | None:
        """The scheduler that is advanced in base batches; may be set before the first step."""
        return self._clock.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: LRScheduler | None) -> None:
        self._clock.scheduler = scheduler

    @property
    def seconds(self) -> float:
        """Time spent training, over all resumptions."""
        return self._seconds_before + time.perf_counter() - self._started

    def base_steps(self, epochs: float) -> int:
        """How often the scheduler is advanced in so many epochs: samples / base batch, rounded up.

        Raises:
            SettingError: the loader does not say how many samples an epoch has.
        """
        if self.batches.samples is None:
            raise SettingError(
                "the loader has no known length; state the schedule's total yourself"
            )
        return math.ceil(epochs * self.batches.samples / self._clock.base_batch)

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs still to do of `total`; a resumed run begins with the one it was in."""
        while self.epoch < total:
            yield self.epoch

    def __iter__(self) -> Iterator["Step"]:
        """One pass over the loader; after a `break`, the rest of it."""
        self._require_updated()
        fresh, before = not self.batches.open, self.samples
        if fresh:
            self.batches.start(self.epoch)
        while self.batches.has_step(self.plan):
            self.meter.add(self._trained())
            cut = self.batches.step(self.plan, self.controller.min_batch, self.controller.max_batch)
            self._step = Step(cut, self.meter, self.optimizer, self.scaler, self._finish)
            yield self._step
            self._require_updated()
        if fresh and self.samples == before:
            raise LoopError(
                "the loader gave no step; is it empty or used up, or shorter than one step that "
                "tail='drop' leaves out?"
            )
        self._learn_length()
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """All but model, optimizer and scaler; loads with `weights_only=True`.

        Raises:
            LoopError: inside a step, between its first micro-batch and `update()`.
        """
        self._require_updated()
        scaling = self._scaling.state_dict() if isinstance(self._scaling, AdaScale) else None
        return {
            "version": _STATE_VERSION,
            "controller": self.controller.state_dict(),
            "clock": self._clock.state_dict(),
            "scaling": scaling,
            "batches": self.batches.state_dict(),
            "measured": self.meter.step,
            "counts": [self.epoch, self.samples, self.steps, self.skipped],
            "seconds": self.seconds,
            "random": random_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken, in the middle of an epoch too.

        Model, optimizer and scaler are loaded by the user; policy and bounds are those given at
        construction. The random generators are restored last, so load this last.

        Raises:
            StateError: the state is of another version, or of other data.
        """
        if state.get("version") != _STATE_VERSION:
            raise StateError(
                f"state version {state.get('version')} is not {_STATE_VERSION}, which this "
                "release reads; resume with the release that wrote it"
            )
        self.controller.load_state_dict(state["controller"])
        self._clock.load_state_dict(state["clock"])
        if isinstance(self._scaling, AdaScale) and state["scaling"] is not None:
            self._scaling.load_state_dict(state["scaling"])
        self.epoch, self.samples, self.steps, self.skipped = state["counts"]
        self._seconds_before, self._started = state["seconds"], time.perf_counter()
        self._step = None
        self.meter.source.zero_grad()
        self.meter.at_step(state["measured"])
        self.batches.load_state_dict(state["batches"], self.epoch)
        self._learn_length()
        restore_random_state(state["random"])

    # construction

    def _given_or_loaders(self, name: str, given: int | None) -> int:
        size = self.batches.batch_size if given is None else given
        if size is None:
            raise SettingError(f"the loader does not say its batch size; pass {name}=")
        require_positive(**{name: size})
        return size

    def _require_samples(self, policy: Policy) -> None:
        asked, there = getattr(policy, "min_batch", 1), self.batches.samples
        if there is not None and asked > there:
            raise SettingError(f"min_batch={asked} exceeds the {there} samples of an epoch")

    def _raise_lower_bound(self, policy: Policy) -> None:
        """No step is smaller than what can be cut into enough micro-batches."""
        smallest = self._fit_between(1, 1, self._min_micro_batches).batch_size
        asked = getattr(policy, "min_batch", 1)
        if 1 < asked < smallest:
            warnings.warn(
                f"min_batch={asked} is raised to {smallest}, the smallest step that can be cut "
                f"into {self._min_micro_batches} micro-batches",
                stacklevel=3,
            )
        self.controller.limit(min_batch=smallest)

    def _learn_length(self) -> None:
        """A loader that does not say its length has shown it after one pass."""
        longest = self.batches.samples
        if longest is not None and longest >= self.controller.min_batch:
            self.controller.limit(max_batch=longest)
        self.plan = self._fit(self.controller.decision)

    def _fit(self, decision: Decision) -> BatchPlan:
        """A step that nobody measures may be one backward."""
        compared = self.meter.due or isinstance(self.optimizer, VarianceReduced)
        least = self._min_micro_batches if compared else 1
        return self._fit_between(decision.batch_size, self.controller.min_batch, least)

    def _fit_between(self, batch_size: int, min_batch: int, least: int) -> BatchPlan:
        return BatchPlan.fit(
            batch_size,
            max_micro=self._max_micro,
            min_micro_batches=least,
            min_batch=min_batch,
            max_batch=self.controller.max_batch,
        )

    def _share_source(self, meter: GradientMeter) -> GradientMeter:
        """One set of hooks serves the meter and the optimizer, armed inside step.backward only."""
        if meter.loss != "weighted":
            raise SettingError(
                'AdaptiveBatch weighs the losses itself: GradientMeter(loss="weighted")'
            )
        if meter.source.ranks > 1:
            raise SettingError(
                f"{meter.source.ranks} ranks found: this release adapts the batch of one process; "
                "with more, measure by GradientMeter alone"
            )
        meter.source.explicit = True
        meter.scaler = self.scaler
        trained = self._trained()
        if not set(trained) & set(self.model.parameters()):
            raise SettingError("the optimizer holds no parameter of the model; build it from it")
        meter.add(trained)
        if isinstance(self.optimizer, VarianceReduced):
            self.optimizer.follow(meter.source)
        return meter

    def _trained(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _require_updated(self) -> None:
        if self._step is not None and not self._step.ended:
            raise LoopError("the last step was not finished: call step.update() at its end")

    # what ends a step

    def _finish(self, step: Reading) -> StepRecord:
        """Decides, steps, zeroes the gradients."""
        factor = self._scaling(step.samples, self._clock.base_batch, step.noise)
        factor *= self.controller.decision.lr_factor
        if not (math.isfinite(factor) and factor >= 0):
            raise SettingError(f"the learning-rate factor {factor} is not finite and positive")
        target = self.controller.decision.batch_size
        with multiplied(self.optimizer, factor) as lr:
            decision = self._decide(step, lr)
            self._optimize(step.finite)
        self.samples += step.samples
        if step.finite:
            self.steps += 1
            self._clock.advance(step.samples)
        else:
            self.skipped += 1
        self.meter.source.zero_grad()
        self.meter.next_step()
        self.plan = self._fit(decision)
        return StepRecord(
            step=self.steps + self.skipped,
            epoch=self.epoch,
            samples=self.samples,
            batch_size=step.samples,
            target=target,
            micro_batches=step.micro_batches,
            loss=step.loss,
            lr=tuple(lr),
            noise=step.noise,
            skipped=not step.finite,
            decision=decision,
            seconds=self.seconds,
            factors=self._factors() if step.finite else None,
        )

    def _factors(self) -> Factors | None:
        return self.optimizer.factors if isinstance(self.optimizer, VarianceReduced) else None

    def _decide(self, step: Reading, lr: list[float]) -> Decision:
        held = self.controller.decision
        if not step.finite:
            return Decision(held.batch_size, "skipped: the gradient is not finite", held.lr_factor)
        spans_epoch = self.batches.given_out == step.samples  # the first step of a pass
        if step.samples != self.plan.batch_size and not spans_epoch:
            return Decision(held.batch_size, "the end of an epoch does not decide", held.lr_factor)
        if step.noise is None:
            return Decision(held.batch_size, "not measured", held.lr_factor)
        now = Progress(
            target=held.batch_size,
            batch_size=step.samples,
            base_batch=self._clock.base_batch,
            samples=self.samples + step.samples,
            steps=self.steps + 1,
            epoch=self.epoch,
            lr=tuple(lr),
            seconds=self.seconds,
        )
        return self.controller.next(step.noise, now)

    def _optimize(self, finite: bool) -> None:
        if self.scaler is None:
            if finite:
                self.optimizer.step()
            return
        if finite:
            self.scaler.step(self.optimizer)
        else:
            with suppress(RuntimeError):  # unscaled already, by clipping
                self.scaler.unscale_(self.optimizer)
        self.scaler.update()
