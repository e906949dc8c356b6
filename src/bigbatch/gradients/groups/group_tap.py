"""Computes the gradients of k groups of samples in one backward, at the nodes of its graph."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from bigbatch.errors import GradientError
from bigbatch.gradients.dtypes import full_precision, without_autocast
from bigbatch.gradients.gradient_hooks import hands_errors_over, weak_method
from bigbatch.gradients.groups.backward_graph import (
    Edge,
    Node,
    ParametersOf,
    edges_of,
    gradients_of_operands,
)
from bigbatch.gradients.groups.backward_plan import RememberedPlans
from bigbatch.gradients.groups.contributions import SIGNS, Contribution, Projection, SignPool
from bigbatch.gradients.groups.group_norms import GroupNorms
from bigbatch.gradients.groups.grouping import Grouping
from bigbatch.gradients.groups.parameter_uses import Route, Use
from bigbatch.gradients.groups.rules import Call

_COLUMNS = 2003  # added to the seed of a parameter's columns
_COMPARED = 8  # one backward in so many compares the sums of the groups with the gradients
_NOT_IN_GRAPH = "not below the loss, or not below the outputs of the last forward"
_NAMED = 3  # parameters that a refusal names


@dataclass(frozen=True)
class GroupGradients:
    """What the groups of one backward add to a parameter's gradient."""

    gradients: Tensor  # h_d, (k, *shape)
    weights: tuple[float, ...]  # n_d of each group


# [Note: Groups of one backward]
# k micro-batches cost k forwards and backwards. One backward of the whole batch shows the gradients
# of k groups of its samples as well, and what it computes is left as it is:
# - Before the node of a function runs, autograd has the gradient D of its output, and the node has
#   saved the operands. For y = x W^T, D^T x over the samples of a group is all that this use of W
#   adds to the group's gradient. `rules.py` has this for each function, a prehook computes it.
# - Module hooks would miss functional calls (F.linear, attention, tied heads). So uses are found in
#   the graph (`parameter_uses.py`), once for all graphs of one structure (`backward_plan.py`).
# - No shape proves which dimension has the samples, and a wrong one gives plausible numbers. Extra
#   backwards of half of the samples show where gradients arrive (`sample_check.py`): those of a
#   group must stay in it. This refuses whatever mixes samples, such as BatchNorm.
# - A use may be missed, in a second forward for example. The sums show it: the groups' gradients
#   must add up to the parameter's (`group_norms.py`).
# - Norms need no gradients of groups, which for large layers are k times the parameter. With random
#   signs S, E |S g|^2 = m |g|^2, and S D^T x is cheap; S is linear, so sums are checked as before.
class GroupTap:
    """Sums what the uses of each parameter add to each group's gradient, in hooks on their nodes.

    Call `prepare` after the forward, and `take` with each parameter's gradient of the backward, as
    a hook on the leaf reports it. See [Note: Groups of one backward].
    """

    def __init__(
        self,
        groups: int,  # k; one per sample if there are fewer samples
        parameters_of: ParametersOf,
        layers: Mapping[Tensor, int],  # of the parameters, whose norms are exact; empty for one
        model: nn.Module | None = None,  # whose buffers have no samples
        *,
        checks_samples: bool = True,  # whether extra backwards may look where samples are
    ) -> None:
        self.groups = groups
        self.on_error: Callable[[Exception], None] | None = None  # see `hands_errors_over`
        self.failed = False
        self.with_products = False  # whether norms have the products of all groups
        self.exact = False  # whether a subscriber needs the gradients themselves
        self._layers, self.model = layers, model
        self.step = 0  # chooses the random signs, together with `_backwards`
        self.refusals: dict[Tensor, str] = {}  # of the present backward
        self.missing = ""  # why no backward could be prepared after the last forward
        self.grouping: Grouping | None = None  # of the prepared backward
        self.weights: tuple[float, ...] = ()  # n_d of its groups that have any weight
        # the function in which samples of the prepared backward influence others; "" if none
        self.coupling = ""
        self._plans = RememberedPlans(parameters_of, model, checks_samples=checks_samples)
        self._backwards = 0  # of the step
        # of the prepared backward
        self._refusal = ""  # of parameters that it does not reach
        self._projected: Mapping[int, int] = {}  # see `BackwardPlan`
        self._counting: list[int] | None = None  # groups that have any weight; None for all
        self._compares = True  # whether the sums of groups are compared
        self._nodes: list[Node] = []  # hooks do not hold them
        # by id of the parameter: linear images of the groups' gradients, and how they are projected
        self._images: dict[int, tuple[Tensor, Projection | None]] = {}
        self._backward = -1  # torch's number of the backward that they are of
        self._norms: GroupNorms | None = None
        self._projections: dict[tuple[int, torch.Size, torch.dtype], Projection] = {}
        self._signs = SignPool()

    # a backward

    def prepare(
        self,
        roots: Iterable[Tensor],  # the loss, or the model's outputs
        samples: int,  # B
        sample_weights: Sequence[float] | Tensor | None = None,  # in the loss, (B,); None if equal
    ) -> None:
        """Hooks the graph below `roots`, whose backward is to come."""
        is_surprising = self.grouping is not None  # a forward without its backward
        self.forget()
        grouping = Grouping(samples, min(self.groups, samples))
        nodes, plan = self._plans.plan(edges_of(roots), grouping)
        plan.backwards += 1
        self._nodes, self.coupling = nodes, plan.coupling
        self._refusal = plan.refusal or _NOT_IN_GRAPH
        self._projected = {} if self.exact or self._layers else plan.projected
        self.refusals = dict(plan.refusals)
        sums = grouping.sizes if sample_weights is None else grouping.sums(sample_weights)
        self.weights = tuple(filter(None, sums))
        has_all = len(self.weights) == len(sums)
        self._counting = None if has_all else [d for d, weight in enumerate(sums) if weight]
        self.grouping = grouping
        kinds = {"by_parameter": self.exact, "with_products": self.with_products}
        self._norms = GroupNorms(self.weights, self._layers, plan.eps, **kinds)
        self._backwards += 1
        self._compares = is_surprising or plan.backwards % _COMPARED == 1
        on_gradient = weak_method(self._on_gradient)
        for use in plan.uses:
            nodes[use.number].register_prehook(partial(on_gradient, grouping, use))

    def take(self, parameter: Tensor, gradient: Tensor) -> GroupGradients | None:
        """The groups' gradients, complete when the parameter's `gradient` is; None if unseen."""
        images, projection = self._images.pop(id(parameter), (None, None))
        assert self._norms is not None
        if images is None:
            self.refusals.setdefault(parameter, self._refusal)
            return None
        if self._counting is not None:
            images = images[self._counting]
        expected = None
        if self._compares:
            # of a copy, since an engine may write to the gradient's memory before it is compared
            whole = gradient.to(images.dtype, copy=projection is None)
            expected = whole if projection is None else projection.of(whole)
        self._norms.add(parameter, images, 1 if projection is None else projection.scale, expected)
        return GroupGradients(images, self.weights) if self.exact else None

    def end(self) -> GroupNorms:
        """The norms of the groups of this backward."""
        norms = self._norms
        assert norms is not None
        norms.end()
        self.forget()
        return norms

    def forget(self) -> None:
        """Forgets the prepared backward."""
        self._nodes, self.coupling, self.grouping = [], "", None
        self._norms, self.missing, self.failed = None, "", False
        self._images, self._projections = {}, {}

    def restart(self, step: int) -> None:
        """A step starts, with this number."""
        self.step, self._backwards = step, 0

    @hands_errors_over
    def _on_gradient(
        self, grouping: Grouping, use: Use, gradients: tuple[Tensor | None, ...]
    ) -> None:
        gradient = gradients[0]
        if gradient is None or grouping is not self.grouping:
            return
        if torch.is_grad_enabled():
            raise GradientError(
                "a backward with create_graph=True cannot be cut into groups; measure by "
                "micro-batches, groups=None"
            )
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # an earlier one through this graph, of something else
            self._images.clear()
            self._backward = backward
        node = self._nodes[use.number]
        with without_autocast(gradient.device):
            call = Call(node, full_precision(gradient), use.place, grouping, use.routes)
            for operand, contribution in use.rule(call).items():
                self._add(call, operand, use.routes[operand], contribution)

    def _add(self, call: Call, operand: int, route: Route, contribution: Contribution) -> None:
        projection = None
        if route.matrix is not None:
            source = contribution.transposed() if route.is_transposed else contribution
            parameter = id(route.matrix)
            if parameter in self._projected:
                number = self._projected[parameter]
                projection = self._projection_of(number, route.matrix.shape, call.gradient)
            images = source.exact() if projection is None else source.projected(projection)
            found = [(parameter, images)]
        else:
            start = call.node.next_functions[operand]
            by_group = [self._follow(start, route, h) for h in contribution.exact()]
            stacked = ((p, torch.stack([one[p] for one in by_group])) for p in by_group[0])
            found = [(id(p), full_precision(images)) for p, images in stacked]
        for key, images in found:
            if key in self._images:
                images.add_(self._images[key][0])
            self._images[key] = images, projection

    def _follow(self, start: Edge, route: Route, gradient: Tensor) -> dict[Tensor, Tensor]:
        """The gradients of the parameters, from that of the operand computed from them."""
        gradients, by_parameter = {start: gradient}, dict[Tensor, Tensor]()
        for number in route.nodes:
            node = self._nodes[number]
            arrived = [gradients.get((node, n)) for n in range(len(node._input_metadata))]
            if number in route.parameters:
                assert arrived[0] is not None
                by_parameter[route.parameters[number]] = arrived[0]
                continue
            found = gradients_of_operands(node, arrived)
            for edge, one in zip(node.next_functions, found, strict=False):
                if one is not None:
                    gradients[edge] = gradients[edge] + one if edge in gradients else one
        return by_parameter

    def _projection_of(self, number: int, shape: torch.Size, like: Tensor) -> Projection:
        key = number, shape[: 2 if shape[2:] else 1], like.dtype
        if key not in self._projections:
            seed = 7919 * number + 1009 * self.step + 131 * self._backwards
            kind = like.device, like.dtype
            is_wide = shape[2:] and shape[1] > SIGNS
            columns = self._signs.signs(shape[1], seed + _COLUMNS, *kind) if is_wide else None
            rows = self._signs.signs(shape[0], seed, *kind)
            self._projections[key] = Projection(rows, columns)
        return self._projections[key]


def refusal_message(refusals: Mapping[Tensor, str], model: nn.Module | None) -> str:
    """Names the parameters whose groups cannot be seen, and why."""
    named = () if model is None else model.named_parameters()
    names: dict[Tensor, str] = {p: name for name, p in named}
    by_reason = defaultdict[str, list[str]](list)
    for parameter, reason in refusals.items():
        by_reason[reason].append(names.get(parameter, f"one of shape {tuple(parameter.shape)}"))
    parts = [
        ", ".join(found[:_NAMED]) + f", {len(found) - _NAMED} more" * (len(found) > _NAMED)
        for found in by_reason.values()
    ]
    return (
        f"{'; '.join(by_reason)}; so the gradients of the groups of one backward cannot be seen "
        f"for {'; '.join(parts)}"
    )
