"""Where the graph of a backward uses parameters on samples, and how each use leads to one.

Functions of parameters alone (a transpose, a cast, a slice, a lookup of positions) are not uses:
they lie on the route from a use to its parameter.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

import torch
from torch import Tensor

from bigbatch.gradients.groups.backward_graph import (
    Node,
    ParametersOf,
    constants_of,
    leaf_of,
    node_names,
    operands_of,
    shape_of,
)
from bigbatch.gradients.groups.rules import Place, Rule, refusal_of, refusal_of_path

_ROWS = node_names("Addmm Embedding Mm")  # whose output is flattened to a matrix
_ELEMENTWISE = node_names("Add Addcmul Div Expand Mul Sub Where") | {"PowBackward1"}
_FACTORS = {"AddmmBackward0": 1, "BmmBackward0": 0, "MmBackward0": 0, "MvBackward0": 0}
"""Products of matrices, and the number of the operand on the left."""

_VIEWS = node_names("View UnsafeView ReshapeAlias")
_TRANSPOSES = node_names("T")
_CASTS = node_names("ToCopy Alias ViewAs")
_VIEWS_OF_PARAMETERS = (
    node_names("Cat Clone Permute Select Slice Split SplitWithSizes Squeeze Stack Transpose Unbind")
    | node_names("Unsqueeze")
    | {"SqueezeBackward1"}
    | (_VIEWS | _TRANSPOSES | _CASTS)
)
"""Functions whose output has no samples if their operands have none, whatever its shape."""

FLATTENED = Place(None, is_certain=False), Place(None, is_minor=True, is_certain=False)
"""Where the samples may be in dimension 0 with others, the likeliest first."""


@dataclass(frozen=True)
class Route:
    """How an operand was computed from parameters."""

    parameters: Mapping[int, Tensor]  # by the numbers of their leaves
    nodes: Sequence[int]  # the numbers of the nodes from the operand on, each before its operands
    matrix: Tensor | None  # the parameter, if the operand is one alone, cast or transposed
    is_transposed: bool  # whether `matrix` is
    refusal: str  # why its gradient cannot be computed; empty if it can


@dataclass
class Use:
    """A function of samples and of parameters."""

    number: int  # of its node in the graph
    name: str
    routes: dict[int, Route]  # to the parameters, by the number of the operand that is from them
    places: list[Place]  # where the samples may be in the output, the likeliest first
    refusal: str  # why the groups' gradients cannot be computed here; empty if they can
    # set where it is covered: where the samples are, and what computes the groups' gradients
    place: Place = field(init=False)
    rule: Rule = field(init=False)

    @property
    def parameters(self) -> Iterator[Tensor]:
        """The parameters, which may repeat."""
        return (p for route in self.routes.values() for p in route.parameters.values())


class ParameterUses:
    """All uses of the watched parameters in a graph."""

    def __init__(
        self,
        nodes: Sequence[Node],
        parameters_of: ParametersOf,
        samples: int,  # B
        is_of_model: Callable[[Tensor], bool],  # whether a constant is a tensor of the model
        # the numbers of functions of parameters alone, although a dimension has the size B
        without_samples: Collection[int] = (),
    ) -> None:
        self.nodes, self.samples = nodes, samples
        self.numbers = {node: number for number, node in enumerate(nodes)}
        leaves = {node: leaf for node in nodes if (leaf := leaf_of(node)) is not None}
        self._parameters = dict(zip(leaves, parameters_of([*leaves.values()]), strict=True))
        self._is_of_model = is_of_model
        self._without_samples = without_samples
        self._consumers: dict[Node, list[Node]] = defaultdict(list)
        for node in nodes:
            for following in operands_of(node):
                self._consumers[following].append(node)
        graph = TopologicalSorter({node: operands_of(node) for node in nodes})
        self.operands_first = list(graph.static_order())
        self._positions = {node: position for position, node in enumerate(self.operands_first)}
        # the functions whose outputs depend on samples, and not on parameters alone
        self.with_samples = set[Node]()
        for node in self.operands_first:
            if self._has_samples(node):
                self.with_samples.add(node)
        self.uses = list(self._find())

    def is_ambiguous(self, use: Use) -> bool:
        """Whether only its shape makes the output of a use depend on samples."""
        node = self.nodes[use.number]
        if not self.with_samples.isdisjoint(operands_of(node)):
            return False
        has_constants = any(following is None for following, _ in node.next_functions)
        return not (has_constants and not constants_of(node)) and not self._has_data(node)

    def consumer_of(self, number: int) -> str:
        """The name of a function that takes the output of a node; its own above all others."""
        node = self.nodes[number]
        return str(next(iter(self._consumers[node]), node).name())

    def _has_data(self, node: Node) -> bool:
        """Whether a constant of a function may be samples: not the model's, nor positions."""
        return any(not self._is_of_model(c) and not _are_positions(c) for c in constants_of(node))

    def _has_samples(self, node: Node) -> bool:
        operands = operands_of(node)
        if node in self._parameters:
            return self._parameters[node] is None
        if not operands or not self.with_samples.isdisjoint(operands):
            return True
        if node.name() in _VIEWS_OF_PARAMETERS or self.numbers[node] in self._without_samples:
            return False
        if self._places_of_samples(node, range(len(node.next_functions))):
            return True
        # samples in another number: of a shape that the parameters do not have
        shapes = [shape_of(*edge) for edge in node.next_functions if edge[0] is not None]
        return shape_of(node) not in shapes and self._has_data(node)

    def _find(self) -> Iterator[Use]:
        for number, node in enumerate(self.nodes):
            if node in self._parameters or node not in self.with_samples:
                continue
            routes = {
                operand: self._route(edge[0])
                for operand, edge in enumerate(node.next_functions)
                if edge[0] is not None and edge[0] not in self.with_samples
            }
            routes = {operand: route for operand, route in routes.items() if route.parameters}
            if routes:
                places = self._places_of_samples(node, routes)
                refusals = (refusal_of(node), *(route.refusal for route in routes.values()))
                refusal = next(filter(None, refusals), "")
                if not refusal and not places:
                    refusal = (
                        f"used in {node.name()}, whose output has no dimension of the batch's size"
                    )
                yield Use(number, node.name(), routes, places, refusal)

    def _route(self, start: Node) -> Route:
        waiting, below = [start], set[Node]()
        while waiting:
            node = waiting.pop()
            if node not in below:
                below.add(node)
                waiting += operands_of(node)
        order = sorted(below, key=self._positions.__getitem__, reverse=True)
        leaves = ((self.numbers[n], self._parameters.get(n)) for n in order)
        parameters = {number: leaf for number, leaf in leaves if leaf is not None}
        inner = [node for node in order if self._parameters.get(node) is None]
        turns = sum(n.name() in _TRANSPOSES and len(shape_of(n)) == 2 for n in inner)
        is_matrix = all(node.name() in _TRANSPOSES | _CASTS for node in inner)
        return Route(
            parameters,
            [self.numbers[node] for node in order],
            next(iter(parameters.values()), None) if is_matrix else None,
            is_transposed=turns % 2 == 1,
            refusal=next((refusal for n in inner if (refusal := refusal_of_path(n))), ""),
        )

    def _places_of_samples(self, node: Node, of_parameters: Iterable[int]) -> list[Place]:
        """Where the samples may be in the output of a function, the likeliest first."""
        output, places = shape_of(node), self._places(node)
        for operand in of_parameters:
            edge = node.next_functions[operand]
            if edge[0] is None:
                continue
            if node.name() in _ELEMENTWISE:
                places = [p for p in places if not _has_place(shape_of(*edge), p, output)]
            elif node.name() in _FACTORS and operand >= _FACTORS[node.name()]:
                is_left = operand == _FACTORS[node.name()]
                # the last dimension is that of the factor on the right
                places = [p for p in places if (p.dim == len(output) - 1 > 0) == is_left]
        return places

    def _places(self, node: Node) -> list[Place]:
        shape, name = shape_of(node), node.name()
        exact = self.exact_places(shape)
        if name == "BmmBackward0" and shape[0] == 1 < self.samples:
            shape = shape[1:]  # torch.einsum
        elif name not in _ROWS or len(shape) != 2:
            return self.places_by_shape(shape)
        columns = [Place(place.dim, is_certain=False) for place in exact if place.dim]
        if shape[0] == self.samples:
            return [Place(None), *columns]
        places = []
        for consumer in self._consumers[node]:
            rows = _leading(shape_of(consumer), shape[0]) if consumer.name() in _VIEWS else ()
            if len(rows) > 1:
                places += [Place(None)] * (rows[0] == self.samples)
                places += [Place(None, is_minor=True)] * (rows[-1] == self.samples)
        if not places and shape[0] % self.samples == 0 and shape[0]:
            places = list(FLATTENED)
        return places + columns

    def places_by_shape(self, shape: torch.Size) -> list[Place]:
        """Where the samples may be in a tensor of which only the shape is known."""
        exact = self.exact_places(shape)
        has_rows = bool(shape) and shape[0] != self.samples and shape[0] % self.samples == 0
        if not has_rows:
            return exact
        if len(shape) > 2 and exact:  # or rows of samples x others, and the size B by chance
            return [*exact, *FLATTENED]
        # the columns of a matrix may have the size B by chance
        return [*FLATTENED, *(Place(place.dim, is_certain=False) for place in exact)]

    def exact_places(self, shape: torch.Size) -> list[Place]:
        """The dimensions of size B."""
        return [Place(dim) for dim, size in enumerate(shape) if size == self.samples]


def _has_place(shape: torch.Size, place: Place, output: torch.Size) -> bool:
    """Whether an operand of this shape is not broadcast along a place of the output."""
    dim = (place.dim or 0) - len(output) + len(shape)
    return dim >= 0 and shape[dim] != 1


def _are_positions(constant: Tensor) -> bool:
    """Whether a constant has consecutive numbers, as positions have; or is a single number."""
    flat = constant.flatten()
    is_range = flat == flat[:1] + torch.arange(len(flat), device="cpu").to(flat)
    return constant.dim() == 0 or (not constant.is_floating_point() and bool(is_range.all()))


def _leading(shape: torch.Size, rows: int) -> torch.Size:
    """The first dimensions, which together have so many rows, without those of size 1 after."""
    count = next((n for n in range(len(shape)) if shape[:n].numel() == rows), 0)
    return shape[:count]
