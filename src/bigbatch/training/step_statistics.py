"""Everything that a decision rests on, read from the gradients of one step."""

import math
from dataclasses import dataclass

from bigbatch.statistics.noise_scale import GradientStatistics


@dataclass
class StepStatistics:
    """Everything that a decision rests on, read from the step's gradients; equal on all ranks."""

    samples: int  # samples of the step, over all ranks
    micro_batches: int  # backwards of the step, over all ranks
    statistics: GradientStatistics | None  # None if it could not be measured
    elapsed_seconds: float  # time spent training so far, mean over the ranks
    previous_seconds: float  # time of the step before, mean over the ranks; 0 if unknown
    checksums: list[float]  # a checksum of each rank's state, which must be equal
    # what the host may read later
    loss: float = math.nan  # mean loss over the batch
    finite: bool = True  # whether every gradient is finite
    vanishes: bool = False  # whether every gradient is zero
    weight_per_sample: float | None = None  # mean weight of a sample; None if it is unknown
