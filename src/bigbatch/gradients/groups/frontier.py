"""Where a backward of some of the samples starts, and where it ends."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from bigbatch.gradients.groups.backward_graph import Edge, Node, leaf_of, operands_of, shape_of
from bigbatch.gradients.groups.parameter_uses import ParameterUses, Use
from bigbatch.gradients.groups.rules import Place


class FrontierOutput(NamedTuple):
    """An output with samples from which a backward of some samples can start.

    Args:
        number: the number of its node.
        output: the number of the output.
        places: where the samples may be in it, the likeliest first.
    """

    number: int
    output: int
    places: list[Place]


class Frontier:
    """Where backwards of the samples of some uses start and end.

    Args:
        found: the uses.
        roots: where the backward of the loss starts.
    """

    def __init__(self, found: ParameterUses, roots: Sequence[Edge]) -> None:
        self._found = found
        # below the node of DDP that would begin to reduce
        sinks = [node for node in found.nodes if node.name() == "_DDPSinkBackward"]
        below = [edge for sink in sinks for edge in sink.next_functions if edge[0] is not None]
        self._roots = below or list(roots)
        self._used = {found.nodes[use.number] for use in found.uses}
        self._outputs, self._above = self._descend(set())

    @cached_property
    def outputs(self) -> list[FrontierOutput]:
        """The outputs with samples that are nearest to the loss.

        Each has a dimension of size B, except above a use that lies above all those.
        """
        if not self._used & self._above:
            return self._outputs
        leads_to_use: set[Node] = set()
        for node in self._found.operands_first:
            if node in self._above and (
                node in self._used or not leads_to_use.isdisjoint(operands_of(node))
            ):
                leads_to_use.add(node)
        return self._descend(leads_to_use)[0]

    @cached_property
    def unlocated(self) -> frozenset[int]:
        """The uses below which no output shows where the samples are, before the data."""
        found, shows_nothing = self._found, set[Node]()
        for node in found.operands_first:
            if node in self._above and found.has_samples(node):
                operands = {n for n in operands_of(node) if found.has_samples(n)}
                hidden = {
                    n
                    for n in operands
                    if leaf_of(n) is not None and not found.exact_places(shape_of(n))
                }
                if operands <= hidden or operands & shows_nothing:
                    shows_nothing.add(node)
        uses = [use.number for use in found.uses]
        return frozenset(number for number in uses if found.nodes[number] in shows_nothing)

    @cached_property
    def last_uses(self) -> list[Use]:
        """The uses below which a backward comes to no other use."""
        leads_to_use: set[Node] = set()  # by an operand
        for node in self._found.operands_first:
            if any(n in self._used or n in leads_to_use for n in operands_of(node)):
                leads_to_use.add(node)
        uses, nodes = self._found.uses, self._found.nodes
        return [use for use in uses if nodes[use.number] not in leads_to_use]

    def _descend(self, flattened: set[Node]) -> tuple[list[FrontierOutput], set[Node]]:
        """The first outputs that show where the samples are, and the nodes above them.

        Args:
            flattened: nodes that also do with samples flattened into rows.
        """
        found, waiting, visited = self._found, list(self._roots), set[Edge]()
        reached, above = list[FrontierOutput](), set[Node]()
        while waiting:
            edge = node, output = waiting.pop()
            if edge in visited or leaf_of(node) is not None:
                continue
            visited.add(edge)
            shape = shape_of(node, output)
            places = found.places_by_shape(shape)
            if node not in flattened:
                places = [place for place in places if place.is_certain and found.has_samples(node)]
            if places:
                reached.append(FrontierOutput(found.numbers[node], output, places))
            else:
                above.add(node)
                waiting += [edge for edge in node.next_functions if edge[0] is not None]
        return reached, above
