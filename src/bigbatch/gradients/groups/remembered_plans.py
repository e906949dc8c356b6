"""The plans of backwards by the structure of their graphs, and when one is checked again."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from bigbatch.gradients.groups.backward_graph import Edge, Node, shape_of, trace
from bigbatch.gradients.groups.backward_plan import BackwardPlan, plan_backward
from bigbatch.gradients.groups.grouping import Grouping

_MAX_STRUCTURES = 32
_CHECKED = {4**n for n in range(32)}  # numbers of the backwards of a structure

Shapes = tuple[tuple[object, ...], ...]
"""Shapes of the outputs of uses, as far as they say where samples are."""


class RememberedPlans:
    """Plans backwards, once for all graphs of one structure.

    A plan is checked again at the fourth, 16th, 64th backward and so on, since a check may have
    missed what random numbers or the data of one batch hid; and at every backward while its check
    was not conclusive.

    Args:
        parameter_of: leaf -> the watched parameter that it is; None for another leaf.
        model: the model, whose buffers have no samples; None if it is unknown.
        checks_samples: whether extra backwards may check where the samples are.
    """

    def __init__(
        self,
        parameter_of: Callable[[Tensor], Tensor | None],
        model: nn.Module | None,
        *,
        checks_samples: bool,
    ) -> None:
        self._parameter_of, self._model = parameter_of, model
        self._checks_samples = checks_samples
        self._structures: dict[object, _Structure] = {}

    def plan(self, roots: Sequence[Edge], grouping: Grouping) -> tuple[list[Node], BackwardPlan]:
        """The nodes below the roots, and what is known of their backward."""
        nodes, key = trace(roots, self._parameter_of)
        structure = self._structures.get(key)
        if structure is None:
            while len(self._structures) >= _MAX_STRUCTURES:
                self._structures.pop(next(iter(self._structures)))
            structure = self._structures[key] = _Structure()
        shapes = structure.shapes_of(nodes, grouping.samples)
        plan = structure.plans.get(shapes)
        structure.backwards += 1
        is_due = self._checks_samples and structure.backwards in _CHECKED
        if plan is None or is_due or not plan.is_conclusive:
            plan = plan_backward(
                nodes,
                roots,
                grouping,
                self._parameter_of,
                self._model,
                check=structure.checks if self._checks_samples else None,
            )
            structure.checks += 1
            structure.add(plan, nodes, grouping.samples)
        return nodes, plan


class _Structure:
    """What is known of the graphs of one structure."""

    def __init__(self) -> None:
        self.plans: dict[Shapes, BackwardPlan] = {}
        self.backwards = self.checks = 0
        self._numbers: tuple[int, ...] = ()  # of the nodes of all uses

    def add(self, plan: BackwardPlan, nodes: Sequence[Node], samples: int) -> None:
        """Remembers a plan for graphs with shapes like these."""
        if not self._numbers:
            self._numbers = plan.numbers
        self.plans[self.shapes_of(nodes, samples)] = plan

    def shapes_of(self, nodes: Sequence[Node], samples: int) -> Shapes:
        """Where these graphs have dimensions of the batch's size, or a multiple of it in rows."""
        return ((samples == 1,), *(_relative(nodes[n], samples) for n in self._numbers))


def _relative(node: Node, samples: int) -> tuple[object, ...]:
    shape = shape_of(node)
    rows = shape[0] if shape else 1
    return rows % samples == 0, rows > samples, *(size == samples for size in shape)
