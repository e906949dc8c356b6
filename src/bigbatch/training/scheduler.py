"""Learning-rate schedulers that count base batches of samples instead of optimizer steps."""

import copy
import warnings
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from bigbatch.errors import LoopError, SettingError, StateError
from bigbatch.setting_types import Positive, check_setting

_SCHEDULED = ("lr", "momentum", "betas")  # what a scheduler writes into the groups


class BaseBatchScheduler:
    """Advances a step-counting scheduler once for every base batch of samples consumed.

        ticks = floor(samples / scheduler_batch)

    `scheduler_batch` is the base batch, unless another one is set. So a schedule written for it
    keeps its shape over the data whatever the batch size does. A fraction of it is remembered. A
    scheduler that has ended stays at its end: a OneCycleLR, which would raise, a CosineAnnealingLR,
    which would rise again, a SequentialLR that ends with one of them, a ChainedScheduler as soon as
    one of its parts has ended.

    Args:
        base_batch: batch size that the learning rate was tuned for.
        optimizer: the one that trains; a scheduler must belong to it.
    """

    def __init__(self, base_batch: int, optimizer: Optimizer) -> None:
        self.base_batch = base_batch
        self._scheduler_batch: float = base_batch
        self._optimizer = optimizer
        self._scheduler: LRScheduler | None = None
        self._samples: float = 0  # since the last tick
        self._left_at: int | None = None  # the scheduler's own count after its last tick here
        self._refused = 0  # ticks after the schedule's end
        self._pending: dict[str, Any] | None = None  # state of a scheduler that is still to come

    @property
    def scheduler_batch(self) -> float:
        """Samples per tick.

        Raises:
            SettingError: where it is set to no positive number.
        """
        return self._scheduler_batch

    @scheduler_batch.setter
    def scheduler_batch(self, samples: float) -> None:
        self._scheduler_batch = check_setting("scheduler_batch", samples, Positive)

    @property
    def scheduler(self) -> LRScheduler | None:
        """The scheduler that is advanced, if any; None forgets a loaded one too.

        Raises:
            SettingError: one that cannot be advanced in base batches.
            StateError: the loaded state is that of another class.
        """
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: LRScheduler | None) -> None:
        if scheduler is None:
            self._pending = None
        else:
            _require_advanceable(scheduler, self._optimizer)
        self._scheduler = scheduler
        self._resume()

    def advance(self, samples: int) -> None:
        """Takes the samples of one optimizer step in and ticks as often as they fill.

        Raises:
            LoopError: as `require_ready`.
        """
        self.require_ready()
        self._samples += samples
        ticks, self._samples = divmod(self._samples, self.scheduler_batch)
        if self._scheduler is not None:
            for _ in range(int(ticks)):
                self._tick(self._scheduler)
            self._left_at = _ticks(self._scheduler)

    def require_ready(self) -> None:
        """Whether `advance` can be called, to be asked before anything is changed.

        Raises:
            LoopError: somebody else advances the scheduler too, or the one that was loaded was not
                set again.
        """
        if self._pending is not None:
            raise LoopError(
                f"the loaded state is that of a {self._pending['class']}, which is not there; set "
                "train.scheduler after loading, or set it to None to continue without"
            )
        scheduler = self._scheduler
        if scheduler is not None and self._left_at not in (None, _ticks(scheduler)):
            raise LoopError(
                f"the {type(scheduler).__name__} was left at tick {self._left_at} and is at "
                f"{_ticks(scheduler)}; step.update() advances it: leave scheduler.step() out"
            )

    def _tick(self, scheduler: LRScheduler) -> None:
        if not _has_ended(scheduler):
            scheduler.step()
            return
        self._refused += 1
        if self._refused == 2:  # a schedule of T ticks starts at tick 0, so one is always left over
            rates = [float(group["lr"]) for group in self._optimizer.param_groups]
            warnings.warn(
                f"{type(scheduler).__name__} reached its end and stays there, at lr={rates}; "
                "train.base_steps(epochs) gives the total to build it with",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs, the scheduler's own state included."""
        scheduler = self._pending
        if self._scheduler is not None:
            groups = self._optimizer.param_groups
            scheduler = {
                "class": type(self._scheduler).__name__,
                "state": self._scheduler.state_dict(),
                "groups": [
                    {key: copy.deepcopy(group[key]) for key in _SCHEDULED if key in group}
                    for group in groups
                ],
            }
        return {
            "samples": self._samples,
            "base_batch": self.scheduler_batch,
            "scheduler": scheduler,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state; the scheduler may be set later.

        Raises:
            StateError: its scheduler has counted other base batches.
        """
        saved = state["base_batch"]
        if state["scheduler"] is not None and saved != self.scheduler_batch:
            remedy = (
                f"resume with base_batch={saved}"
                if self.scheduler_batch == self.base_batch
                else "resume with the loader and the processes of the saved run"
            )
            raise StateError(
                f"the saved schedule has counted base batches of {saved} samples, these are of "
                f"{self.scheduler_batch}; {remedy}"
            )
        self._samples = state["samples"]
        self._pending = state["scheduler"]
        self._resume()

    def _resume(self) -> None:
        """Loads into the scheduler, once both are there.

        Its constructor has set the groups again if it came after the optimizer's state.
        """
        self._left_at, self._refused = None, 0
        if self._scheduler is None or self._pending is None:
            return
        saved, name = copy.deepcopy(self._pending), type(self._scheduler).__name__
        if saved["class"] != name:
            raise StateError(
                f"the saved scheduler is a {saved['class']}, not a {name}; build the same one, or "
                "load first and set train.scheduler to None, then to the new one"
            )
        if len(saved["groups"]) != len(self._optimizer.param_groups):
            raise StateError(
                f"the saved schedule is for {len(saved['groups'])} parameter groups, the optimizer "
                f"has {len(self._optimizer.param_groups)}; build it with the same groups"
            )
        self._scheduler.load_state_dict(saved["state"])
        for group, values in zip(self._optimizer.param_groups, saved["groups"], strict=True):
            for key, value in values.items():
                if isinstance(group[key], Tensor):
                    group[key].fill_(float(value))
                else:
                    group[key] = value
        self._pending = None


def _require_advanceable(scheduler: object, optimizer: Optimizer) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise SettingError(
            "ReduceLROnPlateau needs a metric at every step; call its step(metric) in your own "
            "loop and leave scheduler=None"
        )
    if any(kind.__name__ == "AcceleratedScheduler" for kind in type(scheduler).__mro__):
        raise SettingError(
            "a scheduler that accelerate prepared advances once for each process; pass the one "
            "inside it, scheduler.scheduler"
        )
    if not isinstance(scheduler, LRScheduler):
        raise SettingError(f"scheduler={scheduler!r} is no torch LRScheduler")
    if scheduler.optimizer.param_groups is not optimizer.param_groups:  # a wrapper forwards them
        raise SettingError("the scheduler belongs to another optimizer than the one that trains")


def _has_ended(scheduler: LRScheduler) -> bool:
    """Whether its next tick would leave its end; False for what stays there by itself."""
    if isinstance(scheduler, OneCycleLR):
        return bool(scheduler.last_epoch >= scheduler.total_steps - 1)
    if isinstance(scheduler, CosineAnnealingLR):
        return bool(scheduler.last_epoch >= scheduler.T_max)
    if isinstance(scheduler, SequentialLR):
        return _has_ended(scheduler._schedulers[-1])
    if isinstance(scheduler, ChainedScheduler):
        return any(map(_has_ended, scheduler._schedulers))
    return False


def total_ticks(scheduler: LRScheduler) -> int | None:
    """How many ticks a scheduler was built for, where it says: `num_training_steps` and the like.

    Example:
        >>> from torch import nn, optim
        >>> optimizer = optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        >>> total_ticks(OneCycleLR(optimizer, 0.1, total_steps=40))
        40
    """
    if isinstance(scheduler, ChainedScheduler):
        return min(filter(None, map(total_ticks, scheduler._schedulers)), default=None)
    if isinstance(scheduler, SequentialLR):
        last = total_ticks(scheduler._schedulers[-1])
        return None if last is None else scheduler._milestones[-1] + last
    if isinstance(scheduler, LambdaLR):  # Hugging Face's are partials
        keywords = getattr(scheduler.lr_lambdas[0], "keywords", {})
        return keywords.get("num_training_steps")
    names = {OneCycleLR: "total_steps", CosineAnnealingLR: "T_max", PolynomialLR: "total_iters"}
    return next(
        (getattr(scheduler, names[kind]) for kind in names if isinstance(scheduler, kind)), None
    )


def _ticks(scheduler: LRScheduler) -> int:
    """The scheduler's own count; a ChainedScheduler leaves it to its parts."""
    while isinstance(scheduler, ChainedScheduler):
        scheduler = scheduler._schedulers[0]
    return int(scheduler.last_epoch)
