"""The training loop: measures the gradients, decides the batch size, ends each step."""

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Unpack

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bigbatch.data.batches import Batches
from bigbatch.data.collate import Batch
from bigbatch.data.external_batches import ExternalBatches
from bigbatch.data.rng_state import random_state, restore_random_state
from bigbatch.errors import LoopError, RunError, SettingError, StateError
from bigbatch.gradients import parameters_of
from bigbatch.gradients.float32_sums import is_half
from bigbatch.gradients.replaced_parameters import ReplacementCheck
from bigbatch.log.run_log import RunLog
from bigbatch.log.step_record import StepRecord
from bigbatch.optim.optimizer_settings import name_of
from bigbatch.optim.variance_reduced import micro_batch_optimizer
from bigbatch.policies.controller import Controller, controller_of, warn_of_changes
from bigbatch.policies.plan import BatchPlan, PlanConstraints
from bigbatch.policies.policy import Policy, SimiGrad, needs_of
from bigbatch.setting_types import CHECKED_ELSEWHERE, Count, Positive, check_setting, checked
from bigbatch.state_checks import loads_state
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.branch_plan import DEFAULT_REPEATS, BranchRequest, Repeats
from bigbatch.training.branch_test import BranchTestResult, LossOf, branch_test
from bigbatch.training.loop_options import LoopOptions
from bigbatch.training.step import Step
from bigbatch.training.training_parts import TrainingParts, steppable, trained_parameters
from bigbatch.training.update import Update

_STATE_VERSION = 6
_Scheduler = LRScheduler | Callable[[int], float]

_NOT_ENDED = (
    "step.update() was not called for the last step; call it at the end of each step, and after an "
    "exception load an earlier checkpoint"
)


# [Note: Resuming]
# A state has two parts. "shared" is equal on all ranks; "own" is of one rank: its seconds, position
# in its loader, random states. On as many ranks each loads its own state, and the run is the same
# to the last bit; on another number of ranks any shared part will do. Saving communicates nothing:
# a rank that saves alone would wait for the others forever.
# Loading has one order. Settings are compared before anything changes. Counts and decisions come
# before the batches, whose sampler gets the epoch; the batches before the bounds of the batch size,
# since only a resumed loader may know its length. Random states are last but one: reading up to the
# position draws numbers. Then the log may cut its rows, since nothing can refuse the state now.


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
        model: the model to train; the gradients of the optimizer's parameters are measured.
        optimizer: any torch optimizer; of several, a `Composite`. A `VarianceReduced` one shares
            the measurement, and is attached to DDP if it was not: then call
            `optimizer.attached.consolidate()` on every rank before its `state_dict()`.
        loader: any iterable of batches, or a function that draws one; `Batches` for options of its
            own; `ExternalBatches` if another loop gives the micro-batches.
        policy: decides the batch size after every step; or a `Controller` with options of its own,
            which then has the initial size and the base batch.
        batch_size: initial size, in samples; default: that of a `Fixed` policy, or the loader's
            times the ranks.
        base_batch: batch size that the learning rate was tuned for; default `batch_size`.
        micro_batch: most samples in one backward; default: the loader's own batch size.
        fixed_micro_batch: let every backward have `micro_batch` samples, except at the end of an
            epoch; the batch then changes by multiples of ranks x micro_batch.
        min_micro_batches: fewest backwards of a measured step over all ranks; default 4, and 8 with
            a `VarianceReduced` optimizer (under fully_shard, 8 per rank). 1 never cuts a step, and
            on one rank compares consecutive steps, a biased estimate. See docs/policies.md.
        lr_scaling: "sqrt", "linear", "adascale", None, or a function of (batch, base, noise);
            if it has `state_dict` and `load_state_dict`, its state is saved too.
        transport: let betas and decoupled weight decay keep their half-lives in samples, for batch
            sizes within a factor of 4 of the base batch: betas^(B / B_base). See docs/policies.md.
        groups: k, to measure that many groups of samples in every backward, so that a step need
            not be cut into micro-batches; None to cut it. No sample may influence another, so
            BatchNorm is refused. See docs/groups.md.
        accumulate_float32_above: k, to add up gradients of bfloat16 and float16 parameters in
            float32 in steps of more than k backwards on a rank: 4 bytes a parameter more memory,
            and `.grad` is rounded once instead of in each backward. See docs/loops.md.
        every: n, to measure every n-th step; only measured steps are cut into `min_micro_batches`.
            0 measures none. By default n is 1 in the first 64 steps, then 2, 4, 8, and 16 from step
            512 on.
        log: folder, or a `RunLog` with options of its own, that gets a row per step for `bigbatch
            report`, `compare` and `replay`. See docs/logs.md.
        scheduler: a scheduler that counts steps, advanced once per base batch of samples; or a
            function of the iteration number that gives the learning rate; or a list with one of
            them for each optimizer of a `Composite`, in their order.
        scaler: a GradScaler, if float16 needs one.
        meter: a GradientMeter of your own.
        options: batch_size to every above, as declared by `LoopOptions`.
    Raises:
        SettingError: a setting that cannot work, with the remedy.
        RankError: the ranks have different settings.
    Source:
        SimiGrad (Qin et al., NeurIPS 2021); docs/theory.md.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        optimizer: Annotated[Optimizer, CHECKED_ELSEWHERE],
        loader: Iterable[Batch] | Callable[[], Batch] | Batches | ExternalBatches,
        *,
        policy: Policy | Controller,
        scheduler: Annotated[_Scheduler | Sequence[_Scheduler] | None, CHECKED_ELSEWHERE] = None,
        scaler: GradScaler | None = None,
        meter: GradientMeter | None = None,
        **options: Unpack[LoopOptions],
    ) -> None:
        self.model = model
        self.optimizer = steppable(optimizer)
        self.scaler = scaler
        self.meter = meter or GradientMeter(model)
        self.meter.cut_backwards(options.get("groups"), model)
        self._replacement_check = ReplacementCheck(model)
        self._selected: list[Tensor] = []  # the parameters that are measured
        self.batches = loader if isinstance(loader, Batches | ExternalBatches) else Batches(loader)
        self._bind_source()
        self._accumulate_float32_above = options.get("accumulate_float32_above")
        if self._accumulate_float32_above is not None:
            self._require_float32_sums()
        self._parts = parts = TrainingParts(self.meter, self.optimizer)
        self.batches.share(parts.collectives, lockstep=self.meter.source.reducer.lockstep)
        batch_size = options.get("batch_size")
        if batch_size is None and not isinstance(policy, Controller):
            of_all_ranks = (self.batches.batch_size or 0) * parts.collectives.ranks
            batch_size = needs_of(policy).batch_size or of_all_ranks or None
        has_size = isinstance(policy, Controller) or batch_size is not None
        constraints = self._build_constraints(options, has_size=has_size)
        self.controller = controller_of(
            policy,
            constraints,
            batch_size=batch_size,
            base_batch=options.get("base_batch"),
            samples=self.batches.samples,
            unit=self.batches.unit,
        )
        self._update = Update(parts, self.batches, self.controller, constraints, options)
        hook = model.register_forward_hook(parts.oom_hints, always_call=True)
        weakref.finalize(self, hook.remove)
        self.scheduler = scheduler
        self._step: Step | None = None
        self._is_whole = True  # not between the parts of a state that is loaded
        self._update.log = self._build_log(options)
        self._update.require_equal_ranks("their settings")

    @property
    def epoch(self) -> int:
        """Complete passes over the data."""
        return self._update.past.epoch

    @property
    def samples(self) -> int:
        """Samples consumed, over all ranks."""
        return self._update.past.samples

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        self._update.settle()
        return self._update.past.steps

    @property
    def skipped(self) -> int:
        """Steps that were skipped because their gradient was not finite."""
        self._update.settle()
        return self._update.past.skipped

    @property
    def record(self) -> StepRecord | None:
        """Record of the last step; None before the first."""
        return self._update.past.record

    @property
    def last_measured(self) -> StepRecord | None:
        """Record of the last measured step; None before the first."""
        return self._update.past.last_measured

    @property
    def run_log(self) -> RunLog | None:
        """The log that every step is written to; None without one."""
        self._update.settle()
        return self._update.log

    def log(self, **scores: float | Tensor) -> None:
        """Adds scores of the model after the last step to the log: `train.log(accuracy=93.1)`.

        Raises:
            LoopError: there is no log, or no step before.
        """
        if self.run_log is None:
            raise LoopError('there is no log to write to; pass AdaptiveBatch(log="runs/mine")')
        self.run_log.scores(**scores)

    @property
    def every(self) -> int | None:
        """Interval from one measured step to the next, at present; None if none is measured."""
        return self._update.planner.every

    @property
    def plan(self) -> BatchPlan:
        """How the next step is cut into micro-batches."""
        return self._update.planner.plan

    @property
    def lr_factor(self) -> float:
        """Factor of the next step's learning rate, before that step is measured."""
        self._update.settle()
        return self._update.rates.factors_of([self.plan.batch_size])[0]

    @property
    def scheduler(self) -> LRScheduler | list[LRScheduler] | None:
        """What is advanced in base batches; may be set before the first step."""
        self._update.settle()
        return self._update.rates.clock.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: _Scheduler | Sequence[_Scheduler] | None) -> None:
        self._update.settle()
        self._update.rates.clock.scheduler = scheduler
        self._update.rates.changes.note()  # the rates that it has set

    @property
    def scheduler_batch(self) -> float:
        """Samples between two advances of the scheduler: the base batch.

        May be set before the first step, if the schedule was written for other batches.
        """
        return self._update.rates.clock.scheduler_batch

    @scheduler_batch.setter
    def scheduler_batch(self, samples: float) -> None:
        samples = check_setting("scheduler_batch", samples, Positive)
        self._update.rates.clock.scheduler_batch = samples

    @property
    def base_step(self) -> int:
        """Base batches of samples consumed, floor(samples / `scheduler_batch`).

        The iteration number for a loop's length, or for settings other than the learning rate,
        which `scheduler=` takes. A count of steps follows the batch size.
        """
        return int(self.samples // self.scheduler_batch)

    def base_steps(self, epochs: float) -> int:
        """Advances of the scheduler in so many epochs: samples / base batch, rounded up.

        If `scheduler_batch` is set, it takes the place of the base batch. With remainder="drop"
        there are fewer: samples that are left out do not count.

        Raises:
            SettingError: the loader does not say how many samples an epoch has.
        """
        if self.batches.samples is None:
            raise SettingError(
                "the loader has no known length; state the schedule's total yourself"
            )
        return math.ceil(epochs * self.batches.samples / self.scheduler_batch)

    @checked
    def branch_test(
        self,
        loss_of: LossOf,
        batch_sizes: list[Count] | None = None,
        *,
        samples: Count | None = None,
        repeats: Repeats = DEFAULT_REPEATS,
        held_aside: Count | None = None,
    ) -> BranchTestResult:
        """Measures the critical batch size by training branches from the present state. Collective.

            S(B) = S_min (1 + B / B_crit)

        S(B) is the number of samples in which batch size B reaches a loss, from this state, at the
        learning rate that `lr_scaling` gives to B; docs/policies.md says where B_crit means little.
        A repeat trains every branch on the same samples, which no other repeat has, and compares
        losses on other samples again.

        Call it between two steps. Afterwards, also after an error, all is as before to the last
        bit; what hooks of yours keep elsewhere is not restored. The samples are the next ones of
        the loader; they wait in memory until steps take them.

        Args:
            loss_of: batch -> mean loss over its samples, one number; moves the batch to the device.
            batch_sizes: batch sizes of the branches, multiples of the ranks; default: 1/2, 1, 2 and
                4 times the present one.
            samples: samples that each branch trains on, over all ranks; default: 16 steps of the
                largest batch, twice the optimizer's average of gradients if that is longer (10
                steps for momentum or beta1 = 0.9, which must fit in), or what the pass still has.
            repeats: repeats with other samples, at least 2.
            held_aside: samples on which losses are compared; default `samples` / 2.
        Returns:
            The result, the same on every rank; `print` shows a table.
        Raises:
            SettingError: the pass has fewer samples left; or the optimizer is variance-reduced, a
                GradScaler is used, or another loop gives the micro-batches.
            LoopError: inside a step.
        Source:
            Merrill et al. 2025 (arXiv 2505.23971); McCandlish et al. 2018 (arXiv 1812.06162), 2.
        """
        self._require_whole()
        request = BranchRequest(batch_sizes, samples, repeats, held_aside)
        self._select_trained()
        with self._update.outside_steps():
            return branch_test(self.model, self._update, self.batches, loss_of, request)

    def epochs(self, total: int) -> Iterator[int]:
        """The remaining epochs of `total`; a resumed run begins with the one it was in."""
        while self.epoch < total:
            yield self.epoch

    def __iter__(self) -> Iterator["Step"]:
        """One pass over the loader; after a `break`, the rest of it."""
        self._require_whole()
        self._update.require_equal_ranks("where the run stands")
        self._open_log()
        empty = not self.batches.open  # so far
        if empty:
            self.batches.start(self.epoch)
        # r needs two micro-batches
        min_rows, controller = 1 if self._parts.reader is None else 2, self.controller
        while micro_batches := self.batches.step(
            self.plan,
            controller.min_batch,
            controller.max_batch,
            min_rows=min_rows,
            max_micro=self._update.planner.max_micro_batch,
        ):
            trained, above = self._select_trained(), self._accumulate_float32_above
            if above is not None:
                self.meter.source.add_in_float32(self.plan.accumulation > above)
            self._step = Step(micro_batches, trained, self._update)
            try:
                yield self._step
            except GeneratorExit:  # the loop is left, and its last step may wait to be read
                self._update.settle()
                raise
            empty = False
            if self._step is not None and not self._step.ended:
                raise LoopError(_NOT_ENDED)
            if not self.batches.open:
                return  # a state that was saved between two passes was loaded
        if empty:
            raise LoopError(
                "the loader gave no step; is it empty or used up, or shorter than one step that "
                "remainder='drop' leaves out?"
            )
        self._update.end_pass()

    def state_dict(self) -> dict[str, Any]:
        """Everything except model, optimizer and scaler; loads with `weights_only=True`.

        See [Note: Resuming]. Nothing is communicated.

        Raises:
            LoopError: inside a step, between its first micro-batch and `update()`. If another loop
                gives the micro-batches, it has to give those of that step again instead.
        """
        self._require_whole(in_step=isinstance(self.batches, ExternalBatches))
        if self.run_log is not None:
            self.run_log.flush()  # as its rows up to here are part of the state
        position, pairs = self.batches.state_dict(), self._parts.pairs
        return {
            "version": _STATE_VERSION,
            "shared": {**self._update.state_dict(), "pass": position["pass"]},
            "own": {
                "elapsed_seconds": self._update.past.elapsed_seconds,
                "step_seconds": self._update.past.step_seconds,
                "rank": self._parts.collectives.process,
                "ranks": self._parts.collectives.processes,
                "stream": position["stream"],
                "random": random_state(),
                "first_of_pair": None if pairs is None else pairs.state_dict(),
            },
        }

    @loads_state
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes where `state` was saved, in the middle of an epoch too. Collective.

        Load model, optimizer and scaler before, since random states are restored last, and set the
        same scheduler. Settings are those given at construction; a warning names what has changed.
        On as many ranks each loads its own state, and resumes bit for bit (docs/ranks.md has the
        one exception). On another number of ranks any rank's state will do: the run continues with
        the same samples, and random states stay as they are.

        Raises:
            StateError: the state is of another version, of other data, or of another scheduler.
        """
        if state["version"] != _STATE_VERSION:
            raise StateError(
                f"state version {state['version']} is not {_STATE_VERSION}, which this release "
                "reads; resume with the release that wrote it"
            )
        shared, own = state["shared"], state["own"]  # the order: see [Note: Resuming]
        warn_of_changes(shared["settings"], self._update.settings)
        self._is_whole, self._step = False, None
        self._update.load_state_dict(shared, own)
        rank, ranks = self._parts.collectives.process, self._parts.collectives.processes
        same_rank = (int(own["rank"]), int(own["ranks"])) == (rank, ranks)
        position = {"pass": shared["pass"], "stream": own["stream"]}
        self.batches.load_state_dict(position, self.epoch, same_rank=same_rank)
        self._update.planner.limit_batch()
        if same_rank:
            restore_random_state(own["random"])
        elif rank == int((own["rank"], own["ranks"]) == (0, ranks)):
            warnings.warn(
                f"the state is that of rank {own['rank']} of {own['ranks']}: its random states are "
                f"not those of these {ranks} ranks, so dropout and augmentation draw other numbers",
                stacklevel=3,
            )
        if self.run_log is not None:
            step = self.steps + self.skipped
            self.run_log.load_state_dict({"step": step, "samples": self.samples})
        self._is_whole = True

    def _bind_source(self) -> None:
        """Lets one set of hooks serve the meter and the optimizer, inside step.backward only."""
        if (self.meter.loss, self.meter.every) != ("weighted", 1):
            raise SettingError(
                "AdaptiveBatch weighs the losses and chooses the measured steps itself: "
                'GradientMeter(loss="weighted", every=1), and AdaptiveBatch(every=n)'
            )
        if self.meter.cluster_parts is not None:
            raise SettingError(
                f"cluster_parts={self.meter.cluster_parts}: AdaptiveBatch cuts the micro-batches "
                "itself, and these are no parts of clusters; read such a meter in a loop of your "
                "own, as docs/rl.md does"
            )
        if self.meter.source.mixes:
            raise SettingError(
                "the schedule of a pipeline runs the backwards, and AdaptiveBatch would too; read "
                "GradientMeter(stages) and ask a Controller, as docs/pipelines.md does"
            )
        if self.scaler is not None and self.meter.source.processes > self.meter.source.ranks:
            raise SettingError(
                "a GradScaler looks at the slices of one process, so under tensor parallelism the "
                "scales of a group would differ; use bfloat16, which needs none"
            )
        self.meter.source.explicit = True
        self.meter.scaler = self.scaler
        self._select_trained()
        if not set(self._selected) & set(parameters_of(self.model)):
            raise SettingError("the optimizer holds no parameter of the model; build it from it")
        if (reader := micro_batch_optimizer(self.optimizer)) is None:
            return
        reader.bind_to_loop(self.meter.source)
        if self.meter.groups is not None and reader.reduced_source() is not None:
            raise SettingError(
                f"groups={self.meter.groups}: under fully_shard a variance-reduced optimizer "
                "compares gradients that every backward has reduced over the ranks, and these have "
                "no groups; leave groups out"
            )

    def _require_float32_sums(self) -> None:
        """Checks that `accumulate_float32_above` can take effect."""
        source = self.meter.source
        if source.float32_refusal:
            raise SettingError(
                "accumulate_float32_above= cannot change how gradients are added up here: "
                f"{source.float32_refusal}; leave it out"
            )
        if source.process == 0 and not any(map(is_half, source.parameters)):
            warnings.warn(
                "accumulate_float32_above= changes nothing: no parameter that is trained is "
                "bfloat16 or float16, so gradients are added up in float32 already",
                stacklevel=5,
            )

    def _build_constraints(self, options: LoopOptions, *, has_size: bool) -> PlanConstraints:
        """What every plan has to keep."""
        if self.batches.unit == "tokens" and self.meter.groups is not None:
            raise SettingError(
                f'groups={self.meter.groups} divides the samples of a backward, and unit="tokens" '
                "counts tokens; leave one out"
            )
        if self.batches.packed and self.meter.groups is not None:
            raise SettingError(
                f"groups={self.meter.groups} divides a backward along dimension 0, where packed "
                "samples are one row; leave groups out, and cut into more micro-batches"
            )
        micro_batch = options.get("micro_batch") or self.batches.batch_size
        if micro_batch is None or not has_size:
            missing = ["micro_batch="] * (micro_batch is None) + ["batch_size="] * (not has_size)
            unit = f", in {self.batches.unit}"
            raise SettingError(
                f"the loader does not say its batch size; pass {' and '.join(missing)}"
                + unit * (self.batches.unit == "tokens")
            )
        parts, requested = self._parts, options.get("min_micro_batches")
        # over shards, only one rank's are compared
        ranks = 1 if parts.reduced is None else parts.collectives.ranks
        name, fewest, default = "", 1, 4
        if parts.reader is not None:
            name, fewest, default = "a variance-reduced optimizer", 2 * ranks, 8 * ranks
        elif self.meter.groups is not None:
            name, fewest = "groups=", 2
        if requested is not None and requested < fewest:
            on_each = f", on each of {ranks} ranks under fully_shard" * (ranks > 1)
            raise SettingError(
                f"min_micro_batches={requested}: {name} compares gradients within a step{on_each}; "
                f"pass at least {fewest}, or leave it out"
            )
        return PlanConstraints(
            self.batches.virtual_ranks,
            micro_batch,
            options.get("fixed_micro_batch", False),
            default if requested is None else requested,
            self.meter.groups,
        )

    def _build_log(self, options: LoopOptions) -> RunLog | None:
        """The log with the settings of this loop, which the user's own settings complete."""
        log = options.get("log")
        if log is None:
            return None
        log = log if isinstance(log, RunLog) else RunLog(log)
        policy, rule = self.controller.policy, options.get("lr_scaling", "sqrt")
        log.rank = self._parts.collectives.process
        log.loop_settings = {
            "policy": self.controller.settings["policy"],
            **({"target": policy.target} if isinstance(policy, SimiGrad) else {}),
            "batch_size": self.controller.decision.batch_size,
            "base_batch": self.controller.base_batch,
            "micro_batch": self._update.planner.max_micro_batch,
            "lr_scaling": str(rule).lower() if isinstance(rule, str | None) else "a function",
            "groups": self.meter.groups,
            "every": options.get("every"),
            **({"unit": "tokens"} if self.batches.unit == "tokens" else {}),
            "optimizer": name_of(self.optimizer),
            "world_size": self._parts.collectives.ranks,
        }
        return log

    def _open_log(self) -> None:
        """Opens the log before the first step; a refusal ends all ranks. Collective."""
        if self.run_log is None:
            return
        refusal = None
        try:
            self.run_log.open()
        except RunError as error:
            refusal = error
        ((refused,), *_) = self._parts.collectives.all_gather(
            refusal is not None, subject="the log"
        )
        if refused:
            raise refusal or RunError("rank 0 cannot write the log; its own error says why")

    def _select_trained(self) -> list[Tensor]:
        """Measures the model's parameters that the optimizer trains now; returns all of its own."""
        parameters = trained_parameters(self.optimizer)
        trained = self.meter.source.reducer.model_parameters(parameters)
        self._replacement_check.require_held(trained)
        if [*map(id, trained)] != [*map(id, self._selected)]:
            self.meter.select(trained)
            self._selected = trained
        return parameters

    def _require_whole(self, *, in_step: bool = False) -> None:
        """Checks that the last state is loaded and, unless it may be `in_step`, no step is open."""
        if not self._is_whole:
            raise StateError(
                "the state that was loaded last was refused, and is loaded in part; build model, "
                "optimizer and AdaptiveBatch again"
            )
        if not in_step and (step := self._step) is not None and step.begun and not step.ended:
            raise LoopError(_NOT_ENDED)
