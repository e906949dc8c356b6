"""Gradients in: the one door that everything which reads a gradient stands behind."""

from bigbatch.gradients.auto import find_source, parameters_of
from bigbatch.gradients.distributed import is_of_network, note_waiting
from bigbatch.gradients.gradient_hooks import changed_later, only_watched
from bigbatch.gradients.protocols import GradientSource, Subscriber
from bigbatch.gradients.single_process import MADE_LATE, SingleProcessSource, are_freed

__all__ = [
    "MADE_LATE",
    "GradientSource",
    "SingleProcessSource",
    "Subscriber",
    "are_freed",
    "changed_later",
    "find_source",
    "is_of_network",
    "note_waiting",
    "only_watched",
    "parameters_of",
]
