"""The names that users of `import bigbatch` have."""

from bigbatch.data.batches import Batches
from bigbatch.data.sampler import SampleLedger
from bigbatch.errors import BigbatchError
from bigbatch.policies.batch_schedule import Schedule
from bigbatch.policies.controller import Controller
from bigbatch.policies.plan import BatchPlan
from bigbatch.policies.policy import (
    Advise,
    Decision,
    Fixed,
    NoiseScale,
    NormTest,
    Policy,
    Progress,
    SimiGrad,
)
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.noise_scale import GradientNoise
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.distributed_state import RankStates
from bigbatch.training.find_micro_batch import largest_micro_batch
from bigbatch.training.step import Step
from bigbatch.training.step_record import StepRecord

__all__ = [
    "AdaptiveBatch",
    "Advise",
    "BatchPlan",
    "Batches",
    "BigbatchError",
    "Controller",
    "Decision",
    "Fixed",
    "GradientMeter",
    "GradientNoise",
    "NoiseAverage",
    "NoiseScale",
    "NormTest",
    "Policy",
    "Progress",
    "RankStates",
    "SampleLedger",
    "Schedule",
    "SimiGrad",
    "Step",
    "StepRecord",
    "largest_micro_batch",
]
