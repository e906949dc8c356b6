"""Where DeepSpeed keeps the mean gradient, by ZeRO stage."""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigbatch.optim.sharding import AllReduce

Shards = Mapping[Tensor, Tensor]


# [Note: ZeRO's layouts]
# DeepSpeed reduces gradients in its backward, and where the mean lies then depends on the stage. No
# `.grad` has it above stage 0; each layout reads DeepSpeed's own buffers, without copies:
# - 0: `.grad` of every parameter, the whole mean on every rank.
# - 1 in bfloat16 with float32 accumulation: float32 gradients of all parameters, on every rank.
# - 1, 2: `averaged_gradients`, this rank's partition of a group's parameters laid end to end. It
#   cuts its first and last parameter, and ends with padding, which is skipped.
# - 3: a shard of every parameter on every rank, padded to one length, in `averaged_gradients`.
# - Offload: on the CPU, in the gradients of the partitions. DeepSpeed copies only what the last
#   backward has reached, and clips by norms from that copy: `complete` and `scale_norms` mend both.
# The next step must not begin with these gradients: `clear` empties them between two backwards (VR
# optimizers, which take each micro-batch out), `zero_unreached` what DeepSpeed never empties.
class Layout:
    """How a ZeRO stage divides the mean gradient among the ranks; by default every rank has all.

    See [Note: ZeRO's layouts].
    """

    replicated = True
    """Whether every rank has the whole mean gradient."""
    all_reduce: AllReduce | None = None
    """Adds up numbers over the ranks that have shards; None where every rank has all."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)

    def shards(self) -> Shards:
        """This rank's shard of each mean gradient, flat, after the last backward of a step.

        Parameters of which this rank has no element are left out.
        """
        raise NotImplementedError

    def shard_range(self, parameter: Tensor) -> tuple[int, int]:
        """Where this rank's shard begins in the flat gradient, and its number of elements."""
        return 0, parameter.numel()

    def scale_norms(self, factor: float) -> None:
        """Multiplies what DeepSpeed has computed of the shards, after the shards themselves."""

    def complete(self) -> None:
        """After the last backward: completes shards that only earlier backwards have reached."""

    def zero_unreached(self) -> None:
        """After a step: zeros what DeepSpeed would keep for parameters that the next one misses."""


class Replicated(Layout):
    """Stage 0: the reduced `.grad`."""

    def shards(self) -> Shards:
        """Every `.grad` that is not None."""
        return {p: p.grad.view(-1) for p in self.parameters if p.grad is not None}

    def clear(self) -> None:
        """Makes the next backward's gradient the first of a step."""
        for parameter in self.parameters:
            parameter.grad = None

    def split(self, flat: Tensor, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The tensor itself: the optimizer has the parameters of the model."""
        return [(flat, tensor.view(-1))]


class Accumulated(Layout):
    """Stage 1 of bfloat16 with float32 accumulation: a float32 gradient in addition to `.grad`."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(_flatten(optimizer.bf16_groups))
        self._optimizer = optimizer

    def shards(self) -> Shards:
        """The float32 gradients of the parameters that a backward has reached."""
        gradients = _flatten(self._optimizer.fp32_groups_gradients)
        reached = _flatten(self._optimizer.fp32_groups_has_gradients)
        rows = zip(self.parameters, gradients, reached, strict=True)
        return {parameter: gradient for parameter, gradient, is_reached in rows if is_reached}


class _Divided(Layout):
    """The stages at which every rank has shards."""

    replicated = False

    def __init__(
        self, optimizer: Any, groups: Any, partitions: list[Tensor], ranks: dist.ProcessGroup
    ) -> None:
        super().__init__(_flatten(groups))
        self.all_reduce = functools.partial(dist.all_reduce, group=ranks)
        self.partitions = partitions  # the flat tensors that the optimizer steps, one per group
        self._optimizer, self._groups, self._rank = optimizer, groups, dist.get_rank(ranks)

    def split(self, flat: Tensor, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Shards of a tensor like `flat`, one of the optimizer's, by parameter of the model.

        In one order on all ranks, with empty shards of parameters that this rank has nothing of.
        """
        group = next(i for i, partition in enumerate(self.partitions) if partition is flat)
        places = zip(self._groups[group], self._starts(group), strict=True)
        return [(p, tensor.narrow(0, start, self.shard_range(p)[1])) for p, start in places]

    def cut(self, flat: Tensor, tensor: Tensor) -> list[tuple[int, Tensor]]:
        """The same shards, each with the number of dimensions of its layer."""
        return [(len(shape_of(p)), shard) for p, shard in self.split(flat, tensor)]

    def _starts(self, group: int) -> Iterable[int]:
        """Where in the partition of a group the shards of its parameters begin."""
        raise NotImplementedError


class Partitioned(_Divided):
    """Stages 1 and 2: this rank's partition of all parameters laid end to end."""

    def __init__(self, optimizer: Any, ranks: dist.ProcessGroup) -> None:
        partitions = optimizer.single_partition_of_fp32_groups
        super().__init__(optimizer, optimizer.bit16_groups, partitions, ranks)

    def shards(self) -> Shards:
        """Shards of the parameters in the partition, which may cut the first and the last."""
        optimizer = self._optimizer
        shards: dict[Tensor, Tensor] = {}
        for group, gradients in optimizer.averaged_gradients.items():
            if gradients is not None:  # the padding that aligns the partition comes last
                unpadded = [g for g in gradients if not getattr(g, "_zero_padding", False)]
                pairs = zip(optimizer.params_in_partition[group], unpadded, strict=False)
                shards.update({p: shard.view(-1) for p, shard in pairs})
        return shards

    def shard_range(self, parameter: Tensor) -> tuple[int, int]:
        """The part of the parameter that lies in this rank's partition; (0, 0) where none does."""
        optimizer = self._optimizer
        param_id = optimizer.get_param_id(parameter)
        for group, size in enumerate(optimizer.partition_size):
            starts = optimizer.grad_partition_insertion_offset[group][self._rank]
            if param_id in starts:
                first = optimizer.grad_start_offset[group][self._rank][param_id]
                return int(first), int(min(parameter.numel() - first, size - starts[param_id]))
        return 0, 0

    def clear(self) -> None:
        """Makes the next backward's gradient the first of a step: drops averages and sums."""
        for gradients in (self._optimizer.averaged_gradients, self._optimizer.all_grad_tensors):
            gradients.update(dict.fromkeys(gradients))
        self._optimizer.zero_grad()

    def _starts(self, group: int) -> Iterable[int]:
        starts = self._optimizer.grad_partition_insertion_offset[group][self._rank]
        return [int(starts.get(self._optimizer.get_param_id(p), 0)) for p in self._groups[group]]


class Sharded(_Divided):
    """Stage 3: every rank has a shard of every parameter, padded to one length."""

    def __init__(self, optimizer: Any, ranks: dist.ProcessGroup) -> None:
        partitions = optimizer.fp32_partitioned_groups_flat  # one per sub-group of parameters
        super().__init__(optimizer, optimizer.fp16_groups, partitions, ranks)

    def shards(self) -> Shards:
        """Shards of all parameters, without the padding, which may hold any values."""
        optimizer, shards = self._optimizer, {}
        for group, gradients in optimizer.averaged_gradients.items():
            for parameter, shard in zip(self._groups[group], gradients or (), strict=False):
                shards[parameter] = shard[: self.shard_range(parameter)[1]]
        return shards

    def shard_range(self, parameter: Any) -> tuple[int, int]:
        """Shards follow each other in the order of the ranks."""
        first = self._rank * parameter.partition_numel()
        return first, max(0, min(parameter.partition_numel(), parameter.ds_numel - first))

    def zero_unreached(self) -> None:
        """Zeros the buffer of gradients, which a backward overwrites only where it reaches."""
        self._optimizer.grad_partitions_flat_buffer.zero_()

    def clear(self) -> None:
        """Makes the next backward's gradient the first of a step; others are zero."""
        self.zero_unreached()
        self._optimizer.zero_grad()

    def _starts(self, group: int) -> Iterable[int]:
        sizes = [parameter.partition_numel() for parameter in self._groups[group]]
        return itertools.accumulate(sizes[:-1], initial=0)  # shards are padded


class Offloaded(Layout):
    """The optimizer on the CPU: shards lie in the gradients of the partitions that it steps."""

    replicated = False

    def __init__(self, layout: Partitioned | Sharded) -> None:
        super().__init__(layout.parameters)
        self.split, self.cut, self.all_reduce = layout.split, layout.cut, layout.all_reduce
        self._layout, self._optimizer = layout, layout._optimizer

    def shards(self) -> Shards:
        """Shards whose norm DeepSpeed has computed, as it does when it copies them to the CPU."""
        optimizer = self._optimizer
        shards: dict[Tensor, Tensor] = {}
        for parameter in self.parameters:
            param_id = optimizer.get_param_id(parameter)
            if param_id in optimizer.norm_for_param_grads:
                group, *_, start, _ = optimizer.grad_position[param_id]
                _, length = self.shard_range(parameter)
                gradient = self._layout.partitions[group].grad
                assert gradient is not None
                shards[parameter] = gradient.view(-1).narrow(0, start, length)
        return shards

    def shard_range(self, parameter: Tensor) -> tuple[int, int]:
        """As without offload."""
        return self._layout.shard_range(parameter)

    def scale_norms(self, factor: float) -> None:
        """Multiplies the norms that DeepSpeed clips by."""
        for norm in self._optimizer.norm_for_param_grads.values():
            norm.mul_(factor)

    def complete(self) -> None:
        """Copies to the CPU the shards that the last backward did not reach."""
        optimizer = self._optimizer
        ids = [optimizer.get_param_id(p) for p in self.parameters if self.shard_range(p)[1]]
        if set(ids) - set(optimizer.norm_for_param_grads):
            optimizer.finalize_gradient_accumulation_boundary()

    def zero_unreached(self) -> None:
        """Zeros the gradients of the partitions, and DeepSpeed's sums on the CPU."""
        self._layout.zero_unreached()
        sums = getattr(self._optimizer, "accumulated_grads_in_cpu", {})
        for tensor in [*sums.values(), *(flat.grad for flat in self._layout.partitions)]:
            if tensor is not None:
                tensor.zero_()


VRLayout = Replicated | Partitioned | Sharded
"""Layouts whose shards can be taken out after every backward, and scaled by GSNR in the step."""


def layout_of(engine: Any) -> Layout:
    """How this engine divides its gradients."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_has_gradients"):
        return Accumulated(optimizer)
    if engine.zero_optimization():
        kind = Sharded if engine.zero_optimization_partition_weights() else Partitioned
        layout = kind(optimizer, engine.data_parallel_group)
        return Offloaded(layout) if engine.zero_use_cpu_optimizer() else layout
    half_groups = getattr(optimizer, "fp16_groups", None)  # parameters that have float32 copies
    return Replicated(
        _flatten(half_groups or [group["params"] for group in optimizer.param_groups])
    )


def shape_of(parameter: Any) -> torch.Size:
    """The shape of the whole parameter; at stage 3 it is empty between two uses."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _flatten(groups: Iterable[Sequence[Any]]) -> list[Any]:
    return [each for group in groups for each in group]
