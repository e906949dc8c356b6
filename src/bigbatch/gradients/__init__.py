"""Sources of micro-batch gradients: one process, DDP, FSDP2, sharded; checks of `.grad`."""

from bigbatch.gradients.auto import find_source as find_source
from bigbatch.gradients.auto import parameters_of as parameters_of
from bigbatch.gradients.gradient_hooks import changed_later as changed_later
from bigbatch.gradients.groups.group_tap import GroupGradients as GroupGradients
from bigbatch.gradients.groups.group_tap import GroupTap as GroupTap
from bigbatch.gradients.protocols import MicroBatchGradients as MicroBatchGradients
from bigbatch.gradients.protocols import Subscriber as Subscriber
from bigbatch.gradients.rank_reducer import is_of_network as is_of_network
from bigbatch.gradients.rank_reducer import note_waiting as note_waiting
from bigbatch.gradients.single_process import SingleProcessSource as SingleProcessSource
from bigbatch.gradients.source import MADE_LATE as MADE_LATE
from bigbatch.gradients.source import GradientSource as GradientSource
from bigbatch.gradients.source import are_freed as are_freed
