"""Where the graph of a backward uses parameters on samples, and how each use leads to one.

Functions of parameters alone (a transpose, a cast, a slice, a lookup of positions) are not uses:
they lie on the route from a use to its parameter.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from bigbatch.gradients.groups.backward_graph import Edge, Node, constants_of, leaf_of, shape_of
from bigbatch.gradients.groups.rules import Place, refusal_of

_ROWS = {
    "AddmmBackward0",
    "EmbeddingBackward0",
    "MmBackward0",
}  # whose output is flattened to a matrix
_ELEMENTWISE = {
    "AddBackward0",
    "AddcmulBackward0",
    "DivBackward0",
    "ExpandBackward0",
    "MulBackward0",
    "PowBackward1",
    "SubBackward0",
    "WhereBackward0",
}
_FACTORS = {"AddmmBackward0": 1, "BmmBackward0": 0, "MmBackward0": 0, "MvBackward0": 0}
"""Products of matrices, and the number of the operand on the left."""

_VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}
_TRANSPOSES = {"TBackward0"}
_CASTS = {"ToCopyBackward0", "AliasBackward0", "ViewAsBackward0"}
_VIEWS_OF_PARAMETERS = (
    _VIEWS
    | _TRANSPOSES
    | _CASTS
    | {
        "CatBackward0",
        "CloneBackward0",
        "PermuteBackward0",
        "SelectBackward0",
        "SliceBackward0",
        "SplitBackward0",
        "SplitWithSizesBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "StackBackward0",
        "TransposeBackward0",
        "UnbindBackward0",
        "UnsqueezeBackward0",
    }
)
"""Functions whose output has no samples if their operands have none, whatever its shape."""

_FLATTENED = (
    Place(None, "sample-major", is_certain=False),
    Place(None, "sample-minor", is_certain=False),
)
"""Where the samples may be in dimension 0 with others, the likeliest first."""


@dataclass(frozen=True)
class Route:
    """How an operand was computed from a parameter.

    Args:
        parameter: the parameter.
        path: the functions from the operand down to the parameter, as (number of the node in the
            graph, of its output, of the operand that leads on).
        names: the names of these functions.
    """

    parameter: Tensor
    path: tuple[tuple[int, int, int], ...]
    names: tuple[str, ...]

    @cached_property
    def is_matrix(self) -> bool:
        """Whether the operand is the parameter, cast or transposed."""
        return all(name in _TRANSPOSES | _CASTS for name in self.names)

    @cached_property
    def is_transposed(self) -> bool:
        """Whether it is transposed, if `is_matrix`."""
        return sum(name in _TRANSPOSES for name in self.names) % 2 == 1


@dataclass
class Use:
    """A function of samples and of parameters.

    Args:
        number: the number of its node in the graph.
        name: the name of the node.
        routes: for each operand that comes from parameters, the routes to them.
        places: where the samples may be in the output, the likeliest first.
    """

    number: int
    name: str
    routes: dict[int, list[Route]] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)
    uncovered_option: str = ""

    @property
    def refusal(self) -> str:
        """Why the groups' gradients cannot be computed here; empty if they can."""
        if self.uncovered_option:
            return self.uncovered_option
        if not self.places:
            return f"used in {self.name}, whose output has no dimension of the batch's size"
        return ""

    @property
    def parameters(self) -> Iterator[Tensor]:
        """The parameters, which may repeat."""
        return (route.parameter for routes in self.routes.values() for route in routes)


class ParameterUses:
    """All uses of the watched parameters in a graph.

    Args:
        nodes: the nodes of the graph.
        roots: the edges that its backward starts from.
        parameter_of: leaf -> the watched parameter that it is; None for another leaf.
        samples: B.
        is_of_model: whether a constant is in the memory of a tensor of the model.
        without_samples: numbers of nodes known to be functions of parameters alone, although a
            dimension has the size B.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        roots: Sequence[Edge],
        parameter_of: Callable[[Tensor], Tensor | None],
        samples: int,
        is_of_model: Callable[[Tensor], bool],
        without_samples: frozenset[int] = frozenset(),
    ) -> None:
        self.nodes, self._roots, self._samples = nodes, roots, samples
        self._numbers = {node: number for number, node in enumerate(nodes)}
        self._parameter_of, self._is_of_model = parameter_of, is_of_model
        self._without_samples = without_samples
        self._consumers: dict[Node, list[Node]] = defaultdict(list)
        for node in nodes:
            for following, _ in node.next_functions:
                if following is not None:
                    self._consumers[following].append(node)
        self._has_samples: dict[Node, bool] = {}
        self.uses = list(self._find())

    @cached_property
    def refusals(self) -> dict[Tensor, str]:
        """The parameters whose groups cannot be seen, and why."""
        return {p: use.refusal for use in self.uses if use.refusal for p in use.parameters}

    @cached_property
    def frontier(self) -> list[tuple[int, int, Place]]:
        """The outputs with samples that are nearest to the loss: (node, its output, place).

        They are below the node of DDP that would begin to reduce.
        """
        sinks = [node for node in self.nodes if node.name() == "_DDPSinkBackward"]
        below = [edge for sink in sinks for edge in sink.next_functions if edge[0] is not None]
        waiting, visited = below or list(self._roots), set[Edge]()
        reached: list[tuple[int, int, Place]] = []
        while waiting:
            edge = node, number = waiting.pop()
            if edge in visited or leaf_of(node) is not None:
                continue
            visited.add(edge)
            places = self._exact_places(shape_of(node, number))
            if places and self.has_samples(node):
                reached.append((self._numbers[node], number, places[0]))
            else:
                waiting += [edge for edge in node.next_functions if edge[0] is not None]
        return reached

    @cached_property
    def last_uses(self) -> list[Use]:
        """The uses below which a backward comes to no other use."""
        used = {self.nodes[use.number] for use in self.uses}
        above: dict[Node, bool] = {}  # whether a use is below
        waiting = list(used)
        while waiting:
            node = waiting[-1]
            operands = [following for following, _ in node.next_functions if following is not None]
            unknown = [n for n in operands if n not in above]
            if unknown:
                waiting += unknown
                continue
            above[waiting.pop()] = any(n in used or above[n] for n in operands)
        return [use for use in self.uses if not above[self.nodes[use.number]]]

    def has_samples(self, node: Node) -> bool:
        """Whether the output of a function depends on samples, and not on parameters alone."""
        waiting = [node]
        while waiting:
            node = waiting[-1]
            operands = [following for following, _ in node.next_functions if following is not None]
            unknown = [n for n in operands if n not in self._has_samples]
            if unknown:
                waiting += unknown
                continue
            self._has_samples[waiting.pop()] = self._decide_samples(node, operands)
        return self._has_samples[node]

    def is_ambiguous(self, use: Use) -> bool:
        """Whether only its shape makes the output of a use depend on samples.

        A constant may be samples, unless it is the model's or has the numbers of positions.
        """
        node = self.nodes[use.number]
        operands = [following for following, _ in node.next_functions]
        if any(self.has_samples(operand) for operand in operands if operand is not None):
            return False
        constants = constants_of(node)
        if None in operands and not constants:
            return False
        return all(self._is_of_model(c) or _are_positions(c) for c in constants)

    def _decide_samples(self, node: Node, operands: list[Node]) -> bool:
        leaf = leaf_of(node)
        if leaf is not None:
            return self._parameter_of(leaf) is None
        if not operands or any(self._has_samples[operand] for operand in operands):
            return True
        if node.name() in _VIEWS_OF_PARAMETERS or self._numbers[node] in self._without_samples:
            return False
        return bool(self._places_of_samples(node, range(len(node.next_functions))))

    def _find(self) -> Iterator[Use]:
        for number, node in enumerate(self.nodes):
            if leaf_of(node) is not None or not self.has_samples(node):
                continue
            use = Use(number, node.name(), uncovered_option=refusal_of(node))
            for operand, edge in enumerate(node.next_functions):
                if edge[0] is not None and not self.has_samples(edge[0]):
                    use.routes[operand] = list(self._routes(edge, (), ()))
            if use.routes:
                use.places = self._places_of_samples(node, use.routes)
                yield use

    def _routes(
        self, edge: Edge, path: tuple[tuple[int, int, int], ...], names: tuple[str, ...]
    ) -> Iterator[Route]:
        node, output = edge
        leaf = leaf_of(node)
        if leaf is not None:
            parameter = self._parameter_of(leaf)
            if parameter is not None:
                yield Route(parameter, path, names)
            return
        for operand, following in enumerate(node.next_functions):
            if following[0] is not None:
                step = (self._numbers[node], output, operand)
                yield from self._routes(following, (*path, step), (*names, node.name()))

    def _places_of_samples(self, node: Node, of_parameters: Iterable[int]) -> list[Place]:
        """Where the samples may be in the output of a function, the likeliest first.

        Args:
            node: the function.
            of_parameters: the operands that come from parameters, which have no samples.
        """
        output, places = shape_of(node), self._places(node)
        for operand in of_parameters:
            edge = node.next_functions[operand]
            if edge[0] is None:
                continue
            if node.name() in _ELEMENTWISE:
                places = [p for p in places if not _has_place(shape_of(*edge), p, output)]
            elif node.name() in _FACTORS and operand >= _FACTORS[node.name()]:
                is_left = operand == _FACTORS[node.name()]
                places = [p for p in places if _is_column(p, output) != (not is_left)]
        return places

    def _places(self, node: Node) -> list[Place]:
        shape, name = shape_of(node), node.name()
        exact = self._exact_places(shape)
        if name == "BmmBackward0" and shape[0] == 1 < self._samples:
            shape = shape[1:]  # torch.einsum
        elif name not in _ROWS or len(shape) != 2:
            if exact or not shape or shape[0] % self._samples or name == "ConvolutionBackward0":
                return exact
            return list(_FLATTENED)
        columns = [Place(place.dim, is_certain=False) for place in exact if place.dim]
        if shape[0] == self._samples:
            return [Place(None), *columns]
        places = []
        for consumer in self._consumers[node]:
            rows = _leading(shape_of(consumer), shape[0]) if consumer.name() in _VIEWS else ()
            if len(rows) > 1:
                places += [Place(None)] * (rows[0] == self._samples)
                places += [Place(None, "sample-minor")] * (rows[-1] == self._samples)
        if not places and shape[0] % self._samples == 0 and shape[0]:
            places = list(_FLATTENED)
        return places + columns

    def _exact_places(self, shape: torch.Size) -> list[Place]:
        return [Place(dim) for dim, size in enumerate(shape) if size == self._samples]


def _has_place(shape: torch.Size, place: Place, output: torch.Size) -> bool:
    """Whether an operand of this shape is not broadcast along a place of the output."""
    dim = (place.dim or 0) - len(output) + len(shape)
    return dim >= 0 and shape[dim] != 1


def _is_column(place: Place, output: torch.Size) -> bool:
    """Whether a place of a product is the last dimension, that of the factor on the right."""
    return place.dim == len(output) - 1 > 0


def _are_positions(constant: Tensor) -> bool:
    """Whether a constant has consecutive numbers, as positions have; or is a single number."""
    flat = constant.flatten()
    is_range = flat == flat[:1] + torch.arange(len(flat), device="cpu").to(flat)
    return constant.dim() == 0 or (not constant.is_floating_point() and bool(is_range.all()))


def _leading(shape: torch.Size, rows: int) -> torch.Size:
    """The first dimensions, which together have so many rows, without those of size 1 after."""
    count = next((n for n in range(len(shape)) if shape[:n].numel() == rows), 0)
    return shape[:count]
