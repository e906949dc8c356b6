"""Observes the training of a program through torch's global hooks on optimizer steps."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from bigbatch.advisor.found_training import Caller, FoundTraining
from bigbatch.advisor.observations import Limits, Observations
from bigbatch.advisor.observed_training import ObservedTraining, too_short
from bigbatch.advisor.rank_agreement import sign_in
from bigbatch.advisor.sample_count import LoaderWatch
from bigbatch.advisor.step_reader import reason_of
from bigbatch.errors import SettingError


class EndOfProgram(BaseException):
    """Ends a program that has been observed; no `except Exception` catches it."""


class TrainingObserver:
    """Observes optimizer steps from `__enter__` to `__exit__`, or until the limits.

    Finds the optimizers that step together, then hands every step to an `ObservedTraining`. An
    exception of its own becomes a refusal, and never reaches the program.
    """

    def __init__(
        self, limits: Limits, *, model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> None:
        self.observations = Observations()
        self.ended = False
        self._limits = limits
        self._model, self._optimizer = model, optimizer
        self._handles: list[RemovableHandle] = []
        self._stepping: list[Optimizer] = []  # whose steps have begun, the outermost first
        self._began = self._step_began = 0.0
        self._cycle: list[Optimizer] = []  # in the order of their first steps
        self._steps = 0  # of the first optimizer
        self._caller: Caller | None = None
        self._training: ObservedTraining | None = None

    def __enter__(self) -> "TrainingObserver":
        self._loaders = LoaderWatch()
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._loaders.close()
        if not self.ended:
            self._guarded(self._end)
        self._guarded(self._time)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        end_steps(self._stepping, optimizer)  # its last one has failed
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:
            return
        self._step_began = time.perf_counter()
        if self._caller is None and self._is_observed(optimizer):
            self._guarded(self._find_caller)

    def _find_caller(self) -> None:
        self._caller = Caller.find(sys._getframe())

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        end_steps(self._stepping, optimizer)
        if self._stepping or not self._is_observed(optimizer):
            return
        if not self.ended:
            self._guarded(lambda: self._step(optimizer))
        if self.ended and self._limits.ends_program:
            self._guarded(self._time)
            raise EndOfProgram

    def _is_observed(self, optimizer: Optimizer) -> bool:
        return self._optimizer is None or optimizer is self._optimizer

    def _step(self, optimizer: Optimizer) -> None:
        if self._training is None:
            self._find(optimizer)
        elif self._training.end_step(optimizer, time.perf_counter() - self._step_began):
            self._end()

    def _find(self, optimizer: Optimizer) -> None:
        """Collects the optimizers until the first one steps again."""
        if not self._cycle:
            self._began = time.perf_counter()
        is_new = all(optimizer is not other for other in self._cycle)
        if is_new:
            self._cycle.append(optimizer)
        self._steps += optimizer is self._cycle[0]
        if is_new and optimizer is not self._optimizer:
            return
        assert self._caller is not None
        found = FoundTraining.find(self._cycle, self._caller, self._model)
        ended = self._steps - (len(self._cycle) > 1)  # the last optimizer ends a step
        self._training = ObservedTraining(
            found, self._limits, self._began, ended, self.observations, self._loaders
        )

    def _end(self) -> None:
        self.ended = True
        if self._training is not None:
            self._training.finish()
        elif self._steps:
            raise SettingError(too_short(self._steps))
        else:
            raise SettingError(
                "the program ended without a step of a torch.optim.Optimizer in this process"
            )

    def _time(self) -> None:
        """Times other sizes, once, where nothing of the program comes after it."""
        training, self._training = self._training, None
        if training is not None and not self.observations.refusal:
            training.time_other_sizes()

    def _guarded(self, call: Callable[[], None]) -> None:
        """Calls, and turns an exception into a refusal, which the other ranks get too."""
        try:
            call()
        except Exception as error:
            reason = reason_of(error)
            self.ended, self.observations.refusal = True, reason
            if self._training is not None:
                self._training.close()
            if self._training is None or not self._training.signed_in:
                with suppress(Exception):  # the store may be gone
                    sign_in(reason)


def end_steps(stepping: list[Optimizer], optimizer: Optimizer) -> list[Optimizer]:
    """Ends the step of an optimizer that may have begun, and those inside it; returns whose."""
    places = [i for i, other in enumerate(stepping) if other is optimizer]
    first = places[0] if places else len(stepping)
    ended = stepping[first:]
    del stepping[first:]
    return ended
