"""Gradients in: the one door that everything which reads a gradient stands behind."""

from bigbatch.measure.source.door import GradientSource, Subscriber
from bigbatch.measure.source.engine import is_of_network, note_waiting
from bigbatch.measure.source.find import find_source, parameters_of
from bigbatch.measure.source.hooks import changed_later, only_watched
from bigbatch.measure.source.plain import MADE_LATE, PlainSource, are_freed

__all__ = [
    "MADE_LATE",
    "GradientSource",
    "PlainSource",
    "Subscriber",
    "are_freed",
    "changed_later",
    "find_source",
    "is_of_network",
    "note_waiting",
    "only_watched",
    "parameters_of",
]
