"""Checks, by backwards of some of the samples, where the samples are in each use of a parameter.

See [Note: Groups of one backward] in `group_tap.py`.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import GradientEdge

from bigbatch.gradients.groups.backward_graph import (
    Edge,
    Node,
    is_batch_norm,
    leaf_of,
    node_names,
    operands_of,
    saved_by_python,
    shape_of,
    written_in_python,
)
from bigbatch.gradients.groups.coupling import coupling_function, leaves_samples
from bigbatch.gradients.groups.grouping import Grouping
from bigbatch.gradients.groups.parameter_uses import ParameterUses, Use
from bigbatch.gradients.groups.rules import Place

_FEW = 8  # samples that one half may not tell apart
_HALVES_OF_FEW = 4

_INDEXED = node_names(
    "Embedding Gather IndexAdd Index IndexCopy IndexPut IndexSelect MaskedScatter MaskedSelect "
    "RepeatInterleave ScatterAdd Scatter ScatterReduce Sort TakeAlongDim Take Topk"
)
"""Functions of samples that may take them elsewhere in another batch."""


@dataclass
class SampleCheck:
    """What was found."""

    # by the number of each use: where its samples are; None if they are not as those of a group are
    places: dict[int, Place | None]
    # whether another batch gives the same: no function got a gradient of zeros, which shows
    # nothing, or one that is not finite, and none moves samples by indices
    is_conclusive: bool = True
    # the name of a function whose backward changed what its forward had saved, which was put back;
    # empty if there is none
    overwriting: str = ""
    # the uses that no output shows the samples of, which have no place
    unlocated: frozenset[int] = frozenset()
    # the name of a function, above any BatchNorm, in which samples influence others; empty if none
    # is known, and where they may just lie elsewhere
    coupling: str = ""


def check_samples(
    found: ParameterUses, roots: Sequence[Edge], grouping: Grouping, number: int
) -> SampleCheck:
    """Looks where gradients of some samples arrive, from the first places that all uses have."""
    frontier = _Frontier(found, roots)
    attempts = max((len(output.places) for output in frontier.outputs), default=1)
    ends = {found.nodes[output.number] for output in frontier.outputs}
    of_loss = coupling_function((node for node, _ in roots), ends, grouping.samples)
    checks = list[SampleCheck]()
    for attempt in range(attempts):
        check = _Attempt(found, frontier, grouping, attempt).run(_halves(grouping.samples, number))
        wrong = [use for use in found.uses if check.places[use.number] is None]
        if check.overwriting or all(map(found.is_ambiguous, wrong)):
            return replace(check, coupling=of_loss)
        checks.append(check)
    in_each = all(check.coupling for check in checks)
    return replace(checks[0], coupling=of_loss or (checks[0].coupling if in_each else ""))


class _Output(NamedTuple):
    """An output with samples from which a backward of some samples can start."""

    number: int  # of its node
    output: int  # its number
    places: list[Place]  # where the samples may be in it, the likeliest first


class _Frontier:
    """Where backwards of the samples of some uses start and end; see `check_samples`."""

    def __init__(self, found: ParameterUses, roots: Sequence[Edge]) -> None:
        self._found = found
        # below the node of DDP that would begin to reduce
        sinks = [node for node in found.nodes if node.name() == "_DDPSinkBackward"]
        below = [edge for sink in sinks for edge in sink.next_functions if edge[0] is not None]
        self._roots = below or list(roots)
        self._used = {found.nodes[use.number] for use in found.uses}
        self._outputs, self._above = self._descend(set())

    @cached_property
    def outputs(self) -> list[_Output]:
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
    def unordered(self) -> set[int]:
        """The numbers of the nodes whose rows may be of any samples.

        They are below a BatchNorm, which mixes samples by its design, or below a function that
        moves them.
        """
        numbers, below = self._found.numbers, set[int]()
        for node in reversed(self._found.operands_first):
            if numbers[node] in below or is_batch_norm(node) or _moves(self._found, numbers[node]):
                below.update(numbers[operand] for operand in operands_of(node))
        return below

    @cached_property
    def last_uses(self) -> list[Use]:
        """The uses below which a backward comes to no other use."""
        leads_to_use: set[Node] = set()  # by an operand
        for node in self._found.operands_first:
            if any(n in self._used or n in leads_to_use for n in operands_of(node)):
                leads_to_use.add(node)
        uses, nodes = self._found.uses, self._found.nodes
        return [use for use in uses if nodes[use.number] not in leads_to_use]

    def _descend(self, flattened: set[Node]) -> tuple[list[_Output], set[Node]]:
        """The first outputs that show where the samples are, and the nodes above them.

        Args:
            flattened: nodes that also do with samples flattened into rows.
        """
        found, waiting, visited = self._found, list(self._roots), set[Edge]()
        reached, above = list[_Output](), set[Node]()
        while waiting:
            edge = node, output = waiting.pop()
            if edge in visited or leaf_of(node) is not None:
                continue
            visited.add(edge)
            shape = shape_of(node, output)
            operands = node.next_functions
            has_none = bool(operands) and leaves_samples(node, operands[0], found.samples)
            places = [] if has_none else found.places_by_shape(shape)
            if node not in flattened:
                places = [place for place in places if place.is_certain and found.has_samples(node)]
            if places:
                reached.append(_Output(found.numbers[node], output, places))
            else:
                above.add(node)
                waiting += [edge for edge in node.next_functions if edge[0] is not None]
        return reached, above


class _Attempt:
    """Backwards of halves of the samples, if these are in certain places of the frontier.

    Args:
        found, grouping: see `check_samples`.
        frontier: where backwards start and end.
        attempt: the number of each output's place; the last one if it has fewer.
    """

    def __init__(
        self, found: ParameterUses, frontier: _Frontier, grouping: Grouping, attempt: int
    ) -> None:
        self._found, self._frontier, self._grouping = found, frontier, grouping
        self._places = [
            (output, output.places[min(attempt, len(output.places) - 1)])
            for output in frontier.outputs
        ]
        self._possible = {use.number: list(use.places) for use in found.uses}
        self._arrived: dict[int, list[Tensor]] = defaultdict(list)  # whether it was not zero
        self._finite: list[Tensor] = []  # whether the gradients of uses were
        self._overwriting = ""  # the name of a function that did so
        self._mixed: set[int] = set()  # nodes whose gradients are of more samples than a half

    def run(self, halves: Sequence[Tensor]) -> SampleCheck:
        """Runs a backward of each half."""
        found = self._found
        for members in halves:
            with self._restored_functions():
                self._run_backward(members)
        located = self._arrived.keys() - self._frontier.unlocated
        places = {
            number: next(iter(places if number in located else ()), None)
            for number, places in self._possible.items()
        }
        moves = any(_moves(found, number) for number in self._arrived)
        is_seen = all(bool(torch.stack(flags).any()) for flags in self._arrived.values())
        is_conclusive = is_seen and all(map(bool, self._finite)) and not moves
        unlocated = self._frontier.unlocated
        coupling = found.consumer_of(min(self._mixed)) if self._mixed else ""
        return SampleCheck(places, is_conclusive, self._overwriting, unlocated, coupling)

    def _run_backward(self, members: Tensor) -> None:
        """A backward of random gradients, which ends before the leaves and their hooks."""
        found, uses = self._found, {use.number: use for use in self._found.uses}
        last = self._frontier.last_uses
        ends = {use.number for use in last}
        handles = [
            node.register_prehook(lambda g, n=number: self._note(n, uses.get(n), g, members))
            for number, node in enumerate(found.nodes)
            if number not in ends and found.has_samples(node)
        ]
        try:
            for use, gradient in zip(last, self._gradients(members), strict=True):
                self._note(use.number, use, (gradient,), members)
        finally:
            for handle in handles:
                handle.remove()

    def _gradients(self, members: Tensor) -> Sequence[Tensor | None]:
        """The gradients of the last uses."""
        found, edges, gradients = self._found, list[GradientEdge](), list[Tensor]()
        for (number, output, _), place in self._places:
            metadata = found.nodes[number]._input_metadata[output]
            shape, device = tuple(metadata.shape), metadata.device
            generator = torch.Generator(device).manual_seed(len(gradients))
            gradient = torch.randn(shape, generator=generator, device=device)  # drawn where it is
            gradient *= place.mask(members.to(device), gradient)
            edges.append(GradientEdge(found.nodes[number], output))
            gradients.append(gradient.to(metadata.dtype))
        ends = [GradientEdge(found.nodes[use.number], 0) for use in self._frontier.last_uses]
        if not edges or not ends:
            return [None] * len(ends)
        return torch.autograd.grad(edges, ends, gradients, retain_graph=True, allow_unused=True)

    @contextmanager
    def _restored_functions(self) -> Iterator[None]:
        """Puts back what functions written in Python saved, and the random states."""
        nodes = self._found.nodes
        kept = [
            (node.name(), tensor, tensor.detach().clone())
            for node in written_in_python(nodes)
            for tensor in saved_by_python(node)
        ]
        metadata = [nodes[number]._input_metadata[n] for (number, n, _), _ in self._places]
        gpus = {m.device.index for m in metadata if m.device.type == "cuda"}
        versions = _unsafe_preserve_version_counter(tuple(tensor for _, tensor, _ in kept))
        with torch.random.fork_rng(gpus), versions:
            yield
            for name, tensor, before in kept:
                if not _are_equal(tensor.detach(), before):
                    self._overwriting = name
                    tensor.detach().copy_(before)

    def _note(
        self, number: int, use: Use | None, gradients: tuple[Tensor | None, ...], members: Tensor
    ) -> None:
        """Gradients have arrived: leaves the places in which all of them are of these samples."""
        present = [g.detach().any() for g in gradients if g is not None and g.numel()]
        if present:
            self._arrived[number] += present
        first = gradients[0]
        if first is None:
            return
        known = first.detach().nan_to_num(0.0, 0.0, 0.0)
        if self._is_mixed(number, known, members):
            self._mixed.add(number)
        if use is not None:
            self._finite.append(first.detach().isfinite().all())
            self._possible[number] = [
                place for place in self._possible[number] if self._is_of(known, place, members)
            ]

    def _is_mixed(self, number: int, gradient: Tensor, members: Tensor) -> bool:
        """Whether a gradient whose dimension 0 has the samples is one of more than these."""
        samples, frontier = self._grouping.samples, self._frontier
        if gradient.shape[:1] != (samples,) or number in frontier.unordered:
            return False
        places = self._found.exact_places(gradient.shape)
        if any(self._is_of(gradient, place, members) for place in places):
            return False
        nonzero = (gradient != 0).reshape(samples, -1).any(1)
        return int(nonzero.sum()) > int(members.sum())

    def _is_of(self, gradient: Tensor, place: Place, members: Tensor) -> bool:
        """Whether a gradient is one of these samples alone."""
        by_sample = place.by_sample(gradient, self._grouping)
        nonzero = (by_sample != 0).reshape(self._grouping.samples, -1).any(1).cpu()
        return not bool((nonzero & ~members).any())


def _moves(found: ParameterUses, number: int) -> bool:
    """Whether a node takes samples elsewhere by indices."""
    return found.nodes[number].name() in _INDEXED and found.moves_samples(number)


def _halves(samples: int, number: int) -> list[Tensor]:
    """Halves of the samples, (B,) each, with their complements.

    The first of all has sample 1 and not the last but one, that half a batch on, or sample 0: its
    partners where samples are mirrored, the batch is doubled, or they are neighbours. Groups of
    other sizes may part any two samples, so no half is a group.
    """
    generator = torch.Generator().manual_seed(samples + 7919 * number)
    halves = list[Tensor]()
    for half in range(_HALVES_OF_FEW if samples < _FEW else 1):
        members = torch.zeros(samples, dtype=torch.bool, device="cpu")
        chosen = torch.randperm(samples, generator=generator, device="cpu")[: samples // 2]
        members[chosen] = True
        if number == half == 0:
            members[[0, (1 + samples // 2) % samples, -2]] = False
            members[1] = True
        halves += members, ~members
    return halves


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether they have the same values, nan too."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
