"""What was observed of a training: plain data, from which the advice is computed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from bigbatch.policies.step_time import StepTime
from bigbatch.statistics.noise_scale import GradientStatistics


@dataclass(frozen=True)
class Limits:
    """How long a training is observed."""

    steps: int | None  # optimizer steps; None for all
    seconds: float | None  # time since the first of them; None for all
    groups: int  # k, groups of a backward where groups are compared
    ends_program: bool = False  # whether the end of the observation ends the program
    # whether nothing of the program comes after `__exit__`, so that a probe may change what a
    # module keeps outside its buffers
    is_last: bool = False
    # samples of a backward and rank, and their dimension if it is stated; None to find them
    micro_batch: tuple[int, int | None] | None = None


Way = Literal["micro-batches", "groups", "cut micro-batches", "consecutive steps"]


@dataclass(frozen=True)
class Measurement:
    """The gradient noise of one optimizer step."""

    step: int  # number of the optimizer step, from 0
    statistics: GradientStatistics  # signal and noise, also by layer
    # |h_d|^2 and 8 random projections of this rank's micro-batches, in their order
    features: Sequence[Sequence[float]] = ()
    # <h_d, h_e> of the groups of this rank's backwards, (k, k); empty if their sizes differ
    products: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class MachineTime:
    """Where the seconds of a step go, on one device."""

    backward: StepTime  # seconds of a forward and backward of n samples, fixed + per_sample n
    optimizer: float  # seconds of an optimizer step
    data: float  # seconds in which loaders gave a step's batches, or else before its first forward
    # seconds of a step for everything else: Python, logging, and the all-reduce if there are
    # several ranks
    rest: float
    # samples of a forward and backward for which there is memory; None if unknown
    largest: int | None = None
    sample_bytes: float = 0.0  # bytes that a backward keeps for a sample; 0 if unknown


@dataclass(frozen=True)
class Found:
    """The training that was observed, in words and numbers."""

    optimizer: str  # class names of the optimizers that step together
    engine: str  # "PyTorch", "DDP", "FSDP2", or the name of a trainer
    model: str  # class name of the model
    parameters: int  # elements of the trained parameters
    gradient_bytes: int  # bytes of their gradients
    ranks: int  # processes that share a step
    accumulation: int  # backwards of a step and rank
    micro_batch: int  # samples of a backward
    counted: str  # where these were counted, in words
    rows: float  # of the model's first tensor for a sample
    dim: int  # of that tensor in which the samples are
    is_loaders: bool  # whether a loader counts them likewise, as far as is known
    batch_size: int  # samples of a step, of all ranks
    device: str  # "cpu", or the name of the GPU
    autocast: str  # the type of autocast in the forward; empty without it
    scaler: bool  # whether a GradScaler scales the loss
    has_loader: bool  # whether the program has read a DataLoader
    # the learning rates of each optimizer's parameter groups, each once, by its class name
    lr: dict[str, tuple[float, ...]]
    # betas, momentum: each value that a parameter group has, once
    betas: tuple[tuple[float, ...], ...]
    momentum: tuple[float, ...]
    # the program's names of several optimizers, as arguments of a Composite; empty for one
    composite: str = ""

    @property
    def optimizers(self) -> list[str]:
        """The class name of each optimizer, once."""
        return [*dict.fromkeys(self.optimizer.split(" and "))]


@dataclass
class Observations:
    """Everything that was observed."""

    # why there is no advice; empty at the end of an observation that shows some
    refusal: str = "the observation has not ended"
    # the limit that ended the observation, "steps" or "budget"; empty if the program ended before
    ended_by: str = ""
    found: Found | None = None  # the training; None if none was found
    way: Way | None = None  # how the noise was measured
    steps: int = 0  # optimizer steps that were seen
    seconds: float = 0.0  # their time
    step_seconds: float = 0.0  # median time of a step that was not measured
    measurements: list[Measurement] = field(default_factory=list)  # of the measured steps
    time: MachineTime | None = None  # where the seconds go; None if it is unknown
    # the function in which the samples of a backward influence each other; empty if none is known
    coupling: str = ""
    batch_norm: str = ""  # what it sees in the compared micro-batches; empty without BatchNorm
    unseen: list[str] = field(default_factory=list)  # what could not be seen, in sentences
