"""What is known of all backwards whose graphs have one structure: the uses of parameters in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.batchnorm import _BatchNorm

from bigbatch.gradients.groups.backward_graph import Edge, Node, shape_of
from bigbatch.gradients.groups.grouping import Grouping
from bigbatch.gradients.groups.parameter_uses import ParameterUses, Route, Use
from bigbatch.gradients.groups.projection import SIGNS
from bigbatch.gradients.groups.rules import Place, Rule, can_project, rule_of

_BATCH_NORM = "BatchNorm normalizes over the samples of all groups"


class CoveredUse(NamedTuple):
    """A use whose groups are computed.

    Args:
        number: the number of its node.
        rule: computes what it adds to the groups' gradients.
        place: where the samples are in its output.
        operands: the numbers of the operands that come from parameters.
        routes: the routes to these, by operand.
    """

    number: int
    rule: Rule
    place: Place
    operands: tuple[int, ...]
    routes: dict[int, list[Route]]


@dataclass(frozen=True)
class BackwardPlan:
    """What is known of all graphs of one structure.

    Args:
        uses: the uses that are covered, with the place of the samples.
        refusals: parameters that are not covered, and why.
        projected: parameters whose gradients may be projected, with the number of their random
            signs, which those of one use share.
        eps: relative rounding of the coarsest dtype between a use and its parameter.
        refusal: why no parameter is covered.
    """

    uses: list[CoveredUse]
    refusals: dict[Tensor, str]
    projected: dict[Tensor, int]
    eps: float = 0.0
    refusal: str = ""


def plan_backward(
    nodes: Sequence[Node],
    roots: Sequence[Edge],
    grouping: Grouping,
    parameter_of: Callable[[Tensor], Tensor | None],
    model: nn.Module | None,
    *,
    checks_samples: bool,
) -> BackwardPlan:
    """Finds the uses of parameters in a graph, and where the samples are in each.

    Args:
        nodes: the nodes of the graph.
        roots: where its backward starts.
        grouping: the groups of its samples.
        parameter_of: leaf -> the watched parameter that it is; None for another leaf.
        model: the model, whose buffers have no samples; None if it is unknown.
        checks_samples: whether an extra backward may check where the samples are.
    """
    refusal = _refusal_of_graph(nodes) or _refusal_of_model(model)
    if refusal:
        return BackwardPlan([], {}, {}, refusal=refusal)
    without_samples: frozenset[int] = frozenset()
    is_of_model = _constants(model)
    while True:
        found = ParameterUses(
            nodes, roots, parameter_of, grouping.samples, is_of_model, without_samples
        )
        places = _find_places(found, grouping, checks_samples=checks_samples)
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
    return BackwardPlan(uses, refusals, _projected(found), _rounding(found))


def _find_places(
    found: ParameterUses, grouping: Grouping, *, checks_samples: bool
) -> dict[int, Place | None]:
    """By the node of each use: where its samples are; None if they are not as a group's are."""
    samples = grouping.samples
    if not checks_samples or samples == 1:
        return {
            use.number: next((p for p in use.places if p.is_certain or samples == 1), None)
            for use in found.uses
        }
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


def _covered(use: Use, node: Node, place: Place) -> CoveredUse:
    operands = tuple(use.routes)
    return CoveredUse(use.number, rule_of(node, place, operands), place, operands, use.routes)


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
