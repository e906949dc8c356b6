"""Reads the gradient noise of a step at the end of its last backward."""

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbatch.advisor.forward_watch import ForwardWatch
from bigbatch.advisor.found_training import LATER, FoundTraining
from bigbatch.advisor.observations import Limits, Measurement, Way
from bigbatch.advisor.sample_count import require_one_size
from bigbatch.errors import BigbatchError, GradientError, SettingError
from bigbatch.gradients import GradientSource, Subscriber
from bigbatch.gradients.dtypes import widest_float
from bigbatch.gradients.groups.forward_hook import PrepareAfterForward
from bigbatch.statistics.consecutive_steps import ConsecutiveSteps
from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.noise_scale import GradientStatistics

_CHANGED = (
    "the weights changed between two backwards of one step (sharpness-aware minimization, a "
    "closure?), so its backwards are no micro-batches of one gradient"
)
_ZEROED = (
    "the gradients were zeroed between two backwards of one optimizer step, so it is not the step "
    "of one gradient (sharpness-aware minimization, gradient surgery, or a GradScaler that skipped)"
)
UNSEEN = "the last backward of the step was not seen"


@dataclass(frozen=True)
class StepReading:
    """What a step showed."""

    measurement: Measurement | None = None  # None if it could not be read
    failure: str = ""  # why; empty if there is no reason
    backwards: int = 0  # how many it had on this rank
    samples: int = 0  # of the first of these
    # sums over the ranks of the values that each has passed; None if it was not to be read
    shared: Sequence[float] | None = None
    coupling: str = ""  # the function in which samples influence others; empty if none is known


class StepReader(Subscriber):
    """Reads steps by the backwards of all ranks, or by groups of each backward.

    `.grad` is what the backwards left only until the loop clips or unscales it, and a closure may
    run inside `optimizer.step()`. So a step is read at the end of its last backward, whose number
    is that of the step before. Errors end the reading of a step, never the program.
    """

    def __init__(
        self, training: FoundTraining, forwards: ForwardWatch, way: Way, limits: Limits
    ) -> None:
        self.way: Way = way
        self.backwards = 0  # that a step has on this rank; 0 where steps are watched, not read
        self._forwards = forwards
        self._training, self._limits = training, limits
        self.samples_per_row = 1.0  # samples of an entry in the model's first tensor
        self._meter = meter = GradientMeter(
            training.model, per_layer=True, scaler=training.caller.scaler
        )
        if meter.source.processes > meter.source.ranks:
            raise SettingError("advise cannot read tensor parallelism; train by AdaptiveBatch")
        meter.select(training.parameters)
        self.source: GradientSource = meter.source
        self.ranks = self.source.ranks  # that share the step
        self.source.on_error = self.note_error
        if way == "groups":
            meter.cut_backwards(limits.groups, training.model)
            tap = self.source.group_tap
            assert tap is not None
            tap.on_error = self._note_error_of_groups
            tap.with_products = True
            forwards.after_forward = PrepareAfterForward(self.source, forwards.dim)
        self._probes = (training.parameters[0], training.parameters[-1])
        self._checks_weights = training.wrapper != "FSDP2"  # which writes to them in a forward
        self._reset(0, (), due=False)
        meter.at_step(0, due=False)
        self._prepare()

    def _prepare(self) -> None:
        """Makes the state of a way to read."""

    def _reset(self, number: int, shared: Sequence[float], *, due: bool) -> None:
        """Has seen nothing of this step yet."""
        self._number, self._shared, self._due = number, shared, due
        self._failure = self._coupling = ""
        self._is_begun = False  # whether the step has had a backward
        self._version: int | None = None  # of `_probes`, at the first backward
        self._sizes: list[float] = []
        self._values: Tensor | None = None  # of the meter, on the device
        self._features: Tensor | None = None  # of each micro-batch
        self._products: list[Tensor] = []  # of the groups of each backward

    def start(self, number: int, shared: Sequence[float], *, due: bool) -> None:
        """A step starts."""
        self._reset(number, shared, due=due)
        if due:
            if not self._training.has_all_parameters:
                self._failure = LATER
            self._forwards.start()
            self._meter.at_step(number)
            self.source.subscribe(self)

    def finish(self) -> StepReading:
        """Ends the step."""
        if not self._due:
            return StepReading()
        backwards, expected = self.source.micro_batches, self.backwards
        failure = self._failure
        if expected and backwards != expected:
            failure = failure or (
                f"a step had {backwards} backwards, and the one before {expected}: how many a step "
                "has must not change from step to step"
            )
        statistics, failure = self._read(failure) if expected else (None, failure)
        measurement = None
        if statistics is not None:
            features = [] if self._features is None else self._features.tolist()
            products = torch.stack(self._products).mean(0).tolist() if self._products else ()
            measurement = Measurement(self._number, statistics, features, products)
        self._forwards.stop()
        self.source.restart()
        self.source.unsubscribe(self)
        self._meter.at_step(0, due=False)
        samples = round(self._sizes[0]) if self._sizes else 0
        return StepReading(measurement, failure, backwards, samples, self._shared, self._coupling)

    def close(self) -> None:
        """Removes every hook."""
        self._forwards.after_forward = None
        self._forwards.stop()
        self._meter.close()

    def note_error(self, error: Exception) -> None:
        """The step cannot be read."""
        self._failure = self._failure or reason_of(error)

    def _note_error_of_groups(self, error: Exception) -> None:
        self.source.failed = True
        self.note_error(error)

    # the source's subscriber, after those of the meter

    def begin(self) -> None:
        """The first backward of a step starts."""
        if self._is_begun:
            raise GradientError(_ZEROED)
        self._is_begun = True

    def micro_batch(self, weight: float, groups: int = 1) -> None:
        """A backward starts."""
        tap = self.source.group_tap
        of_model = "" if tap is None else tap.coupling
        self._coupling = self._coupling or of_model or self._forwards.take_coupling()
        samples = self._forwards.take_samples()
        if not samples:
            raise GradientError(
                f"backward {len(self._sizes) + 1} of a step has no forward of its own: it is that "
                "of another loss of the same samples (actor and critic, a penalty, several tasks), "
                "or of reentrant checkpointing (use_reentrant=False avoids it), and no micro-batch"
            )
        stated = self._limits.micro_batch
        if stated is None and self.backwards:
            require_one_size(samples)
        size = self.samples_per_row * (samples[0] or 0) if stated is None else stated[0]
        self._sizes.append(float(size))

    def end(self) -> None:
        """A backward is complete."""
        number = self.source.micro_batches
        version = sum(p._version for p in self._probes)
        if self._version is None:
            self._version = version
        if version != self._version and self._checks_weights:
            raise GradientError(_CHANGED)
        if number == self.backwards:
            if len(set(self._sizes)) > 1:
                sizes = ", ".join(f"{size:.0f}" for size in self._sizes)
                raise GradientError(
                    f"the backwards of a step are of {sizes} samples, and it cannot be seen how "
                    "the loss weights them"
                )
            for size, norms in zip(self._sizes, self.source.group_norms, strict=True):
                if norms is not None:  # whose weights are rows
                    rows = sum(norms.weights)
                    if norms.products is not None and len({*norms.weights}) == 1:
                        self._products.append(norms.products)
                    norms.weights = tuple(size * weight / rows for weight in norms.weights)
            sqnorms = self._meter.micro_batch_sqnorms.sum(1)
            projections = self._meter.micro_batch_projections.to(sqnorms)
            self._features = torch.cat([sqnorms[:, None], projections], 1)
            self._take()

    # reading

    def _take(self) -> None:
        """Takes what the step's last backward has left."""
        self._values = self._measure(self._sizes)

    def _measure(self, sizes: Sequence[float] | None) -> Tensor:
        device = self.source.parameters[0].device
        shared = torch.tensor(self._shared, dtype=widest_float(device), device=device)
        return self._meter.measure(sizes, shared)

    def _read(self, failure: str) -> tuple[GradientStatistics | None, str]:
        """The statistics, and the reason if there are none; sums what is shared."""
        if self._values is None and self.ranks > 1:
            self._values = self._measure(None)  # for the other ranks, which wait
        if self._values is None:
            return None, failure or UNSEEN
        values = self._values.tolist()
        self._shared = values[: len(self._shared)]
        if failure:
            return None, failure
        try:
            with warnings.catch_warnings(action="ignore"):  # which are for loops with a meter
                statistics = self._meter.statistics(self._meter.totals(values))
        except GradientError as error:
            return None, reason_of(error)
        return usable(statistics)


class ConsecutiveStepsReader(StepReader):
    """Compares the gradients of two consecutive steps, where no step shows any noise.

    Biased, since the second gradient is that of other weights; see `ConsecutiveSteps`, which keeps
    a copy of the gradient of the first one.
    """

    def _prepare(self) -> None:
        self._pairs = ConsecutiveSteps(self._meter.layers)
        self._last_number = -2  # of the step that was added last
        self._first_moments: tuple[float, ...] = ()  # of the first step's input
        self._pair_sums: Tensor | None = None

    def _take(self) -> None:
        scaler, parameters = self._training.caller.scaler, self.source.parameters
        earlier_moments, self._first_moments = self._first_moments, self._forwards.input_moments()
        if self._number != self._last_number + 1:
            self._pairs.forget()
        self._last_number = self._number
        gradients = [self.source.local_grad(p) for p in parameters]
        scale = 1.0 if scaler is None else scaler.get_scale()
        self._pair_sums = self._pairs.add(parameters, gradients, self._sizes[0], scale)
        if self._pair_sums is not None and earlier_moments == self._first_moments:
            self._pair_sums = None
            raise GradientError(
                "two consecutive steps are of the same samples (full-batch training, one graph), "
                "so they do not show how gradients of different samples differ"
            )

    def _read(self, failure: str) -> tuple[GradientStatistics | None, str]:
        if failure:
            self._pairs.forget()
        sums, self._pair_sums = self._pair_sums, None
        if failure or sums is None:  # the first step of a pair
            return None, failure
        return usable(self._pairs.statistics(sums.tolist()))


def reason_of(error: Exception) -> str:
    """What an error says, without what a user of `GradientMeter` would do."""
    if not isinstance(error, BigbatchError):
        return f"{type(error).__name__}: {error}"
    return re.sub(r"[;,] (or )?measure by micro-batches.*", "", str(error))


def usable(statistics: GradientStatistics) -> tuple[GradientStatistics | None, str]:
    """The statistics of a step if they say anything, and why not."""
    if not math.isfinite(statistics.grad_sqnorm + statistics.grad_variance):
        return None, "the gradient is not finite"
    if not statistics.grad_variance and not statistics.grad_sqnorm:
        return None, "every gradient is zero"
    return statistics, ""
