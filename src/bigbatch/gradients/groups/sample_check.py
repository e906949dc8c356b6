"""Checks, by backwards of some of the samples, where the samples are in each use of a parameter."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

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
from bigbatch.gradients.groups.parameter_uses import ParameterUses
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

    # by the number of a use: where its samples are, if they are as those of a group are
    places: dict[int, Place]
    # whether another batch gives the same: no function got a gradient of zeros, which shows
    # nothing, or one that is not finite, and none moves samples by indices
    is_conclusive: bool = True
    # the function whose backward changed what its forward had saved, which was put back; or empty
    overwriting: str = ""
    # the function, above any BatchNorm, in which samples influence others; empty if none is known,
    # and where they may just lie elsewhere
    coupling: str = ""


def check_samples(found: ParameterUses, roots: Sequence[Edge], number: int) -> SampleCheck:
    """Looks where gradients of some samples arrive, from the first places that all uses have."""
    attempts = _Attempts(found, roots)
    ends = {node for node, _ in attempts.starts}
    of_loss = coupling_function((node for node, _ in roots), ends, found.samples)
    checks, halves = list[SampleCheck](), _halves(found.samples, number)
    for attempt in range(max(map(len, attempts.starts.values()), default=1)):
        check = attempts.run(attempt, halves)
        wrong = [use for use in attempts.uses if use.number not in check.places]
        if check.overwriting or all(map(found.is_ambiguous, wrong)):
            return replace(check, coupling=of_loss)
        checks.append(check)
    in_each = all(check.coupling for check in checks)
    return replace(checks[0], coupling=of_loss or (checks[0].coupling if in_each else ""))


class _Attempts:
    """Backwards of halves of the samples, if these are in certain places of some outputs.

    They start at the outputs with samples nearest to the loss, and end at the last uses.
    """

    def __init__(self, found: ParameterUses, roots: Sequence[Edge]) -> None:
        self._found = found
        self.starts: dict[Edge, list[Place]] = {}  # where the samples may be in each output
        above = self._descend(roots)
        self.uses = [use for use in found.uses if found.nodes[use.number] not in above]
        for use in found.uses:
            if found.nodes[use.number] in above and not use.refusal:
                use.refusal = (
                    f"no value from the loss down to {use.name} has a dimension of the batch's size"
                )
        used = {found.nodes[use.number] for use in found.uses}
        leads_to_use = set[Node]()  # by an operand
        for node in found.operands_first:
            if any(n in used or n in leads_to_use for n in operands_of(node)):
                leads_to_use.add(node)
        self._last_uses = [u for u in found.uses if found.nodes[u.number] not in leads_to_use]
        # nodes whose rows may be of any samples: below a BatchNorm, which mixes them by its design,
        # or below a function that moves them
        self._unordered = set[Node]()
        for node in reversed(found.operands_first):
            if node in self._unordered or is_batch_norm(node) or self._moves(node):
                self._unordered.update(operands_of(node))

    def _descend(self, roots: Sequence[Edge]) -> set[Node]:
        """Finds the first outputs that show where the samples are; the nodes above them."""
        found, visited, above = self._found, set[Edge](), set[Node]()
        # below the node of DDP that would begin to reduce
        sinks = [node for node in found.nodes if node.name() == "_DDPSinkBackward"]
        waiting = [edge for sink in sinks for edge in sink.next_functions] or [*roots]
        while waiting:
            edge = node, output = waiting.pop()
            if node is None or edge in visited or leaf_of(node) is not None:
                continue
            visited.add(edge)
            operands = node.next_functions
            has_none = bool(operands) and leaves_samples(node, operands[0], found.samples)
            places = found.places_by_shape(shape_of(node, output))
            certain = [place for place in places if place.is_certain]
            if certain and node in found.with_samples and not has_none:
                self.starts[edge] = certain
            else:
                above.add(node)
                waiting += operands
        return above

    def run(self, attempt: int, halves: Sequence[Tensor]) -> SampleCheck:
        """Runs a backward of each half, from each output's place of this number, or its last."""
        found = self._found
        self._possible = {use.number: list(use.places) for use in self.uses}
        self._arrived, self._seen = set[int](), set[int]()  # where gradients were; were not zero
        self._mixed = set[int]()  # nodes whose gradients are of more samples than a half
        self._is_finite, self._overwriting = True, ""
        starts = {edge: of[min(attempt, len(of) - 1)] for edge, of in self.starts.items()}
        for members in halves:
            with self._restored_functions():
                self._run_backward(starts, members)
        moves = any(self._moves(found.nodes[number]) for number in self._arrived)
        return SampleCheck(
            {n: left[0] for n, left in self._possible.items() if left and n in self._arrived},
            self._arrived == self._seen and self._is_finite and not moves,
            self._overwriting,
            found.consumer_of(min(self._mixed)) if self._mixed else "",
        )

    def _moves(self, node: Node) -> bool:
        operands = operands_of(node) if node.name() in _INDEXED else ()
        return not self._found.with_samples.isdisjoint(operands)

    def _run_backward(self, starts: dict[Edge, Place], members: Tensor) -> None:
        found, ends = self._found, {use.number for use in self._last_uses}
        handles = [
            node.register_prehook(lambda gradients, n=n: self._note(n, gradients, members))
            for n, node in enumerate(found.nodes)
            if n not in ends and node in found.with_samples
        ]
        gradients = list[Tensor]()
        for (node, output), place in starts.items():
            metadata = node._input_metadata[output]
            shape, device = tuple(metadata.shape), metadata.device
            generator = torch.Generator(device).manual_seed(len(gradients))
            gradient = torch.randn(shape, generator=generator, device=device)  # drawn where it is
            gradient *= place.mask(members.to(device), gradient)
            gradients.append(gradient.to(metadata.dtype))
        edges = [GradientEdge(*edge) for edge in starts]
        last = [GradientEdge(found.nodes[number], 0) for number in ends]
        try:
            if edges and last:
                arrived = torch.autograd.grad(
                    edges, last, gradients, retain_graph=True, allow_unused=True
                )
                for number, one in zip(ends, arrived, strict=True):
                    self._note(number, (one,), members)
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _restored_functions(self) -> Iterator[None]:
        """Puts back what functions written in Python saved, and the random states."""
        kept = [
            (node.name(), tensor, tensor.detach().clone())
            for node in written_in_python(self._found.nodes)
            for tensor in saved_by_python(node)
        ]
        devices = [node._input_metadata[output].device for node, output in self.starts]
        others = {device.index: device.type for device in devices if device.type != "cpu"}
        versions = _unsafe_preserve_version_counter(tuple(tensor for _, tensor, _ in kept))
        kind = next(iter(others.values()), "cpu")  # a process has one kind of accelerator
        with torch.random.fork_rng(others, device_type=kind), versions:
            yield
            for name, tensor, before in kept:
                if not torch.allclose(tensor, before, rtol=0, atol=0, equal_nan=True):
                    self._overwriting = name
                    tensor.detach().copy_(before)

    def _note(self, number: int, gradients: tuple[Tensor | None, ...], members: Tensor) -> None:
        """Gradients have arrived: leaves the places in which all of them are of these samples."""
        present = [g.detach() for g in gradients if g is not None and g.numel()]
        if present:
            self._arrived.add(number)
        if any(bool(gradient.any()) for gradient in present):
            self._seen.add(number)
        if (first := gradients[0]) is None:
            return
        first = first.detach()
        known = first.nan_to_num(0.0, 0.0, 0.0)
        if self._found.nodes[number] not in self._unordered and self._is_mixed(known, members):
            self._mixed.add(number)
        if number in self._possible:
            self._is_finite &= bool(first.isfinite().all())
            self._possible[number] = [
                place
                for place in self._possible[number]
                if not (self._samples_of(known, place) & ~members).any()
            ]

    def _is_mixed(self, gradient: Tensor, members: Tensor) -> bool:
        """Whether a gradient whose dimension 0 has the samples is one of more than these."""
        if gradient.shape[:1] != (len(members),):
            return False
        places = self._found.exact_places(gradient.shape)
        by_place = [self._samples_of(gradient, place) for place in places]
        has_others = all(bool((samples & ~members).any()) for samples in by_place)
        return has_others and int(by_place[0].sum()) > int(members.sum())

    def _samples_of(self, gradient: Tensor, place: Place) -> Tensor:
        """Whether each sample has a gradient that is not zero, (B,)."""
        by_sample = place.by_sample(gradient, self._found.samples)
        return (by_sample != 0).reshape(len(by_sample), -1).any(1).cpu()


def _halves(samples: int, number: int) -> list[Tensor]:
    """Halves of the samples, (B,) each, with their complements.

    The first of all has sample 1 and not the last but one, that half a batch on, or sample 0: its
    partners where samples are mirrored, the batch is doubled, or they are neighbours.
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
