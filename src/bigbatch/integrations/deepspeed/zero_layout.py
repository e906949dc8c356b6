"""Where DeepSpeed keeps the mean gradient, by ZeRO stage."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bigbatch.optim.sharding import AllReduce

Shards = Mapping[Tensor, Tensor]


class Layout(Protocol):
    """How a stage divides the gradients among the ranks."""

    parameters: list[Tensor]
    """Those of the model that the optimizer trains."""
    whole: bool
    """Whether every rank has the whole mean gradient."""

    def shards(self) -> Shards:
        """Of each parameter what this rank has of its mean gradient, flat, after a last backward.

        Nothing of those that it has no element of.
        """

    def place(self, parameter: Tensor) -> tuple[int, int]:
        """Where the shard begins in the flat gradient, and its elements."""

    def scaled(self, factor: float) -> None:
        """The shards were multiplied; so is what DeepSpeed has computed of them."""

    def complete(self) -> None:
        """After a last backward: also of parameters that it did not reach, and one before did."""

    def empty(self) -> None:
        """After a step: zeros what DeepSpeed would keep for parameters that the next one misses."""


class VRLayout(Layout, Protocol):
    """One whose shards can be taken out after every backward, and scaled by GSNR in the step."""

    def clear(self) -> None:
        """Makes the next backward's gradient the first of a step."""

    def cut(self, flat: Tensor, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A tensor like one of the optimizer's, as shards of the model's parameters.

        In one order on all ranks, also those that this rank has nothing of.
        """

    @property
    def all_reduce(self) -> AllReduce | None:
        """Adds up numbers over the ranks that have shards; None where every rank has all."""


class _Kept:
    """Where DeepSpeed has nothing else to see to."""

    def scaled(self, factor: float) -> None:
        """Nothing was computed."""

    def complete(self) -> None:
        """They are there."""

    def empty(self) -> None:
        """Nothing is kept."""


class _Whole(_Kept):
    """The stages at which every rank has all."""

    whole, all_reduce = True, None

    def place(self, parameter: Tensor) -> tuple[int, int]:
        """All of it."""
        return 0, parameter.numel()


class Replicated(_Whole):
    """Stage 0: `.grad`, reduced."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)

    def shards(self) -> Shards:
        """Every `.grad` there is."""
        return {p: p.grad.view(-1) for p in self.parameters if p.grad is not None}

    def clear(self) -> None:
        """No `.grad` is left."""
        for parameter in self.parameters:
            parameter.grad = None

    def cut(self, flat: Tensor, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The optimizer has the model's own."""
        return [(flat, tensor.view(-1))]


class Accumulated(_Whole):
    """Stage 1 of bfloat16 with float32 accumulation: a float32 gradient in addition to `.grad`."""

    def __init__(self, optimizer: Any) -> None:
        self.parameters = _joined(optimizer.bf16_groups)
        self._optimizer = optimizer

    def shards(self) -> Shards:
        """Those that a backward has reached."""
        optimizer = self._optimizer
        gradients = _joined(optimizer.fp32_groups_gradients)
        reached = _joined(optimizer.fp32_groups_has_gradients)
        of_each = zip(self.parameters, gradients, reached, strict=True)
        return {parameter: gradient for parameter, gradient, there in of_each if there}


class _Divided(_Kept):
    """The stages at which every rank has shards."""

    whole = False

    def __init__(self, optimizer: Any, groups: Any, ranks: dist.ProcessGroup) -> None:
        self.parameters = _joined(groups)
        self._optimizer, self._ranks = optimizer, ranks
        self._rank = dist.get_rank(ranks)

    def all_reduce(self, numbers: Tensor) -> None:
        """Adds them up."""
        dist.all_reduce(numbers, group=self._ranks)


class Partitioned(_Divided):
    """Stages 1 and 2: this rank's partition of all parameters laid end to end."""

    def __init__(self, optimizer: Any, ranks: dist.ProcessGroup) -> None:
        super().__init__(optimizer, optimizer.bit16_groups, ranks)

    def shards(self) -> Shards:
        """Of the parameters in the partition; the first and the last may be parts."""
        optimizer = self._optimizer
        shards: dict[Tensor, Tensor] = {}
        for group, gradients in optimizer.averaged_gradients.items():
            if gradients is not None:  # what aligns the partition comes last
                kept = [g for g in gradients if not getattr(g, "_zero_padding", False)]
                of_each = zip(optimizer.params_in_partition[group], kept, strict=False)
                shards.update({p: shard.view(-1) for p, shard in of_each})
        return shards

    def place(self, parameter: Tensor) -> tuple[int, int]:
        """None of it where it is not in the partition."""
        optimizer = self._optimizer
        number = optimizer.get_param_id(parameter)
        for group, size in enumerate(optimizer.partition_size):
            starts = optimizer.grad_partition_insertion_offset[group][self._rank]
            if number in starts:
                first = optimizer.grad_start_offset[group][self._rank][number]
                return int(first), int(min(parameter.numel() - first, size - starts[number]))
        return 0, 0

    def clear(self) -> None:
        """Neither what was averaged nor what was accumulated is left."""
        for kept in (self._optimizer.averaged_gradients, self._optimizer.all_grad_tensors):
            kept.update(dict.fromkeys(kept))
        self._optimizer.zero_grad()

    def cut(self, flat: Tensor, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """By where the partition begins in each."""
        group = _position(flat, self._optimizer.single_partition_of_fp32_groups)
        starts = self._optimizer.grad_partition_insertion_offset[group][self._rank]
        cut = []
        for parameter in self._optimizer.bit16_groups[group]:
            start = int(starts.get(self._optimizer.get_param_id(parameter), 0))
            _, length = self.place(parameter)
            cut.append((parameter, tensor.narrow(0, start, length)))
        return cut


class Sharded(_Divided):
    """Stage 3: every rank has a shard of every parameter, padded to one length."""

    def __init__(self, optimizer: Any, ranks: dist.ProcessGroup) -> None:
        super().__init__(optimizer, optimizer.fp16_groups, ranks)

    def shards(self) -> Shards:
        """Of all, without the padding, which may hold anything."""
        optimizer, shards = self._optimizer, {}
        for group, gradients in optimizer.averaged_gradients.items():
            for parameter, shard in zip(
                optimizer.fp16_groups[group], gradients or (), strict=False
            ):
                shards[parameter] = shard[: self.place(parameter)[1]]
        return shards

    def place(self, parameter: Any) -> tuple[int, int]:
        """In the order of the ranks."""
        first = self._rank * parameter.partition_numel()
        return first, max(0, min(parameter.partition_numel(), parameter.ds_numel - first))

    def empty(self) -> None:
        """What is written over by the first backward of a step, but where that does not reach."""
        self._optimizer.grad_partitions_flat_buffer.zero_()

    def clear(self) -> None:
        """What stays is written over, or zero for a parameter that is not reached."""
        self.empty()
        self._optimizer.zero_grad()

    def cut(self, flat: Tensor, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """They follow each other, padded."""
        group = _position(flat, self._optimizer.fp32_partitioned_groups_flat)
        parameters = self._optimizer.fp16_groups[group]
        shards = torch.split(tensor, [parameter.partition_numel() for parameter in parameters])
        return [(p, shard[: self.place(p)[1]]) for p, shard in zip(parameters, shards, strict=True)]


class Offloaded:
    """With the optimizer on the CPU: as without, in the gradient of its partitions.

    Args:
        kept: the layout without.
        flats: the partitions.
    """

    whole = False

    def __init__(self, kept: "Partitioned | Sharded", optimizer: Any, flats: list[Tensor]) -> None:
        self.parameters, self.place = kept.parameters, kept.place
        self.cut, self.all_reduce = kept.cut, kept.all_reduce
        self._kept, self._optimizer, self._flats = kept, optimizer, flats

    def shards(self) -> Shards:
        """Those whose norm was taken, which is when the last backward has brought them here."""
        optimizer = self._optimizer
        shards: dict[Tensor, Tensor] = {}
        for parameter in self.parameters:
            number = optimizer.get_param_id(parameter)
            if number in optimizer.norm_for_param_grads:
                group, *_, start, _ = optimizer.grad_position[number]
                _, length = self.place(parameter)
                gradient = self._flats[group].grad
                assert gradient is not None
                shards[parameter] = gradient.view(-1).narrow(0, start, length)
        return shards

    def scaled(self, factor: float) -> None:
        """The norms, by which DeepSpeed clips."""
        for norm in self._optimizer.norm_for_param_grads.values():
            norm.mul_(factor)

    def complete(self) -> None:
        """DeepSpeed brings here what the last backward reaches; the rest as if unmanaged."""
        optimizer = self._optimizer
        ids = [optimizer.get_param_id(p) for p in self.parameters if self.place(p)[1]]
        if set(ids) - set(optimizer.norm_for_param_grads):
            optimizer.finalize_gradient_accumulation_boundary()

    def empty(self) -> None:
        """The partitions' gradients, and what is added up in addition to them."""
        self._kept.empty()
        sums = getattr(self._optimizer, "accumulated_grads_in_cpu", {})
        for tensor in [*sums.values(), *(flat.grad for flat in self._flats)]:
            if tensor is not None:
                tensor.zero_()


def layout_of(engine: Any) -> Layout:
    """How this engine divides its gradients."""
    optimizer, offloaded = engine.optimizer, engine.zero_use_cpu_optimizer()
    ranks = engine.data_parallel_group
    if hasattr(optimizer, "fp32_groups_has_gradients"):
        return Accumulated(optimizer)
    if engine.zero_optimization_partition_weights():
        sharded, flats = Sharded(optimizer, ranks), optimizer.fp32_partitioned_groups_flat
        return Offloaded(sharded, optimizer, flats) if offloaded else sharded
    if engine.zero_optimization():
        partitioned, flats = (
            Partitioned(optimizer, ranks),
            optimizer.single_partition_of_fp32_groups,
        )
        return Offloaded(partitioned, optimizer, flats) if offloaded else partitioned
    groups = getattr(optimizer, "fp16_groups", None)  # of half types, which have float32 copies
    return Replicated(_joined(groups or [group["params"] for group in optimizer.param_groups]))


def _position(flat: Tensor, flats: list[Tensor]) -> int:
    return next(number for number, each in enumerate(flats) if each is flat)


def _joined(groups: Iterable[Sequence[Any]]) -> list[Any]:
    return [each for group in groups for each in group]
