"""Gradients in: the one door that everything which reads a gradient stands behind."""

from bigbatch.measure.source.door import GradientSource, Subscriber
from bigbatch.measure.source.engine import is_of_network, note_waiting
from bigbatch.measure.source.find import find_source
from bigbatch.measure.source.hooks import changed_later, only_watched
from bigbatch.measure.source.plain import PlainSource

__all__ = [
    "GradientSource",
    "PlainSource",
    "Subscriber",
    "changed_later",
    "find_source",
    "is_of_network",
    "note_waiting",
    "only_watched",
]
