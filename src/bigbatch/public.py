"""The names that users of `import bigbatch` have."""

from bigbatch.act.batches import Batches
from bigbatch.act.ledger import SampleLedger
from bigbatch.act.memory import largest_micro_batch
from bigbatch.checkpoint import RankStates
from bigbatch.decide.controller import Controller
from bigbatch.decide.plan import BatchPlan
from bigbatch.decide.policy import (
    Advise,
    Decision,
    Fixed,
    NoiseScale,
    NormTest,
    Policy,
    Progress,
    SimiGrad,
)
from bigbatch.decide.schedule import Schedule
from bigbatch.errors import BigbatchError
from bigbatch.loop import AdaptiveBatch
from bigbatch.measure.meter import GradientMeter
from bigbatch.measure.noise import GradientNoise
from bigbatch.measure.smoothing import NoiseAverage
from bigbatch.record import StepRecord
from bigbatch.step import Step

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
