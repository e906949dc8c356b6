"""Sources of micro-batch gradients: one process, DDP, FSDP2, sharded; checks of `.grad`."""

from bigbatch.gradients.auto import find_source, parameters_of
from bigbatch.gradients.gradient_hooks import changed_later
from bigbatch.gradients.groups.group_tap import GroupGradients, GroupTap
from bigbatch.gradients.protocols import MicroBatchGradients, Subscriber
from bigbatch.gradients.rank_reducer import is_of_network, note_waiting
from bigbatch.gradients.single_process import SingleProcessSource
from bigbatch.gradients.source import MADE_LATE, GradientSource, are_freed

__all__ = [
    "MADE_LATE",
    "GradientSource",
    "GroupGradients",
    "GroupTap",
    "MicroBatchGradients",
    "SingleProcessSource",
    "Subscriber",
    "are_freed",
    "changed_later",
    "find_source",
    "is_of_network",
    "note_waiting",
    "parameters_of",
]
