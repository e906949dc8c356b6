"""What was observed of a training: plain data, from which the advice is computed."""

from dataclasses import dataclass, field
from typing import Literal

from bigbatch.policies.step_time import StepTime
from bigbatch.statistics.noise_scale import GradientStatistics


@dataclass(frozen=True)
class Limits:
    """How long a training is observed.

    Args:
        steps: optimizer steps; None for all.
        seconds: time since the first of them; None for all.
        groups: k, groups of a backward where groups are compared.
        ends_program: whether the end of the observation ends the program.
        is_last: whether nothing of the program comes after `__exit__`, so that a probe may change
            what a module keeps outside its buffers.
        micro_batch: samples of a backward and rank; None for dimension 0 of the first tensor.
    """

    steps: int | None
    seconds: float | None
    groups: int
    ends_program: bool = False
    is_last: bool = False
    micro_batch: int | None = None


NOT_ENDED = "the observation has not ended"

Way = Literal["micro-batches", "groups", "consecutive steps"]


@dataclass(frozen=True)
class Measurement:
    """The gradient noise of one optimizer step.

    Args:
        step: number of the optimizer step, from 0.
        statistics: signal and noise, also by layer.
        features: |h_d|^2 and 8 random projections of this rank's micro-batches, in their order.
    """

    step: int
    statistics: GradientStatistics
    features: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class MachineTime:
    """Where the seconds of a step go, on one device.

    Args:
        backward: seconds of a forward and backward of n samples, fixed + per_sample n.
        optimizer: seconds of an optimizer step.
        data: seconds of a step's samples in the process of the training.
        rest: seconds of a step for everything else: Python, logging, and the all-reduce if there
            are several ranks.
        largest: samples of a forward and backward for which there is memory; None if unknown.
        sample_bytes: bytes that a backward keeps for a sample; 0 if unknown.
    """

    backward: StepTime
    optimizer: float
    data: float
    rest: float
    largest: int | None = None
    sample_bytes: float = 0.0


@dataclass(frozen=True)
class Found:
    """The training that was observed, in words and numbers.

    Args:
        optimizer: class names of the optimizers that step together.
        engine: "PyTorch", "DDP", "FSDP2", or the name of a trainer.
        model: class name of the model.
        parameters: elements of the trained parameters.
        gradient_bytes: bytes of their gradients.
        ranks: processes that share a step.
        accumulation: backwards of a step and rank.
        micro_batch: samples of a backward.
        batch_size: samples of a step, of all ranks.
        device: "cpu", or the name of the GPU.
        autocast: the type of autocast in the forward; empty without it.
        scaler: whether a GradScaler scales the loss.
        lr: the learning rates of the parameter groups at the end.
        betas: of the first parameter group; empty without them.
    """

    optimizer: str
    engine: str
    model: str
    parameters: int
    gradient_bytes: int
    ranks: int
    accumulation: int
    micro_batch: int
    batch_size: int
    device: str
    autocast: str
    scaler: bool
    lr: tuple[float, ...]
    betas: tuple[float, ...]


@dataclass
class Observations:
    """Everything that was observed.

    Args:
        refusal: why there is no advice; empty at the end of an observation that shows some.
        found: the training; None if none was found.
        way: how the noise was measured.
        steps: optimizer steps that were seen.
        seconds: their time.
        step_seconds: median time of a step that was not measured.
        measurements: of the measured steps.
        time: where the seconds go; None if it is unknown.
        unseen: what could not be seen, in sentences.
    """

    refusal: str = NOT_ENDED
    found: Found | None = None
    way: Way | None = None
    steps: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    measurements: list[Measurement] = field(default_factory=list)
    time: MachineTime | None = None
    unseen: list[str] = field(default_factory=list)
