"""What is known of a step before its update."""

from dataclasses import dataclass

from bigbatch.statistics.noise_scale import GradientStatistics


@dataclass(frozen=True)
class StepStatistics:
    """Everything that a decision rests on, read from the step's gradients; equal on all ranks.

    Args:
        samples: samples of the step, over all ranks.
        micro_batches: backwards of the step, over all ranks.
        statistics: None if it could not be measured.
        loss: mean loss over the batch.
        finite: whether every gradient is finite.
        vanishes: whether every gradient is zero.
        weight_per_sample: mean weight of a sample.
        elapsed_seconds: time spent training so far, mean over the ranks.
        previous_seconds: time of the step before, mean over the ranks; 0 if unknown.
        checksums: a checksum of each rank's state, which must be equal.
    """

    samples: int
    micro_batches: int
    statistics: GradientStatistics | None
    loss: float
    finite: bool
    vanishes: bool
    weight_per_sample: float
    elapsed_seconds: float
    previous_seconds: float
    checksums: list[float]
