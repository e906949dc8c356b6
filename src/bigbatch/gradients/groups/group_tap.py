"""Computes the gradients of k groups of samples in one backward, at the nodes of its graph."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.batchnorm import _BatchNorm

from bigbatch.errors import GradientError
from bigbatch.gradients.dtypes import sum_dtype, without_autocast
from bigbatch.gradients.groups.backward_graph import (
    Edge,
    Node,
    edges_of,
    gradients_of_operands,
    shape_of,
    trace,
)
from bigbatch.gradients.groups.contributions import Contribution
from bigbatch.gradients.groups.group_norms import GroupNorms, NormsOfGroups
from bigbatch.gradients.groups.grouping import Grouping
from bigbatch.gradients.groups.parameter_uses import ParameterUses, Route, Use
from bigbatch.gradients.groups.projection import SIGNS, Projection, SignPool
from bigbatch.gradients.groups.rules import Call, Place, Rule, can_project, rule_of

_COLUMNS = 2003  # added to the seed of a parameter's columns
_COMPARED = 8  # one backward in so many compares the sums of the groups with the gradients
_BATCH_NORM = "BatchNorm normalizes over the samples of all groups"
_NOT_IN_GRAPH = "not below the loss, or not below the outputs of the last forward"
_MAX_STRUCTURES = 32  # graphs that are remembered


@dataclass(frozen=True)
class GroupGradients:
    """What the groups of one backward add to a parameter's gradient.

    Args:
        gradients: h_d, (k, *shape).
        weights: n_d of each group.
    """

    gradients: Tensor
    weights: tuple[float, ...]


class _CoveredUse(NamedTuple):
    number: int  # of the node
    rule: Rule
    place: Place
    operands: tuple[int, ...]
    routes: dict[int, list[Route]]  # by operand


@dataclass(frozen=True)
class _Plan:
    """What is known of all graphs of one structure.

    Args:
        uses: the uses that are covered, with the place of the samples.
        refusals: parameters that are not covered, and why.
        projected: parameters whose gradients may be projected, with the number of their random
            signs, which those of one use share.
        eps: relative rounding of the coarsest dtype between a use and its parameter.
        refusal: why no parameter is covered.
    """

    uses: list[_CoveredUse]
    refusals: dict[Tensor, str]
    projected: dict[Tensor, int]
    eps: float = 0.0
    refusal: str = ""


class GroupTap:
    """Hooks the nodes that use parameters, and sums what they add to each group's gradient.

    The backward itself is not changed. Call `prepare` after the forward, and `take` with each
    parameter's gradient of the backward, as a hook on the leaf reports it.

    Args:
        groups: k, the groups of a backward; one per sample if there are fewer samples.
        parameter_of: leaf -> the watched parameter that it is; None for another leaf.
        layers: the number of each parameter's layer, whose norms are exact; empty if all are one.
        model: the model, whose buffers have no samples; None if it is unknown.
        checks_samples: whether an extra backward may check, once for each structure of graph, that
            the samples of a group do not influence others and are where they are looked for.
    """

    def __init__(
        self,
        groups: int,
        parameter_of: Callable[[Tensor], Tensor | None],
        layers: Mapping[Tensor, int],
        model: nn.Module | None = None,
        *,
        checks_samples: bool = True,
    ) -> None:
        self.groups = groups
        self.exact = False  # whether a subscriber needs the gradients themselves
        self._layers, self._model = layers, model
        self.step = 0  # chooses the random signs, together with `_backwards`
        self.refusals: dict[Tensor, str] = {}  # of the present backward
        self.grouping: Grouping | None = None  # of the prepared backward
        self.weights: tuple[float, ...] = ()  # n_d of its groups
        self._parameter_of, self._checks_samples = parameter_of, checks_samples
        self._backwards = 0  # of the step
        self._prepared = 0  # number of the last prepared graph
        self._plans: dict[object, _Plan] = {}
        self._plan: _Plan | None = None
        self._projected: dict[Tensor, int] = {}  # in the prepared backward
        self._compares = True  # whether the sums of groups are compared in it
        self._nodes: list[Node] = []  # of the prepared backward; hooks do not hold them
        self._images: dict[Tensor, Tensor] = {}
        self._norms: NormsOfGroups | None = None  # of the prepared backward
        self._signs = SignPool()
        self._projections: dict[tuple[int, torch.Size], Projection] = {}  # likewise

    # a backward

    def prepare(
        self,
        roots: Iterable[Tensor],
        samples: int,
        sample_weights: Sequence[float] | Tensor | None = None,
    ) -> None:
        """Hooks the graph below `roots`, whose backward is to come.

        Args:
            roots: the loss, or the model's outputs.
            samples: B.
            sample_weights: the weight of each sample in the loss, (B,); None if they are equal.
        """
        is_surprising = self.grouping is not None  # a forward without its backward
        self.forget()
        edges = edges_of(roots)
        nodes, structure = trace(edges)
        key = samples > 1, structure
        plan = self._plans.get(key)
        is_new = plan is None
        if plan is None:
            plan = self._make_plan(nodes, edges, samples)
            while len(self._plans) >= _MAX_STRUCTURES:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = plan
        self._nodes, self._plan = nodes, plan
        self._projected = {} if self.exact or self._layers else plan.projected
        self.refusals = dict(plan.refusals)
        grouping = self.grouping = Grouping(samples, min(self.groups, samples))
        self.weights = grouping.sizes
        if sample_weights is not None:
            self.weights = tuple(grouping.sums(sample_weights))
        self._norms = NormsOfGroups(self.weights, self._layers, plan.eps)
        self._backwards += 1
        self._compares = is_new or is_surprising or self._prepared % _COMPARED == 0
        self._prepared += 1
        on_gradient = weakref.WeakMethod(self._on_gradient)
        for use in plan.uses:
            nodes[use.number].register_prehook(_prehook(on_gradient, self._prepared, use))

    def take(self, parameter: Tensor, gradient: Tensor) -> GroupGradients | None:
        """The groups' gradients, complete when the parameter's `gradient` is; None if unseen."""
        images = self._images.pop(parameter, None)
        if images is None or self._norms is None:
            refusal = "" if self._plan is None else self._plan.refusal
            self.refusals.setdefault(parameter, refusal or _NOT_IN_GRAPH)
            return None
        scale, expected = 1, None
        if self._compares:
            expected = gradient.to(images.dtype)
        if parameter in self._projected:
            projection = self._projection_of(parameter, images)
            scale = projection.scale
            expected = None if expected is None else projection.of(expected)
        self._norms.add(parameter, images, scale, expected)
        return GroupGradients(images, self.weights) if self.exact else None

    def end(self) -> GroupNorms:
        """The norms of the groups of this backward."""
        assert self._norms is not None
        norms = self._norms.end()
        self.forget()
        return norms

    def forget(self) -> None:
        """Forgets the prepared backward."""
        self._nodes, self._plan, self.grouping = [], None, None
        self._norms = None
        self._images.clear()
        self._projections.clear()

    def restart(self, step: int) -> None:
        """A step starts, with this number."""
        self.step, self._backwards = step, 0

    def _on_gradient(
        self, prepared: int, use: _CoveredUse, gradients: tuple[Tensor | None, ...]
    ) -> None:
        """The gradient of the output of a use is complete."""
        gradient, grouping = gradients[0], self.grouping
        is_prepared = grouping is not None and prepared == self._prepared
        if gradient is None or grouping is None or not is_prepared:
            return
        if torch.is_grad_enabled():
            raise GradientError(
                "a backward with create_graph=True cannot be cut into groups; measure by "
                "micro-batches, groups=None"
            )
        node = self._nodes[use.number]
        with without_autocast(gradient.device):
            call = Call(node, gradient, use.place, grouping, use.operands)
            for operand, contribution in use.rule(call).items():
                for route in use.routes[operand]:
                    self._add(route, contribution, gradient)

    def _add(self, route: Route, contribution: Contribution, like: Tensor) -> None:
        parameter = route.parameter
        if route.is_matrix:
            source = contribution.transposed() if route.is_transposed else contribution
            if parameter in self._projected:
                images = source.projected(self._projection_of(parameter, like))
            else:
                images = source.exact()
        else:
            images = torch.stack([self._along(route, g) for g in contribution.exact()])
        if parameter in self._images:
            images = images.add_(self._images[parameter])
        self._images[parameter] = images

    def _along(self, route: Route, gradient: Tensor) -> Tensor:
        """The gradient of the parameter, from that of the operand computed from it."""
        for number, output, operand in route.path:
            found = gradients_of_operands(self._nodes[number], gradient, output)[operand]
            assert found is not None
            gradient = found
        return gradient

    def _projection_of(self, parameter: Tensor, like: Tensor) -> Projection:
        """The projection of a parameter in this backward, for factors like this tensor."""
        number, shape = self._projected[parameter], parameter.shape
        key = number, shape[:2] if parameter.dim() > 2 else shape[:1]
        projection = self._projections.get(key)
        if projection is None:
            seed = 7919 * number + 1009 * self.step + 131 * self._backwards
            kind = like.device, sum_dtype(like.dtype)
            is_wide = parameter.dim() > 2 and shape[1] > SIGNS
            columns = self._signs.signs(shape[1], seed + _COLUMNS, *kind) if is_wide else None
            projection = Projection(self._signs.signs(shape[0], seed, *kind), columns)
            self._projections[key] = projection
        return projection

    # the structure of a graph

    def _make_plan(self, nodes: list[Node], roots: list[Edge], samples: int) -> _Plan:
        """Finds the uses of a graph, and where the samples are in each."""
        refusal = _refusal_of_graph(nodes) or _refusal_of_model(self._model)
        if refusal:
            return _Plan([], {}, {}, refusal=refusal)
        without_samples: frozenset[int] = frozenset()
        is_of_model = _constants(self._model)
        while True:
            found = ParameterUses(
                nodes, roots, self._parameter_of, samples, is_of_model, without_samples
            )
            places = self._places(found, samples)
            wrong = {number for number, place in places.items() if place is None}
            parameters_only = {
                use.number for use in found.uses if use.number in wrong and found.is_ambiguous(use)
            }
            if not parameters_only:
                break
            without_samples |= parameters_only
        refusals = dict(found.refusals)
        for use in found.uses:
            if use.number in wrong:
                message = f"a group's samples influence others in {use.name}, or are not together"
                refusals.update(dict.fromkeys(use.parameters, message))
        uses = [
            _covered(use, nodes[use.number], place)
            for use in found.uses
            if (place := places[use.number]) is not None and not use.refusal
        ]
        return _Plan(uses, refusals, _projected(found), _rounding(found))

    def _places(self, found: ParameterUses, samples: int) -> dict[int, Place | None]:
        """By the node of each use: where its samples are; None if they are not as a group's are."""
        if not self._checks_samples or samples == 1:
            return {
                use.number: next((p for p in use.places if p.is_certain or samples == 1), None)
                for use in found.uses
            }
        grouping = Grouping(samples, min(self.groups, samples))
        places: dict[int, Place | None] = {use.number: None for use in found.uses}

        def check(use: Use, gradients: tuple[Tensor | None, ...]) -> None:
            if gradients[0] is not None:
                places[use.number] = _place_of_half(use, gradients[0], grouping)

        last = found.last_uses
        handles = [
            found.nodes[use.number].register_prehook(lambda g, use=use: check(use, g))
            for use in found.uses
            if use not in last
        ]
        try:
            for use, gradient in zip(last, _backward_of_half(found, grouping), strict=True):
                check(use, (gradient,))
        finally:
            for handle in handles:
                handle.remove()
        return places


def _refusal_of_graph(nodes: Sequence[Node]) -> str:
    """Why no backward of these nodes can be cut into groups; empty if it may be."""
    for node in nodes:
        name = node.name()
        if name == "CheckpointFunctionBackward":
            return "reentrant checkpointing hides their use; pass use_reentrant=False"
        if name.startswith("CompiledFunction"):
            return "torch.compile makes one function of many, in which uses are not seen"
        # InstanceNorm moves the samples to the channels, so that dimension 0 has size 1
        is_batch_norm = "BatchNorm" in name and shape_of(node)[:1] != (1,)
        if is_batch_norm and getattr(node, "_saved_training", True):
            return _BATCH_NORM
    return ""


def _refusal_of_model(model: nn.Module | None) -> str:
    for module in () if model is None else model.modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            return _BATCH_NORM
    return ""


def _constants(model: nn.Module | None) -> Callable[[Tensor], bool]:
    """Whether a constant is in the memory of a buffer of the model, or of a frozen parameter."""
    tensors = () if model is None else (*model.buffers(), *model.parameters())
    # a parameter of fully_shard has no memory of its own
    plain = (tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter))
    addresses = {tensor.untyped_storage().data_ptr() for tensor in plain}
    return lambda constant: constant.untyped_storage().data_ptr() in addresses


def _covered(use: Use, node: Node, place: Place) -> _CoveredUse:
    operands = tuple(use.routes)
    return _CoveredUse(use.number, rule_of(node, place, operands), place, operands, use.routes)


def _prehook(
    on_gradient: "weakref.WeakMethod[Callable[..., None]]", prepared: int, use: _CoveredUse
) -> Callable[[Any], None]:
    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        bound = on_gradient()
        if bound is not None:
            bound(prepared, use, gradients)

    return hook


def _projected(found: ParameterUses) -> dict[Tensor, int]:
    """The parameters that are larger than their projection, and can be projected in every use."""
    projects: dict[Tensor, bool] = {}
    numbers: dict[Tensor, int] = {}
    for number, use in enumerate(found.uses):
        shared = next((numbers[p] for p in use.parameters if p in numbers), number)
        for operand, routes in use.routes.items():
            for route in routes:
                parameter = route.parameter
                numbers.setdefault(parameter, shared)
                projects[parameter] = (
                    projects.get(parameter, True)
                    and parameter.dim() > 0
                    and parameter.shape[0] > SIGNS
                    and route.is_matrix
                    and can_project(found.nodes[use.number], operand)
                )
    return {parameter: numbers[parameter] for parameter, can in projects.items() if can}


def _rounding(found: ParameterUses) -> float:
    """Relative rounding of the coarsest dtype of the uses, and of what leads to parameters."""
    dtypes = {p.dtype for use in found.uses for p in use.parameters}
    for use in found.uses:
        routes = [route for routes in use.routes.values() for route in routes]
        numbers = {use.number, *(step[0] for route in routes for step in route.path)}
        dtypes |= {m.dtype for n in numbers for m in found.nodes[n]._input_metadata}
    return max((torch.finfo(t).eps for t in dtypes if t.is_floating_point), default=0.0)


def _backward_of_half(found: ParameterUses, grouping: Grouping) -> Sequence[Tensor | None]:
    """The gradients of the last uses, in a backward of random gradients of half of the samples.

    It ends there, before the leaves and their hooks.
    """
    edges, gradients = [], []
    generator = torch.Generator().manual_seed(0)
    for number, output, place in found.frontier:
        node = found.nodes[number]
        metadata = node._input_metadata[output]
        gradient = torch.randn(tuple(metadata.shape), generator=generator)
        by_sample = place.by_sample(gradient, grouping)
        by_sample[~_members(grouping)] = 0
        edges.append(GradientEdge(node, output))
        gradients.append(gradient.to(metadata.device, metadata.dtype))
    ends = [GradientEdge(found.nodes[use.number], 0) for use in found.last_uses]
    if not edges or not ends:
        return [None] * len(ends)
    return torch.autograd.grad(edges, ends, gradients, retain_graph=True, allow_unused=True)


def _members(grouping: Grouping) -> Tensor:
    """Whether each sample is checked, (B,): a random half, of sample 1 and not of its partners.

    Groups of other sizes may part any two samples, so the half is not a group.
    """
    samples = grouping.samples
    members = torch.rand(samples, generator=torch.Generator().manual_seed(samples)) < 0.5
    members[[0, (1 + samples // 2) % samples, -2]] = False  # next to it, half a batch on, mirrored
    members[1] = True
    return members


def _place_of_half(use: Use, gradient: Tensor, grouping: Grouping) -> Place | None:
    """The first place in which the gradients of samples that are not checked are zero."""
    members = _members(grouping)
    for place in use.places:
        by_sample = place.by_sample(gradient.detach(), grouping)
        nonzero = (by_sample != 0).reshape(grouping.samples, -1).any(1).cpu()
        if not bool((nonzero & ~members).any()):
            return place
    return None
