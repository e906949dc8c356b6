"""What is known of all backwards whose graphs have one structure: the uses of parameters in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bigbatch.gradients.groups.backward_graph import Edge, Node, ParametersOf, is_batch_norm, trace
from bigbatch.gradients.groups.contributions import SIGNS
from bigbatch.gradients.groups.grouping import Grouping
from bigbatch.gradients.groups.parameter_uses import FLATTENED, ParameterUses, Use
from bigbatch.gradients.groups.rules import can_project, rule_of
from bigbatch.gradients.groups.sample_check import SampleCheck, check_samples

_BATCH_NORM = "BatchNorm normalizes over the samples of all groups"
_COUPLED = "a group's samples influence others in {}"
_UNKNOWN = "the shape of {} does not show its samples, and under fully_shard nothing else does"
_REFUSED = {
    "CheckpointFunctionBackward": "reentrant checkpointing hides their use; pass "
    "use_reentrant=False",
    "CompiledFunction": "torch.compile makes one function of many, in which uses are not seen",
}
_MAX_STRUCTURES = 32
_CHECKED = {4**n for n in range(32)}  # numbers of the backwards of a structure

Shapes = tuple[tuple[object, ...], ...]
"""Shapes of the outputs of uses, as far as they say where samples are."""


@dataclass
class BackwardPlan:
    """What is known of all graphs of one structure."""

    refusal: str = ""  # why no parameter is covered
    uses: Sequence[Use] = ()  # those that are covered
    refusals: Mapping[Tensor, str] = field(default_factory=dict)  # parameters not covered, and why
    # by id, the parameters whose gradients may be projected: the number of their random signs,
    # which those of one use share
    projected: Mapping[int, int] = field(default_factory=dict)
    eps: float = 0.0  # relative rounding of the coarsest dtype between a use and its parameter
    # the function, other than BatchNorm, in which samples influence others; empty if none is known
    coupling: str = ""
    # whether the check of the samples shows where those of other batches are
    is_conclusive: bool = True
    numbers: tuple[int, ...] = ()  # the numbers of the nodes of all uses
    backwards: int = 0  # how many it was used for


@dataclass
class _Structure:
    plans: dict[Shapes, BackwardPlan] = field(default_factory=dict)
    backwards: int = 0
    numbers: tuple[int, ...] = ()  # of the nodes of all uses

    def shapes_of(self, nodes: Sequence[Node], samples: int) -> Shapes:
        """Where these graphs have dimensions of the batch's size, or a multiple of it in rows."""
        shapes = [nodes[number]._input_metadata[0].shape for number in self.numbers]
        are_rows = [(s[0] % samples == 0, s[0] > samples) if s else () for s in shapes]
        sizes = [[size == samples for size in shape] for shape in shapes]
        return ((samples == 1,), *are_rows, *map(tuple, sizes))


class RememberedPlans:
    """Plans backwards, once for all graphs of one structure.

    A plan is checked again at the fourth, 16th, 64th backward and so on, since random numbers or
    the data of one batch may have misled a check; and while its check was not conclusive.
    """

    def __init__(
        self, parameters_of: ParametersOf, model: nn.Module | None, *, checks_samples: bool
    ) -> None:
        self._parameters_of, self._model = parameters_of, model
        self._checks_samples = checks_samples
        self._structures: dict[object, _Structure] = {}

    def plan(self, roots: Sequence[Edge], grouping: Grouping) -> tuple[list[Node], BackwardPlan]:
        """The nodes below the roots, and what is known of their backward."""
        nodes, key = trace(roots, self._parameters_of)
        if key not in self._structures:
            self._structures[key] = _Structure()
            if len(self._structures) > _MAX_STRUCTURES:
                self._structures.pop(next(iter(self._structures)))
        structure = self._structures[key]
        plan = structure.plans.get(structure.shapes_of(nodes, grouping.samples))
        structure.backwards += 1
        is_due = self._checks_samples and structure.backwards in _CHECKED
        if plan is None or is_due or not plan.is_conclusive:
            check = structure.backwards - 1 if self._checks_samples else None
            plan = self._plan(nodes, roots, grouping, check)
            structure.numbers = structure.numbers or plan.numbers
            structure.plans[structure.shapes_of(nodes, grouping.samples)] = plan
        return nodes, plan

    def _plan(
        self, nodes: Sequence[Node], roots: Sequence[Edge], grouping: Grouping, check: int | None
    ) -> BackwardPlan:
        names, normalizes = [node.name() for node in nodes], _has_batch_norm(nodes, self._model)
        refused = (_REFUSED[start] for start in _REFUSED for n in names if n.startswith(start))
        refusal = next(refused, "")
        # a SyncBatchNorm would wait for the other ranks
        is_synchronous = any("SyncBatchNorm" in name for name in names)
        if refusal or (normalizes and (check is None or is_synchronous)):
            return BackwardPlan(refusal or _BATCH_NORM)
        without_samples, is_of_model = set[int](), _constants(self._model)
        while True:
            found = ParameterUses(
                nodes, self._parameters_of, grouping.samples, is_of_model, without_samples
            )
            checked = _find_places(found, roots, check)
            wrong = [use for use in found.uses if use.number not in checked.places]
            parameters_only = {use.number for use in wrong if found.is_ambiguous(use)}
            if not parameters_only:
                break
            without_samples |= parameters_only
        if checked.overwriting:
            name = checked.overwriting
            return BackwardPlan(f"the backward of {name} overwrites what its forward saved")
        if normalizes or checked.coupling:
            refusal = _BATCH_NORM if normalizes else _COUPLED.format(checked.coupling)
            return BackwardPlan(refusal, coupling=checked.coupling)
        for use in wrong:
            reason = _UNKNOWN if check is None else _COUPLED + ", or are not together"
            use.refusal = use.refusal or reason.format(use.name)
        covered = [use for use in found.uses if not use.refusal]
        for use in covered:
            use.place = checked.places[use.number]
            use.rule = rule_of(nodes[use.number], use.place, use.routes)
        return BackwardPlan(
            "",
            covered,
            {p: use.refusal for use in found.uses if use.refusal for p in use.parameters},
            _projected(found),
            _rounding(found),
            is_conclusive=checked.is_conclusive,
            numbers=tuple(use.number for use in found.uses),
        )


def _find_places(found: ParameterUses, roots: Sequence[Edge], check: int | None) -> SampleCheck:
    if found.samples == 1:
        return SampleCheck({use.number: use.places[0] for use in found.uses if use.places})
    if check is not None:
        return check_samples(found, roots, check)
    # a size B may be one by chance where rows may be samples x others
    by_shape = [use for use in found.uses if FLATTENED[0] not in use.places]
    certain = ((use.number, [p for p in use.places if p.is_certain]) for use in by_shape)
    return SampleCheck({number: places[0] for number, places in certain if len(places) == 1})


def _has_batch_norm(nodes: Sequence[Node], model: nn.Module | None) -> bool:
    modules = () if model is None else model.modules()
    normalizing = (m for m in modules if isinstance(m, _BatchNorm))
    is_in_model = any(m.training or m.running_mean is None for m in normalizing)
    return is_in_model or any(map(is_batch_norm, nodes))


def _constants(model: nn.Module | None) -> Callable[[Tensor], bool]:
    """Whether a constant is a buffer of the model or a frozen parameter, a view or a copy of it."""
    tensors = () if model is None else (*model.buffers(), *model.parameters())
    # a parameter of fully_shard has no memory of its own
    plain = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter)]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in plain}

    def is_of_model(constant: Tensor) -> bool:
        kind = constant.shape, constant.dtype, constant.device
        return constant.untyped_storage().data_ptr() in addresses or any(
            (one.shape, one.dtype, one.device) == kind and torch.equal(one, constant)
            for one in plain
        )

    return is_of_model


def _projected(found: ParameterUses) -> dict[int, int]:
    """The parameters that are larger than their projection, and can be projected in every use."""
    numbers, excluded = dict[Tensor, int](), set[Tensor]()
    for number, use in enumerate(found.uses):
        shared = next((numbers[p] for p in use.parameters if p in numbers), number)
        for operand, route in use.routes.items():
            can = route.matrix is not None and can_project(found.nodes[use.number], operand)
            for parameter in route.parameters.values():
                numbers.setdefault(parameter, shared)
                if not (can and parameter.dim() and parameter.shape[0] > SIGNS):
                    excluded.add(parameter)
    return {id(p): number for p, number in numbers.items() if p not in excluded}


def _rounding(found: ParameterUses) -> float:
    """Relative rounding of the coarsest dtype of the uses, and of what leads to parameters."""
    dtypes = {p.dtype for use in found.uses for p in use.parameters}
    for use in found.uses:
        routes = (n for r in use.routes.values() for n in r.nodes if n not in r.parameters)
        dtypes |= {m.dtype for n in (use.number, *routes) for m in found.nodes[n]._input_metadata}
    return max((torch.finfo(t).eps for t in dtypes if t.is_floating_point), default=0.0)
