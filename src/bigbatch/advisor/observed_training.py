"""Learns what the steps of a training consist of, and measures some of them."""

import math
import time
from collections.abc import Iterable, Sequence
from statistics import median, mode
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from bigbatch.advisor.cut_batch_reader import CutBatchReader
from bigbatch.advisor.forward_watch import ForwardWatch, ModuleCall
from bigbatch.advisor.found_training import LATER, FoundTraining, candidates
from bigbatch.advisor.observations import Found, Limits, MachineTime, Observations, Way
from bigbatch.advisor.rank_agreement import sign_in
from bigbatch.advisor.sample_count import LoaderWatch, SampleCount, count_samples
from bigbatch.advisor.sampled_steps import SampledSteps
from bigbatch.advisor.step_reader import ConsecutiveStepsReader, StepReader, StepReading, reason_of
from bigbatch.advisor.time_probe import probe
from bigbatch.errors import SettingError
from bigbatch.policies.step_time import StepTime

Value = TypeVar("Value")

_COUPLED = (
    "the samples of a backward influence each other in {}: a loss that compares them (contrastive, "
    "ranking, hard negatives, a correlation, RMSE) or a model that mixes them. Another batch size "
    "is then another loss, and no noise scale says which is faster; train two or three and compare"
)
_MICRO_BATCHES = 4  # backwards of all ranks from which they are compared themselves
_LEARNED = 2  # equal steps that show how many backwards a step has
_MAX_LEARNED = 8  # steps that may pass until then
_ATTEMPTS = 3  # measured steps in a row that may fail
_CUTTING = ("groups", "cut micro-batches")  # the ways after which another one is tried
_READERS: dict[Way, type[StepReader]] = {
    "cut micro-batches": CutBatchReader,
    "consecutive steps": ConsecutiveStepsReader,
}
_FEWEST = 6  # steps that finding, learning and one measurement take


class ObservedTraining:
    """The steps of one training, from the one after it was found to the limits.

    First it learns how many backwards a step has (`_learn`), then it measures some steps
    (`_measure`). `end_step` is called after every step of each of its optimizers.
    """

    def __init__(
        self,
        training: FoundTraining,
        limits: Limits,
        began: float,
        steps: int,
        observations: Observations,
        loaders: LoaderWatch,
    ) -> None:
        self.signed_in = False  # whether the other ranks know what this one has found
        self._training, self._limits, self._began = training, limits, began
        self._steps, self._observations = steps, observations
        self._forwards = ForwardWatch(
            candidates(training.outermost), lambda error: self._reader.note_error(error)
        )
        self._reader = StepReader(training, self._forwards, "micro-batches", limits)
        self._samples: SampledSteps | None = None  # while it measures
        self._learned: list[int] = []  # backwards of each step
        self._loaders = loaders
        self._yielded: list[float] = []  # samples of the loader in each of these steps
        self._count: SampleCount | None = None  # the samples of a backward
        self._backwards_before: int | None = None  # the step of an optimizer that is not the last
        self._backward_samples: list[int] = []  # of the measured steps
        self._failures: list[str] = []  # of measured steps
        self._norms = set[type[nn.Module]]()  # the kinds of BatchNorm that train
        self._optimizers_took = 0.0  # seconds in this step
        self._optimizer_seconds: list[float] = []  # of the steps that were not measured
        self._data_seconds: list[float] = []  # of loaders, in the steps that were not measured
        self._waits: list[float] = []  # seconds before the first forward of a measured step
        self._last_end = 0.0
        loaders.samples(), loaders.take_seconds()  # of the steps before
        self._start_step()

    def close(self) -> None:
        """Removes every hook."""
        self._loaders.close()
        self._reader.close()

    def end_step(self, optimizer: Optimizer, seconds: float) -> bool:
        """An optimizer has stepped for so long; returns whether the limits are reached."""
        self._optimizers_took += seconds
        if not self._ends_step(optimizer):
            return False
        reading, data_seconds = self._reader.finish(), self._loaders.take_seconds()
        if reading.shared is None:  # a measured step finds nothing in the caches
            self._optimizer_seconds.append(self._optimizers_took)
            self._data_seconds.append(data_seconds)
        self._optimizers_took = 0.0
        self._steps += 1
        if self._samples is None:
            self._learn(reading)
            return False
        return self._measure(self._samples, reading)

    def _ends_step(self, optimizer: Optimizer) -> bool:
        """Whether all optimizers of the training have stepped after the same backwards."""
        optimizers, backwards = self._training.optimizers, self._reader.source.micro_batches
        if all(optimizer is not other for other in optimizers):
            raise SettingError(
                f"{type(optimizer).__name__} began to step after {self._training.names} had been "
                "found: several optimizers that do not step together (GAN, actor and critic, "
                "phases); advise one of them, `with bb.advise(model, optimizer)`"
            )
        if optimizer is not optimizers[-1]:
            self._backwards_before = backwards
            return False
        before, self._backwards_before = self._backwards_before, None
        if before is not None and backwards != before:
            raise SettingError(
                f"{self._training.names} step in turn, each after backwards of its own (GAN, actor "
                "and critic); advise one of them, `with bb.advise(model, optimizer)`"
            )
        return True

    def _start_step(self) -> None:
        self._last_end = time.perf_counter()
        samples = self._samples
        shared, due = ((), True) if samples is None else (samples.shared, samples.due)
        self._reader.start(self._steps, shared, due=due)

    # learning

    def _learn(self, reading: StepReading) -> None:
        """Learns how many backwards a step has."""
        self._learned.append(reading.backwards)
        self._yielded.append(self._loaders.samples() / max(reading.backwards, 1))
        if len(self._learned) >= _LEARNED and len({*self._learned[-_LEARNED:]}) == 1:
            self._begin_measuring(reading)
        elif len(self._learned) >= _MAX_LEARNED:
            raise SettingError(self._explained(reading.failure or _irregular(self._learned)))
        else:
            self._start_step()

    def _begin_measuring(self, reading: StepReading) -> None:
        backwards = reading.backwards
        refusal = reading.failure or ("" if backwards else _irregular(self._learned))
        self._observations.coupling = reading.coupling
        if backwards * self._reader.ranks < _MICRO_BATCHES and reading.coupling:
            refusal = refusal or _COUPLED.format(reading.coupling)
        refusal = refusal or self._check_samples()
        if self._reader.ranks > 1:
            self.signed_in = True
            refusal = sign_in(refusal)
        if refusal:
            raise SettingError(self._explained(refusal))
        modules = self._training.model.modules()
        self._norms = {type(m) for m in modules if isinstance(m, _BatchNorm) and m.training}
        self._forwards.keep_called()
        if backwards * self._reader.ranks >= _MICRO_BATCHES:
            self._read_by("micro-batches", backwards)
        elif hidden := self._hidden_groups():
            self._read_without_groups(hidden, backwards)
        else:
            self._read_by("groups", backwards)
        self._start_step()

    def _check_samples(self) -> str:
        """Finds the samples of a backward; says why it cannot, or notes a doubt."""
        forwards, yielded = self._forwards, self._yielded[-_LEARNED:]
        if forwards.last is None:
            return ""
        try:
            self._count = count = count_samples(
                forwards,
                self._training.model,
                self._limits.micro_batch,
                yielded[0] if len({*yielded}) == 1 else 0.0,
            )
        except SettingError as error:
            return str(error)
        forwards.dim, forwards.is_sum = count.dim, count.is_sum
        if count.doubt:
            self._observations.unseen.append(f"what the samples are: {count.doubt}")
        return ""

    def _explained(self, reason: str) -> str:
        """A reason for a refusal, with the likely cause if there are several optimizers."""
        if len(self._training.optimizers) == 1:
            return reason
        return (
            f"{self._training.names} were taken for optimizers that step together after the same "
            f"backwards, but {reason}. If they step in turn (GAN, actor and critic), advise one of "
            "them, `with bb.advise(model, optimizer)`"
        )

    def _hidden_groups(self) -> str:
        """Why groups cannot be seen in any case; empty if they may be."""
        if self._training.is_compiled:
            return "torch.compile hides them"
        is_located = self._count is None or self._count.rows
        return "" if is_located else "it is unknown where the stated samples are"

    def _read_without_groups(self, reason: str, backwards: int) -> None:
        """By micro-batches that are cut, or two or three backwards, or else consecutive steps."""
        ranks, is_first = self._reader.ranks, self._reader.way != "cut micro-batches"
        kind = "groups of samples of one backward" if is_first else "micro-batches of one backward"
        self._observations.unseen.append(f"{kind}: {reason}")
        if is_first and not (
            self._hidden_groups() or CutBatchReader.refusal(self._training, ranks)
        ):
            self._read_by("cut micro-batches", backwards)
        else:
            several = backwards * ranks > 1
            self._read_by("micro-batches" if several else "consecutive steps", backwards)

    def _read_by(self, way: Way, backwards: int) -> None:
        if way != self._reader.way:
            self._reader.close()
            self._reader = _READERS.get(way, StepReader)(
                self._training, self._forwards, way, self._limits
            )
        self._reader.backwards = backwards
        if self._count is not None and self._count.rows:
            self._reader.samples_per_row = self._count.samples / self._count.rows
        limit = math.inf if self._limits.seconds is None else self._limits.seconds
        elapsed = time.perf_counter() - self._began
        self._samples = SampledSteps(
            limit - elapsed, self._limits.steps, pair=way == "consecutive steps"
        )

    # measuring

    def _measure(self, samples: SampledSteps, reading: StepReading) -> bool:
        """Takes the measurement of a step, if it has one."""
        seconds = time.perf_counter() - self._last_end  # with those of reading it
        failure, coupling = reading.failure, self._observations.coupling or reading.coupling
        self._observations.coupling = coupling
        samples.end_step(seconds, reading.shared, failed=bool(failure), is_coupled=bool(coupling))
        if samples.is_coupled and self._reader.way != "micro-batches":
            raise SettingError(_COUPLED.format(coupling or "the loss of another rank"))
        if failure:
            self._failures.append(failure)
        if reading.measurement is not None:
            self._observations.measurements.append(reading.measurement)
            self._backward_samples.append(reading.samples)
            self._waits.append(self._forwards.waited)
        if samples.timed_out or self._steps >= (self._limits.steps or math.inf):
            self._observations.ended_by = "budget" if samples.timed_out else "steps"
            return True
        if samples.failed >= _ATTEMPTS:
            failure = failure or "another rank could not read its step"
            if self._reader.way not in _CUTTING:
                raise SettingError(failure)
            self._failures.clear()
            self._read_without_groups(failure, self._reader.backwards)
        self._start_step()
        return False

    # the end

    def finish(self) -> None:
        """Ends the observation."""
        self.close()
        observations, call = self._observations, self._forwards.last
        observations.steps = self._steps
        observations.seconds = time.perf_counter() - self._began
        if not self._training.has_all_parameters:
            raise SettingError(LATER)
        if observations.coupling and self._reader.way != "micro-batches":
            raise SettingError(_COUPLED.format(observations.coupling))
        if not observations.measurements or call is None or self._samples is None:
            reason = self._failures[-1] if self._failures else too_short(self._steps)
            if self._failures and self._reader.way in _CUTTING:
                reason += (
                    f"; another way was not tried in the {self._steps} steps that were observed"
                )
            raise SettingError(reason)
        observations.way = self._reader.way
        observations.step_seconds = self._samples.seconds
        observations.found = found = self._describe(call)
        observations.batch_norm = self._batch_norm(found.micro_batch)
        if self._failures:
            observations.unseen.append(
                f"{len(self._failures)} measured steps, the last one because {self._failures[-1]}"
            )
        observations.refusal = ""

    def _batch_norm(self, samples: int) -> str:
        """What BatchNorm sees in the compared micro-batches of backwards of so many samples."""
        way = self._reader.way
        if not self._norms or way not in ("micro-batches", "cut micro-batches"):
            return ""
        if nn.SyncBatchNorm in self._norms and self._reader.ranks > 1:
            return (
                "SyncBatchNorm normalizes over the samples of all ranks, so the micro-batches that "
                "are compared influence each other, and the noise scale is biased"
            )
        parts = CutBatchReader.sizes(samples, self._limits.groups)
        size = parts[0] if way == "cut micro-batches" else samples
        return (
            f"BatchNorm sees micro-batches of {size} samples in what is compared; with others it "
            "is another function, of another noise scale"
        )

    def _describe(self, call: ModuleCall) -> Found:
        """The training in words and numbers."""
        training, reader = self._training, self._reader
        groups = [group for of_one in training.groups.values() for group in of_one]
        device = training.parameters[0].device
        outermost = training.outermost[0]
        # the usual sizes: the last batch of an epoch may be smaller
        samples = mode(one.statistics.samples for one in self._observations.measurements)
        return Found(
            optimizer=training.names,
            engine=training.engine,
            model=type(getattr(outermost, "module", outermost)).__name__,
            parameters=sum(p.numel() for p in training.parameters),
            gradient_bytes=sum(p.numel() * p.element_size() for p in training.parameters),
            ranks=reader.ranks,
            accumulation=reader.backwards,
            micro_batch=mode(self._backward_samples),
            counted=self._counted(),
            rows=1 / self._reader.samples_per_row,
            dim=call.dim,
            is_loaders=self._count is None or not self._count.doubt,
            batch_size=round(samples),
            device=_name_of(device),
            autocast="" if call.autocast_dtype is None else str(call.autocast_dtype)[6:],
            scaler=training.caller.scaler is not None,
            has_loader=self._loaders.has_read,
            lr={  # which a schedule multiplies
                name: _each_once(float(g.get("initial_lr", g["lr"])) for g in groups if "lr" in g)
                for name, groups in training.groups.items()
            },
            betas=_each_once(tuple(map(float, g["betas"])) for g in groups if g.get("betas")),
            momentum=_each_once(float(g["momentum"]) for g in groups if g.get("momentum")),
            composite=training.composite,
        )

    def _counted(self) -> str:
        count = self._count
        if count is None or not count.rows:
            return "as --micro-batch says"
        first = f"dimension {count.dim} of the model's first tensor"
        if count.is_sum:
            return f"counted in all calls of the model, in {first}"
        if count.counted:
            return f"as {count.counted} counts them; {first} has {count.rows} rows for these"
        return f"counted in {first}"

    def time_other_sizes(self) -> None:
        """Times backwards of other numbers of samples, once nothing is observed any more."""
        call, found = self._forwards.last, self._observations.found
        if call is None or found is None:
            return
        try:
            times, largest, sample_bytes = self._probe(call)
        except Exception as error:
            self._observations.unseen.append(f"the time of other batch sizes: {reason_of(error)}")
            return
        optimizer = median(self._optimizer_seconds or [0.0])
        backwards = times.seconds([found.micro_batch] * found.accumulation)
        rest = max(0.0, self._observations.step_seconds - backwards - optimizer)
        has_loader = any(self._data_seconds)
        data = min(rest, median(self._data_seconds if has_loader else self._waits or [0.0]))
        self._observations.time = MachineTime(
            times, optimizer, data, rest - data, largest, sample_bytes
        )

    def _probe(self, call: ModuleCall) -> tuple[StepTime, int | None, float]:
        training, is_last = self._training, self._limits.is_last
        if training.wrapper == "FSDP2":
            raise SettingError("under fully_shard it is not measured")
        if len(self._forwards.called) != 1:
            raise SettingError("it is measured where the loop calls one module")
        if training.is_compiled and not is_last:
            raise SettingError("it would compile the model again, which may change what follows")
        count = self._count
        if count is None or not count.rows or count.is_sum:
            raise SettingError(
                "it is measured where one call of the model has a backward's samples"
            )
        return probe(call, count.samples / count.rows, copies=not is_last)


def _each_once(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(values))


def too_short(steps: int) -> str:
    """Why there is no advice after so few steps."""
    return f"the program ended after {steps} optimizer steps; at least {_FEWEST} are needed"


def _irregular(numbers: Sequence[int]) -> str:
    if not any(numbers):
        return (
            "no backward reached a parameter of the optimizer between its steps: gradients that "
            "are set by hand, or come from autograd.grad or torch.func, cannot be seen"
        )
    return (
        f"the optimizer steps had {', '.join(map(str, numbers))} backwards: a step needs the same "
        "number each time to be read at the end of its last one"
    )


def _name_of(device: torch.device) -> str:
    """The device as its maker names it, where torch says that; else its kind."""
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name_of is None else str(name_of(device))
