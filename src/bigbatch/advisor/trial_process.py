"""Runs a program once, at another batch size and other rates, and writes down its losses.

`python -m bigbatch.advisor.trial_process TRIAL`, where TRIAL is a `Trial` as JSON.
"""

import json
import math
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from bigbatch.advisor.advised_settings import ASKED, LR_FACTOR
from bigbatch.advisor.forward_watch import ForwardHook, ForwardWatch, tensors_in
from bigbatch.advisor.found_training import Caller, FoundTraining, candidates
from bigbatch.advisor.own_folder import OwnFolder
from bigbatch.advisor.run_program import run_program
from bigbatch.advisor.training_observer import EndOfProgram, end_steps
from bigbatch.errors import SettingError

_FIRST = 2  # steps that find the model and fill caches; time begins after them
_KEPT = 64  # losses that are kept on the device
_SEEDS = 2**32  # numpy's seeds are below that


@dataclass(frozen=True)
class Trial:
    """One run of a program."""

    target: str  # the script or module
    arguments: tuple[str, ...]
    is_module: bool
    users: str  # the folder that the program runs in
    folder: str  # its own in place of that
    losses: str  # the file for the steps
    sizes: dict[str, int]  # batch size of a loader in a trial, by that in the program
    dim: int  # of the model's first tensor in which samples are
    backwards: int  # of a step and rank
    seed: int
    seconds: float  # of training, after which it ends
    steps: int  # likewise
    lr_factors: dict[str, float]  # by the optimizer's class

    def of_other_rank(self) -> "Trial":
        """That of a rank that rank 0 ends, and which writes no losses."""
        return replace(self, losses=os.devnull, seconds=math.inf, steps=sys.maxsize)

    def as_json(self) -> str:
        """The text for the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Trial":
        """The trial of such a text."""
        return cls(**json.loads(text))


def run(trial: Trial) -> None:
    """Runs the program in its folder, which is there."""
    folder = OwnFolder(Path(trial.folder), Path(trial.users))
    target = trial.target if trial.is_module else str(folder.own(Path(trial.target)))
    _scale_loaders({int(size): new for size, new in trial.sizes.items()})
    shift_seeds(trial.seed)
    steps = TrialSteps(trial)
    folder.enter()
    try:
        run_program(target, trial.arguments, is_module=trial.is_module)
    except EndOfProgram:
        pass
    finally:
        steps.write()
    if dist.is_available() and dist.is_initialized():
        sys.stdout.flush()
        os._exit(0)  # the other ranks wait, so that a process group might wait for them


def _scale_loaders(sizes: dict[int, int]) -> None:
    """Gives each DataLoader that is made from now on the batch size of the trial.

    A trainer makes a loader again from the sizes of another one, which have been scaled then. So a
    size that loaders got, and what would become one that they had, are left alone from then on.
    """
    make = DataLoader.__init__

    def scaled(size: Any) -> Any:
        if not isinstance(size, int) or size not in sizes:
            return size
        new = sizes[size]
        for one in [n for n in sizes if n != size and (n == new or sizes[n] == size)]:
            del sizes[one]
        return new

    def init(
        self: DataLoader[Any], dataset: Any, batch_size: Any = 1, *args: Any, **kw: Any
    ) -> None:
        for sampler in (kw.get("sampler"), kw.get("batch_sampler"), *args[1:3]):
            size = getattr(sampler, "batch_size", None)
            if (new := scaled(size)) != size:
                with suppress(AttributeError):  # it cannot be set
                    sampler.batch_size = new
        make(self, dataset, scaled(batch_size), *args, **kw)

    DataLoader.__init__ = init  # type: ignore[method-assign]


def shift_seeds(seed: int) -> None:
    """Seeds the program, and adds this to the seeds that it sets itself."""
    for owner in (random, np.random, torch):
        name = "manual_seed" if owner is torch else "seed"
        setattr(owner, name, _shifted(getattr(owner, name), seed))
        getattr(owner, name)(0)


def _shifted(set_seed: Callable[..., Any], seed: int) -> Callable[..., Any]:
    def shifted(value: Any = None, *args: Any, **kw: Any) -> Any:
        for name in {"seed", "a"} & kw.keys():  # as torch and numpy, and random, call it
            value = kw.pop(name)
        if isinstance(value, int | np.integer):
            is_above = value < _SEEDS <= value + seed
            value = value + seed - _SEEDS * is_above
        return set_seed(value, *args, **kw)

    return shifted


class TrialSteps:
    """The optimizer steps of a run: scales their rates, keeps their losses, ends them.

    A step is one of the optimizer that ends one first. The loss is the sum of what its backwards
    start from, without the factor of a GradScaler.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._file = open(trial.losses, "w")  # noqa: PTH123, SIM115  # before the hook refuses it
        self._clock: Optimizer | None = None
        self._stepping: list[Optimizer] = []  # whose steps have begun, the outermost first
        # scaled, of the first group of the innermost optimizer, whose step ends first
        self._rate: Any = None
        self._rates: dict[int, Any] = {}  # own and scaled, of groups that are scaled now
        self._losses: list[Tensor] = []  # of the backwards of this step
        self._unscaled: dict[int, Tensor] = {}  # losses by what a GradScaler has made of them
        self._rows = self._seen = 0  # of the model's first tensor, in this step and in all
        self._watch: ForwardWatch | None = None  # of the second step
        self._number, self._began = 0, 0.0
        self._pending: list[Tensor] = []  # losses of steps
        # rows, those of all steps so far, seconds, rate of the first group
        self._steps: list[tuple[int, int, float, float]] = []
        self._values: list[float] = []  # of the losses
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        torch.autograd.backward = self._noting(torch.autograd.backward)
        scale = torch.amp.GradScaler.scale

        def noting_scale(scaler: Any, outputs: Any) -> Any:
            scaled = scale(scaler, outputs)
            if isinstance(scaled, Tensor):
                self._unscaled[id(scaled)] = outputs
            return scaled

        torch.amp.GradScaler.scale = noting_scale  # type: ignore[assignment, method-assign]

    def write(self) -> None:
        """Writes rows, all rows so far, seconds, rate and loss of each step."""
        self._read_losses()
        lines = zip(self._steps, self._values, strict=True)
        self._file.writelines(json.dumps([*step, loss]) + "\n" for step, loss in lines)
        self._file.close()

    def _noting(self, backward: Callable[..., None]) -> Callable[..., None]:
        def noting(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # no checkpointing inside a backward
                roots = [tensors] if isinstance(tensors, Tensor) else [*tensors]
                for root in roots:
                    self._losses.append(self._unscaled.pop(id(root), root).detach().sum())
            backward(tensors, *args, **kwargs)

        return noting

    # the hooks

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._leave(optimizer)  # its last step has failed
        self._stepping.append(optimizer)
        name = type(optimizer).__name__
        scale = 1.0 if LR_FACTOR in ASKED else self._trial.lr_factors.get(name, 1.0)
        for group in optimizer.param_groups:
            if id(group) in self._rates or scale == 1:
                continue
            if group.get("lr") is None:
                raise SettingError(
                    f"{name} has no lr in its parameter groups that a trial could scale; write "
                    "bb.advised_lr(RATE) where it gets its rate"
                )
            scaled = group["lr"] * scale
            self._rates[id(group)] = group["lr"], scaled
            group["lr"] = scaled

    def _leave(self, optimizer: Optimizer) -> None:
        are_kept = True
        for inner in end_steps(self._stepping, optimizer):
            for group in inner.param_groups:
                if id(group) in self._rates:
                    own, scaled = self._rates.pop(id(group))
                    are_kept &= group["lr"] is scaled
                    group["lr"] = own
        if not are_kept:
            raise SettingError(
                f"a learning rate of {type(optimizer).__name__} is set during its step, so a trial "
                "cannot scale it; write bb.advised_lr(RATE) where it is set"
            )

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._rate is None:
            self._rate = optimizer.param_groups[0].get("lr")
        self._leave(optimizer)
        if self._stepping:
            return
        rate, self._rate = self._rate, None
        if self._clock in (None, optimizer):
            self._clock = optimizer
            self._end_step(optimizer, math.nan if rate is None else float(rate))

    def _end_step(self, optimizer: Optimizer, rate: float) -> None:
        self._number += 1
        count = self._trial.backwards
        losses = self._losses[-count:]  # without those of skipped steps
        self._seen += self._rows
        if self._number <= _FIRST:
            self._find_calls(optimizer)
            self._began, self._seen = time.perf_counter(), 0
        elif len(losses) == count:  # an epoch may end with fewer, and a smaller sum
            seconds = time.perf_counter() - self._began
            self._steps.append((self._rows, self._seen, seconds, rate))
            self._pending.append(losses[0] if len(losses) == 1 else torch.stack(losses).sum())
        self._rows = 0
        self._losses.clear()
        self._unscaled.clear()
        if len(self._pending) >= _KEPT:
            self._read_losses()
        if self._is_over():
            raise EndOfProgram

    def _is_over(self) -> bool:
        steps, trial = self._steps, self._trial
        return bool(steps) and (len(steps) >= trial.steps or steps[-1][2] >= trial.seconds)

    def _find_calls(self, optimizer: Optimizer) -> None:
        """Finds the modules that the loop calls, and counts the rows of their inputs."""
        if self._watch is None:
            outermost = FoundTraining.find([optimizer], Caller("", None)).outermost
            self._watch = ForwardWatch(candidates(outermost), lambda error: None)
            self._watch.start()
            return
        self._watch.stop()
        for module in self._watch.called:
            hook = ForwardHook(self, "count_rows")
            module.register_forward_pre_hook(hook, with_kwargs=True)

    def count_rows(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The loop calls a module."""
        if torch.is_grad_enabled():
            first = next((x for x in tensors_in((args, kwargs)) if x.dim()), None)
            if first is not None and self._trial.dim < first.dim():
                self._rows += first.shape[self._trial.dim]

    def _read_losses(self) -> None:
        if self._pending:
            self._values += torch.stack([loss.double() for loss in self._pending]).tolist()
            self._pending.clear()


if __name__ == "__main__":
    run(Trial.from_json(sys.argv[1]))
