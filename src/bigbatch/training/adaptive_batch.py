"""Measure, decide, act, around the user's own loop."""

import math
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, NoReturn

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bigbatch.data.batches import Batches
from bigbatch.data.collate import Batch
from bigbatch.data.external_batches import ExternalBatches
from bigbatch.data.micro_batches import Cut
from bigbatch.data.rank_consistency import HostCollectives, checksum
from bigbatch.data.rank_facts import facts_of, optimizer_facts
from bigbatch.data.rng_state import random_state, restore_random_state
from bigbatch.errors import LengthError, LoopError, SettingError, StateError
from bigbatch.gradients import GradientSource, parameters_of
from bigbatch.gradients.replaced_parameters import ReplacementCheck
from bigbatch.optim.variance_reduced import VarianceReduced, kind_of
from bigbatch.policies.controller import Controller, warn_of_changes
from bigbatch.policies.plan import BatchPlan
from bigbatch.policies.plan_constraints import Least, PlanConstraints
from bigbatch.policies.policy import Decision, Policy
from bigbatch.setting_types import ELSEWHERE, Count, checked
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.loss_check import LossCheck
from bigbatch.training.lr_changes import LRChanges
from bigbatch.training.lr_scaling import LRScaling
from bigbatch.training.oom_hints import OomHints
from bigbatch.training.optimizer_checks import require_steppable
from bigbatch.training.step import Common, Step, trained_by
from bigbatch.training.step_record import StepRecord, StepStatistics
from bigbatch.training.update import Update

_STATE_VERSION = 2

_NOT_ENDED = (
    "the last step was not finished: call step.update() at its end; where it failed, load a state "
    "from before it"
)


class AdaptiveBatch:
    """A training loop whose batch size follows a policy; everything else stays the user's.

        for epoch in train.epochs(10):
            for step in train:                          # one optimizer update each
                for x, y in step:                       # its micro-batches
                    step.backward(loss_fn(model(x), y))
                record = step.update()

    On several ranks every rank runs the same loop over its own share of the data, with the model
    wrapped by DistributedDataParallel or fully_shard; sizes are over all ranks, and decisions are
    the same on all of them.

    Args:
        model: what is trained; the gradients of what the optimizer trains are measured.
        optimizer: any torch optimizer; a `VarianceReduced` one shares the measurement, and is
            attached to DDP here where it was not: `optimizer.attached.consolidate()` on every
            rank comes before its `state_dict()` then.
        loader: any iterable of batches, or `Batches` with options of its own; `ExternalBatches` where
            another loop gives the micro-batches.
        policy: decides the batch size after every step; or a `Controller` with options of its own,
            which has the starting size and the base batch then.
        batch_size: where it starts, in samples; default: that of a `Fixed` policy, or the loader's
            times the ranks.
        base_batch: batch size that the learning rate was tuned for; default `batch_size`.
        micro_batch: most samples in one backward; default: the loader's own batch size.
        fixed_micro_batch: let every backward have `micro_batch` samples, but at an epoch's end; the
            batch then moves in steps of ranks x micro_batch.
        min_micro_batches: least backwards per step over all ranks, at least 2; default 4, and 8
            with a `VarianceReduced` optimizer; under fully_shard 8 a rank with one.
        lr_scaling: "sqrt", "linear", "adascale", None, or a function of (batch, base, noise);
            where it has `state_dict` and `load_state_dict`, what it remembers is saved too.
        scheduler: a scheduler that counts steps, advanced once per base batch of samples.
        scaler: a GradScaler, where float16 needs one.
        meter: a GradientMeter of your own.
    Raises:
        SettingError: a setting that cannot work, with the remedy.
        RankError: the ranks were given different settings.
    Source:
        SimiGrad (Qin et al., NeurIPS 2021); docs/theory.md.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        optimizer: Annotated[Optimizer, ELSEWHERE],
        loader: Iterable[Batch] | Batches | ExternalBatches,
        *,
        policy: Policy | Controller,
        batch_size: Count | None = None,
        base_batch: Count | None = None,
        micro_batch: Count | None = None,
        fixed_micro_batch: bool = False,
        min_micro_batches: Least | None = None,
        lr_scaling: LRScaling = "sqrt",
        scheduler: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        meter: GradientMeter | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.meter = meter or GradientMeter(model)
        self._slots = ReplacementCheck(model)
        self._share_source(self.meter)
        self._shards = shards_of(optimizer)
        self._agreement = HostCollectives(self.meter.source)
        self.batches = loader if isinstance(loader, Batches | ExternalBatches) else Batches(loader)
        self.batches.share(self._agreement, lockstep=self.meter.source.lockstep)
        if not isinstance(policy, Controller) and batch_size is None:
            batch_size = getattr(policy, "batch_size", None) or self._loaders_size()
        sized = batch_size or isinstance(policy, Controller)
        self._cutting = PlanConstraints(
            self.batches.virtual_ranks,
            _micro_batch(micro_batch or self.batches.batch_size, sized=bool(sized)),
            fixed_micro_batch,
            self._least_micro_batches(min_micro_batches),
        )
        self.controller = self._cutting.controller(
            policy, batch_size, base_batch, self.batches.samples
        )
        ranks = self.batches.virtual_ranks
        self._update = Update(optimizer, scaler, self.controller, lr_scaling, ranks)
        self._rates = LRChanges(optimizer, speaks=self._agreement.rank == 0)
        self.scheduler = scheduler
        self.plan = self._fit(self.controller.decision)
        self._settings = {
            "micro_batch": repr(self._cutting.micro),
            "fixed_micro_batch": repr(fixed_micro_batch),
            "min_micro_batches": repr(self._cutting.least),
            "lr_scaling": self._update.rule,
            "remainder": repr(self.batches.remainder),
            "order": self.batches.order,
            "virtual_ranks": repr(ranks),
        }
        advice = self._give_advice()
        self._losses = LossCheck(speaks=self._agreement.rank == 0, scales=scaler is not None)
        train = partial(_still_there, weakref.ref(self))
        self._common = Common(
            self.meter,
            optimizer,
            scaler,
            self._shards,
            advice,
            self._losses,
            lambda: train()._tell(),
            lambda reading: train()._finish(reading),
            self._update.step_optimizer,
            lambda: train()._update.record,
        )
        self._step: Step | None = None
        self._per_sample: float | None = None  # weight of a sample in the last step
        self._seconds_before = 0.0
        self._started = time.perf_counter()
        self._require_agreement("their settings")

    @property
    def epoch(self) -> int:
        """Passes over the data completed."""
        return self._update.epoch

    @property
    def samples(self) -> int:
        """Samples consumed, over all ranks."""
        return self._update.samples

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return self._update.steps

    @property
    def skipped(self) -> int:
        """Steps left out, their gradient not being finite."""
        return self._update.skipped

    @property
    def record(self) -> StepRecord | None:
        """Of the last step; None before the first."""
        return self._update.record

    @property
    def lr_factor(self) -> float:
        """What the next step's learning rate is multiplied by, before that step is measured."""
        return self._update.factor(self.plan.batch_size, None)

    @property
    def scheduler(self) -> LRScheduler | None:
        """The scheduler that is advanced in base batches; may be set before the first step."""
        return self._update.clock.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: LRScheduler | None) -> None:
        self._update.clock.scheduler = scheduler

    @property
    def scheduler_batch(self) -> float:
        """Samples between two advances of the scheduler: the base batch.

        May be set before the first step, where the schedule was written in other batches.
        """
        return self._update.clock.scheduler_batch

    @scheduler_batch.setter
    def scheduler_batch(self, samples: float) -> None:
        self._update.clock.scheduler_batch = samples

    @property
    def elapsed_seconds(self) -> float:
        """Time spent training, over all resumptions."""
        return self._seconds_before + time.perf_counter() - self._started

    def base_steps(self, epochs: float) -> int:
        """How often the scheduler is advanced in so many epochs: samples / base batch, rounded up.

        Where `scheduler_batch` is another one, samples / that.
        With remainder="drop" fewer: samples that are left out do not count.

        Raises:
            SettingError: the loader does not say how many samples an epoch has.
        """
        if self.batches.samples is None:
            raise SettingError(
                "the loader has no known length; state the schedule's total yourself"
            )
        return math.ceil(epochs * self.batches.samples / self.scheduler_batch)

    def planned(self, batch_size: int) -> BatchPlan:
        """How a measured step of so many samples would be cut, within the bounds."""
        bounds = self.controller.min_batch, self.controller.max_batch
        return self._cutting.plan(batch_size, *bounds)

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs still to do of `total`; a resumed run begins with the one it was in."""
        while self.epoch < total:
            yield self.epoch

    def __len__(self) -> NoReturn:
        raise LengthError(
            "how many steps an epoch has follows from batch sizes that are still to be decided; "
            "train.base_steps(epochs) counts it in base batches, train.steps what is done"
        )

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator["Step"]:
        """One pass over the loader; after a `break`, the rest of it."""
        self._require_none_begun()
        self._require_agreement("where the run stands")
        empty = not self.batches.open  # so far
        if empty:
            self.batches.start(self.epoch)
        while (cut := self._cut()) is not None:
            self._watch_trained()
            self._step = Step(cut, self._common, self._per_sample)
            yield self._step
            empty = False
            if self._step is not None and not self._step.ended:
                raise LoopError(_NOT_ENDED)
            if not self.batches.open:
                return  # a state from between two passes was loaded
        if empty:
            raise LoopError(
                "the loader gave no step; is it empty or used up, or shorter than one step that "
                "remainder='drop' leaves out?"
            )
        self._learn_length()
        self._update.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """All but model, optimizer and scaler; loads with `weights_only=True`.

        Nothing is communicated: "shared" is the same on all ranks, "own" this rank's place in its
        loader and its random states.

        Raises:
            LoopError: inside a step, between its first micro-batch and `update()`. Where another
                loop gives the micro-batches, it is to give those of that step again.
        """
        if not isinstance(self.batches, ExternalBatches):
            self._require_none_begun()
        stands = self.batches.state_dict()
        return {
            "version": _STATE_VERSION,
            "shared": {
                **self._update.state_dict(),
                "settings": dict(self._settings),
                "batch_size": self.plan.batch_size,
                "pass": stands["pass"],
                "per_sample": self._per_sample,
                "measured": self.meter.step,
            },
            "own": {
                "seconds": self.elapsed_seconds,
                "rank": self._agreement.rank,
                "ranks": self._agreement.ranks,
                "stream": stands["stream"],
                "random": random_state(),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken, in the middle of an epoch too. Collective.

        Model, optimizer and scaler are loaded by the user. Policy, bounds and every other setting
        are those given at construction; what has changed is said. On as many ranks each loads its
        own state, and goes on bit for bit (docs/ranks.md has the one exception); on others any
        rank's will do, the run goes on with the same samples, and random states are left as they
        are. They are restored last, so load this last.

        Raises:
            StateError: the state is of another version, or of other data.
        """
        shared, own = _parts(state)
        warn_of_changes(shared["settings"], self._settings)
        self._update.load_state_dict(shared)
        self._per_sample = shared["per_sample"]
        self._seconds_before, self._started = own["seconds"], time.perf_counter()
        self._step = None
        self._zero_grad()
        self.meter.at_step(shared["measured"])
        mine = (own["rank"], own["ranks"]) == (self._agreement.rank, self._agreement.ranks)
        stands = {"pass": shared["pass"], "stream": own["stream"]}
        self.batches.load_state_dict(stands, self.epoch, mine=mine)
        self._learn_length()
        if mine:
            restore_random_state(own["random"])
        elif self._agreement.rank == int((own["rank"], own["ranks"]) == (0, self._agreement.ranks)):
            warnings.warn(
                f"the state is that of rank {own['rank']} of {own['ranks']}: its random states are "
                f"not those of these {self._agreement.ranks} ranks, so dropout and augmentation "
                "draw other numbers",
                stacklevel=2,
            )

    # construction

    def _loaders_size(self) -> int | None:
        """Samples in the loaders' batches of all ranks."""
        size = self.batches.batch_size
        return None if size is None else size * self._agreement.ranks

    def _share_source(self, meter: GradientMeter) -> None:
        """One set of hooks serves the meter and the optimizer, armed inside step.backward only."""
        if meter.loss != "weighted":
            raise SettingError(
                'AdaptiveBatch weighs the losses itself: GradientMeter(loss="weighted")'
            )
        require_steppable(self.optimizer)
        meter.source.explicit = True
        meter.scaler = self.scaler
        if not set(self._watch_trained()) & set(parameters_of(self.model)):
            raise SettingError("the optimizer holds no parameter of the model; build it from it")
        if isinstance(self.optimizer, VarianceReduced):
            self.optimizer.share(meter.source)

    def _watch_trained(self) -> list[Tensor]:
        """What the optimizer trains now, as parameters of the model: that alone is measured."""
        trained = self.meter.source.behind(trained_by(self.optimizer))
        self._slots.require_held(trained)
        self.meter.select(trained)
        return trained

    def _least_micro_batches(self, given: int | None) -> int:
        """Over all ranks; r of a sharded optimizer compares those of one rank."""
        ranks = 1 if self._shards is None else self.meter.source.ranks
        if given is None:
            return 8 * ranks if isinstance(self.optimizer, VarianceReduced) else 4
        if self._shards is not None and given < 2 * ranks:
            raise SettingError(
                f"min_micro_batches={given} on {ranks} ranks may be fewer than 2 on each, which a "
                "variance-reduced optimizer compares under fully_shard, gradients being reduced in "
                f"every backward; pass at least {2 * ranks}, or leave it out"
            )
        return given

    def _give_advice(self) -> OomHints:
        """In every forward of the model, as long as this loop is there."""
        ours = not isinstance(self.batches, ExternalBatches)
        advice = OomHints(self._agreement.rank, self._agreement.ranks, cut_here=ours)
        handle = self.model.register_forward_hook(advice, always_call=True)
        weakref.finalize(self, handle.remove)
        return advice

    # between the steps

    def _cut(self) -> Cut | None:
        rows = 2 if isinstance(self.optimizer, VarianceReduced) else 1  # r needs two micro-batches
        bounds = self.controller.min_batch, self.controller.max_batch
        return self.batches.step(self.plan, *bounds, rows)

    def _learn_length(self) -> None:
        """A loader that does not say its length has shown it after one pass."""
        longest = self.batches.samples
        if longest is not None and longest >= self.controller.min_batch:
            self.controller.limit(max_batch=longest)
        self.plan = self._fit(self.controller.decision)

    def _fit(self, decision: Decision) -> BatchPlan:
        """A step that nobody measures may be one backward."""
        compared = self.meter.due or isinstance(self.optimizer, VarianceReduced)
        bounds = self.controller.min_batch, self.controller.max_batch
        return self._cutting.plan(decision.batch_size, *bounds, compared=compared)

    def _require_none_begun(self) -> None:
        if self._step is not None and self._step.begun and not self._step.ended:
            raise LoopError(_NOT_ENDED)

    def _facts(self, *, waits: bool = True) -> dict[str, str]:
        """Everything that must be the same on all ranks, by name."""
        return {
            **optimizer_facts(self.optimizer, kind_of(self.optimizer), waits=waits),
            **facts_of({"controller": self.controller.facts()}),
            **facts_of(self._settings | self._update.facts()),
            "the plan": repr(self.plan),
            "the meter's step": repr(self.meter.step),
            "the meter's every": repr(self.meter.every),
            "the meter's interval": repr(self.meter.confidence),
        }

    def _stands(self, *, waits: bool = True) -> float:
        """A number for all of it."""
        return checksum(repr(self._facts(waits=waits)))

    def _tell(self) -> list[float]:
        """What the other ranks are told with every step: time spent, and where the run stands."""
        stands = self._stands(waits=False) if self._agreement.ranks > 1 else 0.0
        return [self.elapsed_seconds, stands]

    def _require_agreement(self, what: str) -> None:
        if self._agreement.ranks > 1:
            rows = self._agreement.gather(self._stands(), what=what)
            self._agreement.require_equal([stands for (stands,) in rows], what, self._facts)

    # what ends a step

    @contextmanager
    def _finish(self, step: StepStatistics) -> Iterator[None]:
        """Updates, zeroes the gradients, plans the next step."""
        stands = [stands for _, stands in step.told]
        self._agreement.require_equal(stands, "what decides a step", self._facts)
        decides = self.batches.was_whole(step.samples, self.plan)
        if self.scheduler is None:
            self._rates.examine(self.epoch)
        with self._update.around(step, decides=decides):
            yield
        self._rates.note(self.epoch)
        self._losses.compare(step.samples / step.micro_batches, step.loss)
        self._per_sample = step.per_sample
        self._zero_grad()
        self.meter.next_step()
        self.plan = self._fit(self.controller.decision)

    def _zero_grad(self) -> None:
        self.meter.source.zero_grad()
        if self._shards is not None:
            self._shards.restart()


def _still_there(train: "weakref.ref[AdaptiveBatch]") -> AdaptiveBatch:
    """What a step asks and does not hold, so that the two are no cycle.

    The garbage collector would close the queues of a loader's workers first, and then wait five
    seconds for each of them.
    """
    held = train()
    if held is None:
        raise LoopError("the AdaptiveBatch of this step is gone; keep it as long as its steps")
    return held


def shards_of(optimizer: Optimizer) -> GradientSource | None:
    """Where a variance-reduced optimizer over sharded parameters has its gradients from."""
    return optimizer.shards if isinstance(optimizer, VarianceReduced) else None


def _micro_batch(found: int | None, *, sized: bool) -> int:
    """The most samples in one backward; one error names all that a loader does not say."""
    if found is None or not sized:
        missing = ["micro_batch="] * (found is None) + ["batch_size="] * (not sized)
        raise SettingError(f"the loader does not say its batch size; pass {' and '.join(missing)}")
    return found


def _parts(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a state has in common with other ranks, and its own."""
    if "version" not in state:
        raise StateError(
            f"a state with {sorted(map(str, state))[:5]} is not one of AdaptiveBatch; pass what "
            "train.state_dict() gave"
        )
    if state["version"] != _STATE_VERSION:
        raise StateError(
            f"state version {state['version']} is not {_STATE_VERSION}, which this release reads; "
            "resume with the release that wrote it"
        )
    return state["shared"], state["own"]
