"""Measure, decide, act, around the user's own loop."""

import math
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, NoReturn, Unpack

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bigbatch.data.batches import Batches
from bigbatch.data.collate import Batch
from bigbatch.data.external_batches import ExternalBatches
from bigbatch.data.micro_batches import Cut
from bigbatch.data.rank_consistency import HostCollectives
from bigbatch.data.rng_state import random_state, restore_random_state
from bigbatch.errors import LengthError, LoopError, SettingError, StateError
from bigbatch.gradients import parameters_of
from bigbatch.gradients.replaced_parameters import ReplacementCheck
from bigbatch.optim.micro_batch_optimizer import micro_batch_optimizer
from bigbatch.policies.controller import Controller, warn_of_changes
from bigbatch.policies.plan import BatchPlan
from bigbatch.policies.plan_constraints import PlanConstraints
from bigbatch.policies.policy import Policy
from bigbatch.setting_types import ELSEWHERE, checked
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.loop_options import LoopOptions
from bigbatch.training.loss_check import LossCheck
from bigbatch.training.oom_hints import OomHints
from bigbatch.training.optimizer_checks import require_steppable
from bigbatch.training.step import Step, trained_by
from bigbatch.training.step_record import StepRecord
from bigbatch.training.update import StepContext, Update

_STATE_VERSION = 3

_NOT_ENDED = (
    "step.update() was not called for the last step; call it at the end of each step, and after an "
    "exception load an earlier checkpoint"
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
        loader: any iterable of batches, or `Batches` with options of its own; `ExternalBatches` if
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
        options: batch_size to lr_scaling above, as `LoopOptions` declares them.
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
        scheduler: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        meter: GradientMeter | None = None,
        **options: Unpack[LoopOptions],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.meter = meter or GradientMeter(model)
        self._reader = micro_batch_optimizer(optimizer)
        self._parameters = ReplacementCheck(model)
        self._bind_source()
        self._collectives = HostCollectives(self.meter.source)
        self.batches = loader if isinstance(loader, Batches | ExternalBatches) else Batches(loader)
        self.batches.share(self._collectives, lockstep=self.meter.source.reducer.lockstep)
        batch_size = options.get("batch_size")
        if not isinstance(policy, Controller) and batch_size is None:
            batch_size = getattr(policy, "batch_size", None) or self._loader_batch_size()
        sized = batch_size or isinstance(policy, Controller)
        micro_batch = options.get("micro_batch") or self.batches.batch_size
        constraints = PlanConstraints(
            self.batches.virtual_ranks,
            _micro_batch(micro_batch, sized=bool(sized)),
            options.get("fixed_micro_batch", False),
            self._min_micro_batches(options.get("min_micro_batches")),
        )
        self.controller = constraints.controller(
            policy, batch_size, options.get("base_batch"), self.batches.samples
        )
        self._constraints = constraints
        settings = {
            "micro_batch": repr(constraints.micro_batch),
            "fixed_micro_batch": repr(constraints.fixed_micro_batch),
            "min_micro_batches": repr(constraints.min_micro_batches),
            "remainder": repr(self.batches.remainder),
            "order": self.batches.order,
            "virtual_ranks": repr(self.batches.virtual_ranks),
        }
        self._context = self._build_context()
        lr_scaling = options.get("lr_scaling", "sqrt")
        self._update = Update(
            self._context, self.batches, self.controller, constraints, lr_scaling, settings
        )
        self.scheduler = scheduler
        self._step: Step | None = None
        self._update.require_equal_ranks("their settings")

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
    def plan(self) -> BatchPlan:
        """How the next step is cut into micro-batches."""
        return self._update.plan

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
        return self._update.elapsed_seconds

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
        return self._constraints.plan(batch_size, *bounds)

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
        self._update.require_equal_ranks("where the run stands")
        empty = not self.batches.open  # so far
        if empty:
            self.batches.start(self.epoch)
        while (cut := self._next_cut()) is not None:
            self._watch_trained()
            self._step = Step(cut, self._context, self._update)
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
        self._update.end_pass()

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
        position = self.batches.state_dict()
        return {
            "version": _STATE_VERSION,
            "shared": {**self._update.state_dict(), "pass": position["pass"]},
            "own": {
                "elapsed_seconds": self.elapsed_seconds,
                "rank": self._collectives.rank,
                "ranks": self._collectives.ranks,
                "stream": position["stream"],
                "random": random_state(),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes where `state` was taken, in the middle of an epoch too. Collective.

        Model, optimizer and scaler are loaded by the user. Policy, bounds and every other setting
        are those given at construction; what has changed is said. On as many ranks each loads its
        own state, and resumes bit for bit (docs/ranks.md has the one exception); on others any
        rank's will do, the run continues with the same samples, and random states are left as they
        are. They are restored last, so load this last.

        Raises:
            StateError: the state is of another version, or of other data.
        """
        shared, own = _parts(state)
        warn_of_changes(shared["settings"], self._update.settings)
        self._update.load_state_dict(shared, own["elapsed_seconds"])
        self._step = None
        same_rank = (own["rank"], own["ranks"]) == (self._collectives.rank, self._collectives.ranks)
        position = {"pass": shared["pass"], "stream": own["stream"]}
        self.batches.load_state_dict(position, self.epoch, same_rank=same_rank)
        self._update.learn_length()
        if same_rank:
            restore_random_state(own["random"])
        elif self._collectives.rank == int(
            (own["rank"], own["ranks"]) == (0, self._collectives.ranks)
        ):
            warnings.warn(
                f"the state is that of rank {own['rank']} of {own['ranks']}: its random states are "
                f"not those of these {self._collectives.ranks} ranks, so dropout and augmentation "
                "draw other numbers",
                stacklevel=2,
            )

    # construction

    def _loader_batch_size(self) -> int | None:
        """Samples in the loaders' batches of all ranks."""
        size = self.batches.batch_size
        return None if size is None else size * self._collectives.ranks

    def _bind_source(self) -> None:
        """One set of hooks serves the meter and the optimizer, inside step.backward only."""
        if self.meter.loss != "weighted":
            raise SettingError(
                'AdaptiveBatch weighs the losses itself: GradientMeter(loss="weighted")'
            )
        require_steppable(self.optimizer)
        self.meter.source.explicit = True
        self.meter.scaler = self.scaler
        if not set(self._watch_trained()) & set(parameters_of(self.model)):
            raise SettingError("the optimizer holds no parameter of the model; build it from it")
        if self._reader is not None:
            self._reader.bind_to_loop(self.meter.source)

    def _watch_trained(self) -> list[Tensor]:
        """What the optimizer trains now, as parameters of the model: only that is measured."""
        trained = self.meter.source.reducer.model_parameters(trained_by(self.optimizer))
        self._parameters.require_held(trained)
        self.meter.select(trained)
        return trained

    def _min_micro_batches(self, given: int | None) -> int:
        """Over all ranks; r of an optimizer over shards compares those of one rank."""
        if self._reader is None:
            return 4 if given is None else given
        reduced = self._reader.reduced_source() is not None
        ranks = self.meter.source.ranks if reduced else 1
        if given is not None and reduced and given < 2 * ranks:
            raise SettingError(
                f"min_micro_batches={given} on {ranks} ranks may be fewer than 2 on each, which a "
                "variance-reduced optimizer compares under fully_shard, gradients being reduced in "
                f"every backward; pass at least {2 * ranks}, or leave it out"
            )
        return 8 * ranks if given is None else given

    def _build_context(self) -> StepContext:
        """Its hints are given in every forward of the model, as long as this loop lives."""
        rank, ranks = self._collectives.rank, self._collectives.ranks
        ours = not isinstance(self.batches, ExternalBatches)
        hints = OomHints(rank, ranks, cut_here=ours)
        handle = self.model.register_forward_hook(hints, always_call=True)
        weakref.finalize(self, handle.remove)
        losses = LossCheck(speaks=rank == 0, scales=self.scaler is not None)
        return StepContext(
            self.meter, self.optimizer, self.scaler, self._reader, self._collectives, hints, losses
        )

    # between the steps

    def _next_cut(self) -> Cut | None:
        rows = 1 if self._reader is None else 2  # r needs two micro-batches
        bounds = self.controller.min_batch, self.controller.max_batch
        return self.batches.step(self.plan, *bounds, rows)

    def _require_none_begun(self) -> None:
        if self._step is not None and self._step.begun and not self._step.ended:
            raise LoopError(_NOT_ENDED)


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
