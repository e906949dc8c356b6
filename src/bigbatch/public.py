"""The names that users of `import bigbatch` have."""

from bigbatch.data.batches import Batches
from bigbatch.data.sampler import ElasticDistributedSampler
from bigbatch.errors import BigbatchError
from bigbatch.policies.batch_schedule import Schedule
from bigbatch.policies.controller import Controller
from bigbatch.policies.plan import BatchPlan
from bigbatch.policies.policy import (
    Decision,
    Fixed,
    NoiseScale,
    NormTest,
    Policy,
    Shadow,
    SimiGrad,
    TrainingState,
)
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.distributed_state import DistributedState
from bigbatch.training.find_micro_batch import largest_micro_batch
from bigbatch.training.step import Step
from bigbatch.training.step_record import StepRecord

__all__ = [
    "AdaptiveBatch",
    "BatchPlan",
    "Batches",
    "BigbatchError",
    "Controller",
    "Decision",
    "DistributedState",
    "ElasticDistributedSampler",
    "Fixed",
    "GradientMeter",
    "GradientStatistics",
    "NoiseAverage",
    "NoiseScale",
    "NormTest",
    "Policy",
    "Schedule",
    "Shadow",
    "SimiGrad",
    "Step",
    "StepRecord",
    "TrainingState",
    "largest_micro_batch",
]
