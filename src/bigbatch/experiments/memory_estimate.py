"""What a training keeps and computes, without doing it: shapes alone go through the model."""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from bigbatch.experiments.build_optimizer import build_optimizer
from bigbatch.experiments.recipe import Batch, Recipe
from bigbatch.experiments.settings import Settings
from bigbatch.experiments.train_run import autocast
from bigbatch.experiments.validate import build_on_meta_device
from bigbatch.optim import VarianceReduced

Shape = tuple[int, ...]

_DOUBLE, _BFLOAT = 8, 2  # bytes
_TOY = 24  # weights of a parameter that stands for a larger one


@dataclass(frozen=True)
class MemoryEstimate:
    """Of one rank that keeps all of the model.

    Args:
        parameters: weights, each once where it is shared.
        tensors: parameter tensors that are trained.
        weights: bytes of parameters and buffers.
        gradients: bytes.
        state: bytes of what the optimizer saves: momenta, a VR optimizer's average of r.
        second_moment: bytes of a VR optimizer's M2; 0 without one.
        m2_sent: bytes of the same as a rank hands it to the others: bfloat16, unless float64.
        sums: bytes of the sums of gradients that a VR optimizer keeps next to `.grad`, in the first
            step and in later ones; on one process without DeepSpeed alone.
        sample: bytes of one sample as the model is given it.
        activations: bytes that the forward of a micro-batch keeps for its backward, with the
            kernels of a CPU; None where the shapes depend on the data.
        flops: of one sample, forward and backward, matrix products and convolutions alone; None
            likewise.
    """

    parameters: int
    tensors: int
    weights: int
    gradients: int
    state: int
    second_moment: int
    m2_sent: int
    sums: tuple[int, int]
    sample: int
    activations: int | None
    flops: int | None


def estimate_memory(recipe: Recipe, settings: Settings, ranks: int = 1) -> MemoryEstimate:
    """Of the recipe's model, optimizer and loss, with these settings on so many ranks.

    Raises:
        SettingError: the settings cannot work.
    """
    model = build_on_meta_device(recipe, settings)
    activations, flops = _of_micro_batch(recipe, settings, model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kept = _of_optimizer(settings, trained, recipe.without_vr(settings, model))
    lent = ranks > 1 or settings.engine == "deepspeed"  # there the sums are read where they arise
    return MemoryEstimate(
        parameters=sum(p.numel() for p in model.parameters()),
        tensors=len(trained),
        weights=_bytes([*model.parameters(), *model.buffers()]),
        gradients=_bytes(trained.values()),
        state=kept.state,
        second_moment=sum(size * count for size, count in kept.m2),
        m2_sent=sum((size if size == _DOUBLE else _BFLOAT) * count for size, count in kept.m2),
        sums=(0, 0) if lent else kept.sums,
        sample=_bytes(_tensors(recipe.example(settings, 1))),
        activations=activations,
        flops=flops,
    )


def count_parameters(recipe: Recipe, settings: Settings) -> int:
    """Weights of the model, each once where it is shared."""
    return sum(p.numel() for p in build_on_meta_device(recipe, settings).parameters())


class _Imagined(nn.Module):
    """A model whose tensors are as if they were on the CPU, for whom autocast is the same.

    Args:
        model: on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._called = [model]  # no child, so that its tensors are not ours
        named = [*model.named_parameters(), *model.named_buffers()]
        self.tensors = {name: _here(x).requires_grad_(x.requires_grad) for name, x in named}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self._called[0], self.tensors, args, kwargs)


def _of_micro_batch(
    recipe: Recipe, settings: Settings, model: nn.Module
) -> tuple[int | None, int | None]:
    """(bytes kept for the backward, flops of a sample)."""
    from torch._subclasses.fake_tensor import (  # brings much of the compiler
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

    example = recipe.example(settings, settings.micro_batch)
    kept: dict[StorageWeakRef, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[_place(tensor)] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with FakeTensorMode(), FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counted:
        imagined = _Imagined(model)
        batch = tree_map(lambda x: _here(x) if isinstance(x, Tensor) else x, example)
        given = {_place(x) for x in [*imagined.tensors.values(), *_tensors(batch)]}
        try:
            with hooks, autocast("cpu", settings.precision):
                loss = recipe.loss(settings)(imagined, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        except (DataDependentOutputException, DynamicOutputShapeException):
            return None, None
    own = [tensor for place, tensor in kept.items() if place not in given]
    held_bytes = sum(tensor.untyped_storage().nbytes() for tensor in own)
    return held_bytes, counted.get_total_flops() // settings.micro_batch


def _attention(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    """Of the two products of a CPU's own kernel, which torch counts in any other form."""
    *heads, queries, width = query
    return 2 * math.prod(heads) * queries * key[-2] * (width + value[-1])


def _attention_backward(_: Shape, *given: Any, **__: object) -> int:
    """Twice as many, as of any product; that the kernel forms the first again is not counted."""
    return 2 * _attention(*given)


_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@dataclass(frozen=True)
class _Kept:
    """Bytes that an optimizer keeps.

    Args:
        state: of what it saves.
        m2: of each M2, bytes a weight and how many.
        sums: of a VR optimizer's own sums, in the first step and in the second.
    """

    state: int
    m2: list[tuple[int, int]]
    sums: tuple[int, int]


def _of_optimizer(
    settings: Settings, trained: dict[str, nn.Parameter], without_vr: frozenset[str]
) -> _Kept:
    """Seen after two real steps of toys."""
    toys = {
        name: nn.Parameter(torch.zeros(*[1] * (p.ndim - 1), *[_TOY] * (p.ndim > 0), dtype=p.dtype))
        for name, p in trained.items()
    }
    with warnings.catch_warnings(action="ignore"):  # of two micro-batches being few
        optimizer = build_optimizer(settings, toys.items(), without_vr)
        first = _sums_after_a_step(settings, optimizer, toys, trained)
        later = _sums_after_a_step(settings, optimizer, toys, trained)
    packed = optimizer.state_dict()["state"]
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    state = sum(
        value.element_size() * (trained[name].numel() if value.numel() == _TOY else value.numel())
        for number, name in enumerate(names)
        for value in packed.get(number, {}).values()
        if isinstance(value, Tensor)
    )
    if not isinstance(optimizer, VarianceReduced):
        return _Kept(state, [], (0, 0))
    m2 = [
        (optimizer.moments.of(toys[name])[1].element_size(), trained[name].numel())
        for name in _with_vr(optimizer)
    ]
    return _Kept(state, m2, (first, later))


def _sums_after_a_step(
    settings: Settings,
    optimizer: Optimizer,
    toys: dict[str, nn.Parameter],
    trained: dict[str, nn.Parameter],
) -> int:
    """Bytes of the sums that a VR optimizer kept for itself in a step of two backwards."""
    optimizer.zero_grad()
    for power in (1, 2):
        losses = [
            (toy * torch.linspace(1, 2, toy.numel()).view_as(toy) ** power).sum()
            for toy in toys.values()
        ]
        torch.autograd.backward(losses)
    if settings.clip or settings.precision == "float16":  # and its GradScaler: they write to .grad
        nn.utils.clip_grad_norm_(toys.values(), settings.clip or 1.0)
    optimizer.step()
    if not isinstance(optimizer, VarianceReduced):
        return 0
    return sum(
        optimizer.moments.of(toys[name])[0].element_size() * trained[name].numel()
        for name in _with_vr(optimizer)
        if optimizer.moments.seen(toys[name])[1] is not None
    )


def _with_vr(optimizer: VarianceReduced) -> list[str]:
    """The names of what it scales."""
    groups = optimizer.param_groups
    return [name for group in groups if group["vr"] for name in group["param_names"]]


def _here(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


def _place(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _tensors(batch: Batch) -> list[Tensor]:
    return [x for x in tree_leaves(batch) if isinstance(x, Tensor)]


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
