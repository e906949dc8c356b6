"""The names that users of `import bigbatch` have."""

from bigbatch.data.batches import Batches as Batches
from bigbatch.data.sampler import ElasticDistributedSampler as ElasticDistributedSampler
from bigbatch.errors import BigbatchError as BigbatchError
from bigbatch.policies.batch_schedule import Schedule as Schedule
from bigbatch.policies.branch_test_policy import BranchTest as BranchTest
from bigbatch.policies.controller import Controller as Controller
from bigbatch.policies.plan import BatchPlan as BatchPlan
from bigbatch.policies.policy import Decision as Decision
from bigbatch.policies.policy import Fixed as Fixed
from bigbatch.policies.policy import NoiseScale as NoiseScale
from bigbatch.policies.policy import NormTest as NormTest
from bigbatch.policies.policy import Policy as Policy
from bigbatch.policies.policy import Shadow as Shadow
from bigbatch.policies.policy import SimiGrad as SimiGrad
from bigbatch.policies.policy import TrainingState as TrainingState
from bigbatch.statistics.averages import NoiseAverage as NoiseAverage
from bigbatch.statistics.meter import GradientMeter as GradientMeter
from bigbatch.statistics.noise_scale import GradientStatistics as GradientStatistics
from bigbatch.training.adaptive_batch import AdaptiveBatch as AdaptiveBatch
from bigbatch.training.branch_result import BranchTestResult as BranchTestResult
from bigbatch.training.distributed_state import DistributedState as DistributedState
from bigbatch.training.find_micro_batch import largest_micro_batch as largest_micro_batch
from bigbatch.training.group_check import check_groups as check_groups
from bigbatch.training.step import Step as Step
from bigbatch.training.step_record import StepRecord as StepRecord
