"""Learning-rate schedulers that count base batches of samples instead of optimizer steps."""

import copy
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler

from bigbatch.errors import LoopError, SettingError, StateError
from bigbatch.loop_warning import warn_in_loop
from bigbatch.optim.optimizer_settings import parts_of, rates_of
from bigbatch.setting_types import NotNegative, check_setting
from bigbatch.state_checks import loads_state

_NO_SCHEDULER = (
    "and no scheduler is known: a schedule that counts updates ends in the wrong place, since "
    "their number follows the batch size. Pass AdaptiveBatch(scheduler=scheduler) (to a trainer, "
    "as its own) and leave scheduler.step() out; or pass the function of the iteration number, "
    "scheduler=get_lr, and leave its lines out. A single change by hand stays as you make it"
)
_TWO_SCHEDULES = (
    "and the scheduler that was passed sets it too, from the samples: leave out the lines that set "
    "it from a count of updates, which ends in the wrong place"
)
RATE_OF = operator.methodcaller("get", "lr")
_SCHEDULED = ("lr", "momentum", "betas")  # what a scheduler writes into the groups


class BaseBatchScheduler:
    """Advances a step-counting scheduler once for every base batch of samples consumed.

        ticks = floor(samples / scheduler_batch)

    So a schedule keeps its shape over the data whatever the batch size does. A scheduler stays at
    its `last_tick`, where a OneCycleLR would raise and a cosine would rise again.
    """

    def __init__(self, base_batch: int, optimizer: Optimizer) -> None:
        self.scheduler_batch: float = base_batch  # samples per tick
        self._optimizer = optimizer
        self.follows_rates = False  # whether `lr_decay` is kept; a rate on a GPU is waited for
        self._given: LRScheduler | list[LRScheduler] | None = None
        self._schedulers: list[LRScheduler] = []  # of the groups of one optimizer each
        self._samples: float = 0  # since the last tick
        self._rate = self._peak_rate = 0.0  # scheduled: the present one, and the largest so far
        self._last_counts: list[int] = []  # the schedulers' own, after their last tick here
        self._ticks_after_end: Counter[LRScheduler] = Counter()

    @property
    def scheduler(self) -> LRScheduler | list[LRScheduler] | None:
        """The scheduler that is advanced, or one for each optimizer of a composite.

        From a function, a scheduler is made.
        """
        return self._given

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        given = getattr(scheduler, "schedulers", scheduler)  # torchtitan's container has a list
        if given is None:
            self._given, self._schedulers = None, []
            self._rate = self._peak_rate = 0.0
        elif isinstance(given, list | tuple):
            self._given = self._schedulers = _one_for_each(given, self._optimizer)
        else:
            self._given = _advanceable(given, self._optimizer)
            self._schedulers = [self._given]
        self._last_counts, self._ticks_after_end = [], Counter()

    @property
    def kinds(self) -> str:
        """The classes of the schedulers; empty if there is none."""
        return " and ".join(type(scheduler).__name__ for scheduler in self._schedulers)

    def advance(self, samples: int) -> None:
        """Adds the samples of one optimizer step and ticks once per full `scheduler_batch`."""
        self.require_ready()
        if self.follows_rates:
            self._note_rate()
        ticks, self._samples = divmod(self._samples + samples, self.scheduler_batch)
        if not (schedulers := self._schedulers):
            return
        ends = [*map(last_tick, schedulers)]
        for _ in range(int(ticks)):
            for scheduler, end in zip(schedulers, ends, strict=True):
                if end is None or _count(scheduler) < end:
                    scheduler.step()
                else:
                    self._stay(scheduler)
            if self.follows_rates:
                self._note_rate()
        self._last_counts = [*map(_count, schedulers)]

    @property
    def lr_decay(self) -> float | None:
        """Scheduled rate now over its largest so far, 1 if there is none; None if not kept.

        Of several groups the largest rates count. A tick counts even if no step had its rate.
        """
        if not self.follows_rates:
            return None
        return self._rate / self._peak_rate if self._peak_rate else 1.0

    def _note_rate(self) -> None:
        """Reads the rates between two steps, when no factor is in force."""
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        self._rate = max((float(rate) for rate in rates if rate is not None), default=0.0)
        self._peak_rate = max(self._peak_rate, self._rate)

    def require_ready(self) -> None:
        """Raises LoopError, before a change, if somebody else has advanced the scheduler too."""
        for scheduler, count in zip(self._schedulers, self._last_counts, strict=False):
            if (present := _count(scheduler)) != count:
                raise LoopError(
                    f"the {type(scheduler).__name__} was left at tick {count} and is at {present}; "
                    "step.update() advances it: leave scheduler.step() out"
                )

    def _stay(self, scheduler: LRScheduler) -> None:
        self._ticks_after_end[scheduler] += 1
        # T ticks start at tick 0, so one is always too many
        if self._ticks_after_end[scheduler] == 2:
            warn_in_loop(
                f"{type(scheduler).__name__} reached its end and stays there, at "
                f"lr={rates_of(self._optimizer)}; "
                "train.base_steps(epochs) gives the total to build it with"
            )

    def state_dict(self) -> dict[str, Any]:
        """A state for `load_state_dict`, the scheduler's own state included."""
        groups, saved = self._optimizer.param_groups, None
        if self._schedulers:
            values = [{key: group[key] for key in _SCHEDULED if key in group} for group in groups]
            first, *others = (scheduler.state_dict() for scheduler in self._schedulers)
            saved = {"class": self.kinds, "state": first, "others": others, "groups": values}
        return {
            "samples": self._samples,
            "base_batch": self.scheduler_batch,
            "peak_rate": self._peak_rate,
            "scheduler": copy.deepcopy(saved),
        }

    @loads_state
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state, the groups' values included.

        A scheduler that was built after the optimizer's state was loaded has overwritten them.
        """
        saved, batch = copy.deepcopy(state["scheduler"]), state["base_batch"]
        groups, name = self._optimizer.param_groups, self.kinds or "NoneType"
        if saved is not None:
            if saved["class"] != name:
                raise StateError(
                    f"the saved scheduler is a {saved['class']}, not a {name}; set "
                    "train.scheduler to the same one before loading, and to another one afterwards"
                )
            if batch != self.scheduler_batch:
                raise StateError(
                    f"the saved schedule has counted base batches of {batch} samples, these are of "
                    f"{self.scheduler_batch}; resume with base_batch={batch}, or, of a scheduler "
                    "from accelerate, with the loader and the processes of the saved run"
                )
            if len(saved["groups"]) != len(groups):
                raise StateError(
                    f"the saved schedule is for {len(saved['groups'])} parameter groups, the "
                    f"optimizer has {len(groups)}; build it with the same groups"
                )
            states = [saved["state"], *saved.get("others", ())]
            for scheduler, own in zip(self._schedulers, states, strict=True):
                scheduler.load_state_dict(own)
            for group, values in zip(groups, saved["groups"], strict=True):
                for key, value in values.items():
                    if isinstance(group[key], Tensor):
                        group[key].fill_(float(value))
                    else:
                        group[key] = value
        self._samples, self._peak_rate = float(state["samples"]), float(state["peak_rate"])
        self._last_counts, self._ticks_after_end = [], Counter()


class RateFunction(LambdaLR):
    """A schedule by hand: the learning rate itself, of all groups, as a function of the tick.

    It stays at its end where a table has no more rates: the tick after the last step is read too.
    """

    _end: int | None = None

    def get_lr(self) -> list[float | Tensor]:
        """The rates at the present tick, where those of `LambdaLR` are factors."""
        tick, function = self.last_epoch, self.lr_lambdas[0]
        try:
            rate = check_setting(f"what scheduler= gives for {tick}", function(tick), NotNegative)
        except IndexError:
            if tick == 0:
                raise
            if self._end not in (None, tick):
                warn_in_loop(f"scheduler= has no rate from {self._end} on; the last one stays")
            self._end = self._end or tick
            return [group["lr"] for group in self.optimizer.param_groups]
        return [rate] * len(self.lr_lambdas)


def _one_for_each(given: Sequence[Any], optimizer: Optimizer) -> list[LRScheduler]:
    """A scheduler for each optimizer of a composite, or of one that is variance-reduced."""
    parts = parts_of(getattr(optimizer, "base", optimizer))
    if len(given) != len(parts):
        names = " and ".join(type(part).__name__ for part in parts)
        raise SettingError(
            f"scheduler= has {len(given)} schedulers, and the optimizers are {names}; pass one for "
            "each, or one over all groups, built with the Composite"
        )
    schedulers = []
    for number, (scheduler, part) in enumerate(zip(given, parts, strict=True)):
        try:
            schedulers.append(_advanceable(scheduler, part))
        except SettingError as error:
            raise SettingError(f"scheduler {number}, for {type(part).__name__}: {error}") from error
    return schedulers


def _advanceable(scheduler: Any, optimizer: Optimizer) -> LRScheduler:
    """The scheduler of an optimizer, one that is made if a function is given."""
    if callable(scheduler) and not isinstance(scheduler, type | nn.Module):
        scheduler = RateFunction(optimizer, scheduler)
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        raise SettingError(
            "ReduceLROnPlateau needs a metric at every step; call its step(metric) in your own "
            "loop and leave scheduler=None"
        )
    if not isinstance(scheduler, LRScheduler):
        raise SettingError(
            f"scheduler={scheduler!r} is not a torch LRScheduler; of one that accelerate prepared, "
            "which advances once for each process, pass the one inside it, scheduler.scheduler"
        )
    if scheduler.optimizer.param_groups is not optimizer.param_groups:  # a wrapper forwards them
        several = (
            ": it is over one part of it; pass one over the Composite, or a list with one for each"
            " optimizer"
        )
        raise SettingError(
            "the scheduler belongs to another optimizer than the one that trains"
            + several * (len(parts_of(optimizer)) > 1)
        )
    return scheduler


def last_tick(scheduler: LRScheduler) -> int | None:
    """The tick at which a schedule has its last rate, counted from 0; None if unknown."""
    if isinstance(scheduler, ChainedScheduler):
        return min(filter(None, map(last_tick, scheduler._schedulers)), default=None)
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        last = last_tick(scheduler._schedulers[-1])
        return None if last is None else last + sum(scheduler._milestones[-1:])
    if isinstance(scheduler, LambdaLR):  # Hugging Face's are partials
        return getattr(scheduler.lr_lambdas[0], "keywords", {}).get("num_training_steps")
    if isinstance(scheduler, lr_scheduler.OneCycleLR):
        return scheduler.total_steps - 1
    if isinstance(scheduler, lr_scheduler.CosineAnnealingLR):
        return scheduler.T_max
    return scheduler.total_iters if isinstance(scheduler, lr_scheduler.PolynomialLR) else None


def _count(scheduler: LRScheduler) -> int:
    """The scheduler's own count; for a ChainedScheduler, that of its first part."""
    while isinstance(scheduler, ChainedScheduler):
        scheduler = scheduler._schedulers[0]
    return int(scheduler.last_epoch)


class LRChanges:
    """Warns once that a schedule of the user's own counts updates, whose number is unknown.

    And once that a policy, the `follower`, follows the rates of a scheduler where none is known.
    Rates may change between two passes, and with a loaded state, which has new groups.
    """

    def __init__(self, optimizer: Optimizer, *, warns: bool, follower: str) -> None:
        self._optimizer, self._warns, self._follower = optimizer, warns, follower
        self._noted: RateSnapshot | None = None
        self._epoch = 0  # of the last update

    def note(self, epoch: int | None = None) -> None:
        """Notes the rates at the end of an update in a pass; None for one before, if any."""
        if epoch is not None or self._noted is not None:
            self._noted = RateSnapshot(self._optimizer.param_groups)
            self._epoch = self._epoch if epoch is None else epoch

    def examine(self, epoch: int, scheduler: LRScheduler | list[LRScheduler] | None) -> None:
        """Compares the rates before another update."""
        if not self._warns:
            return
        if self._follower and scheduler is None:
            warn_in_loop(
                f"{self._follower} follows the scheduled learning rate, and no scheduler is known: "
                "the batch changes only where you change the rate yourself; pass "
                "AdaptiveBatch(scheduler=scheduler)"
            )
            self._follower = ""
        if self._noted is None or epoch != self._epoch:
            return
        for number, rate, present in self._noted.changes():
            is_tensor = isinstance(rate, Tensor) or isinstance(present, Tensor)
            if is_tensor or rate != present:
                rates_of(self._optimizer)  # raises an error for what is no rate
                self._warns = False
                change = "" if is_tensor else f" from {rate:.6g} to {present:.6g}"
                warn_in_loop(
                    f"the learning rate of parameter group {number} was changed{change} between "
                    "two updates, " + (_NO_SCHEDULER if scheduler is None else _TWO_SCHEDULES)
                )
                return


class RateSnapshot:
    """The learning rates of some parameter groups at one time."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        self.groups = [*groups]
        self._rates: list[Any] = [*map(RATE_OF, self.groups)]
        self._writes = [*map(_times_written, self._rates)]

    def changes(self) -> list[tuple[int, Any, Any]]:
        """(index of the group, rate then, rate now) where it was set or written to since.

        Nothing is read from a device: of a tensor, the writes that autograd has seen are compared.
        """
        rates = [*map(RATE_OF, self.groups)]
        writes = [*map(_times_written, rates)]
        if [*map(id, rates)] == [*map(id, self._rates)] and writes == self._writes:
            return []
        rows = enumerate(zip(self._rates, rates, self._writes, writes, strict=True))
        return [(n, old, new) for n, (old, new, w, now) in rows if new is not old or w != now]


def _times_written(lr: float | Tensor | None) -> int:
    return lr._version if isinstance(lr, Tensor) else 0
