"""Memory and operations of a training, estimated from shapes alone."""

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

from bigbatch.optim.micro_batch_optimizer import micro_batch_optimizer
from bigbatch_recipes.build_optimizer import build_optimizer
from bigbatch_recipes.recipe import Batch, Recipe
from bigbatch_recipes.settings import Settings
from bigbatch_recipes.train_run import autocast
from bigbatch_recipes.validate import build_on_meta_device

Shape = tuple[int, ...]
Parameters = dict[str, nn.Parameter]

_FLOAT64_BYTES, _BFLOAT16_BYTES = 8, 2
_TOY_SIZE = 24  # elements of the small parameter that stands for each of the model's


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank that keeps the whole model.

    Args:
        parameters: number of weights; shared ones count once.
        tensors: number of parameter tensors that are trained.
        weights: bytes of parameters and buffers.
        gradients: bytes of all gradients.
        state: bytes of the optimizer's state_dict: momenta, a VR optimizer's average of r.
        second_moment: bytes of a VR optimizer's M2; 0 without one.
        m2_sent: bytes of M2 as a rank sends it to the others: bfloat16, unless it is float64.
        sums: bytes of the gradient sums that a VR optimizer keeps in addition to `.grad`, in the
            first step and in later ones; 0 with several ranks or DeepSpeed.
        sample: bytes of one sample as the model receives it.
        activations: bytes that the forward of a micro-batch keeps for its backward, with the
            kernels of a CPU; None if the shapes depend on the data.
        flops: operations of one sample, forward and backward, in matrix products and convolutions
            alone; None if the shapes depend on the data.
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
    """Memory of the recipe's model, optimizer and loss, on so many ranks.

    Raises:
        SettingError: the settings cannot work.
    """
    model = build_on_meta_device(recipe, settings)
    activations, flops = _trace_micro_batch(recipe, settings, model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = _trace_optimizer(settings, trained, recipe.without_vr(settings, model))
    has_own_sums = ranks == 1 and settings.engine != "deepspeed"  # otherwise it reads the engine's
    return MemoryEstimate(
        parameters=sum(p.numel() for p in model.parameters()),
        tensors=len(trained),
        weights=_bytes_of([*model.parameters(), *model.buffers()]),
        gradients=_bytes_of(trained.values()),
        state=optimizer.state,
        second_moment=sum(size * count for size, count in optimizer.m2),
        m2_sent=sum(
            (size if size == _FLOAT64_BYTES else _BFLOAT16_BYTES) * count
            for size, count in optimizer.m2
        ),
        sums=optimizer.sums if has_own_sums else (0, 0),
        sample=_bytes_of(_tensors_in(recipe.example(settings, 1))),
        activations=activations,
        flops=flops,
    )


def count_parameters(recipe: Recipe, settings: Settings) -> int:
    """Number of weights of the model; shared ones count once."""
    return sum(p.numel() for p in build_on_meta_device(recipe, settings).parameters())


class _OnCpu(nn.Module):
    """A model on the meta device, called with tensors on the CPU, where autocast is the same."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = [model]  # in a list it is no submodule, whose tensors would be this one's
        named = [*model.named_parameters(), *model.named_buffers()]
        self.tensors = {name: _to_cpu(x).requires_grad_(x.requires_grad) for name, x in named}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self._model[0], self.tensors, args, kwargs)


def _trace_micro_batch(
    recipe: Recipe, settings: Settings, model: nn.Module
) -> tuple[int | None, int | None]:
    """(bytes saved for the backward, flops of a sample)."""
    from torch._subclasses.fake_tensor import (  # imports much of the compiler
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

    example = recipe.example(settings, settings.micro_batch)
    saved: dict[StorageWeakRef, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[_storage_of(tensor)] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with FakeTensorMode(), FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        cpu_model = _OnCpu(model)
        batch = tree_map(lambda x: _to_cpu(x) if isinstance(x, Tensor) else x, example)
        inputs = {_storage_of(x) for x in [*cpu_model.tensors.values(), *_tensors_in(batch)]}
        try:
            with hooks, autocast("cpu", settings.precision):
                loss = recipe.loss(settings)(cpu_model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        except (DataDependentOutputException, DynamicOutputShapeException):
            return None, None
    activations = [tensor for storage, tensor in saved.items() if storage not in inputs]
    saved_bytes = sum(tensor.untyped_storage().nbytes() for tensor in activations)
    return saved_bytes, counter.get_total_flops() // settings.micro_batch


def _attention(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    """Flops of the two products of the CPU's own kernel; torch counts those of other kernels."""
    *heads, queries, width = query
    return 2 * math.prod(heads) * queries * key[-2] * (width + value[-1])


def _attention_backward(_: Shape, *shapes: Any, **__: object) -> int:
    """Twice the forward's, as of any product; the recomputed first product is not counted."""
    return 2 * _attention(*shapes)


_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@dataclass(frozen=True)
class _OptimizerMemory:
    """Memory of an optimizer.

    Args:
        state: bytes of its state_dict.
        m2: bytes of an element and number of elements of each M2.
        sums: bytes of a VR optimizer's own gradient sums, in the first step and in the second.
    """

    state: int
    m2: list[tuple[int, int]]
    sums: tuple[int, int]


def _trace_optimizer(
    settings: Settings, trained: Parameters, without_vr: frozenset[str]
) -> _OptimizerMemory:
    """Measured after two real steps of small parameters that stand for the model's."""
    toys = {
        name: nn.Parameter(
            torch.zeros(*[1] * (p.ndim - 1), *[_TOY_SIZE] * (p.ndim > 0), dtype=p.dtype)
        )
        for name, p in trained.items()
    }
    with warnings.catch_warnings(action="ignore"):  # two micro-batches are few
        optimizer = build_optimizer(settings, toys.items(), without_vr)
        first = _sums_after_step(settings, optimizer, toys, trained)
        later = _sums_after_step(settings, optimizer, toys, trained)
    states = optimizer.state_dict()["state"]
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    state = sum(
        x.element_size() * (trained[name].numel() if x.numel() == _TOY_SIZE else x.numel())
        for number, name in enumerate(names)
        for x in _tensors_in(states.get(number, {}))
    )
    if (reader := micro_batch_optimizer(optimizer)) is None:
        return _OptimizerMemory(state, [], (0, 0))
    m2 = [
        (reader.gsnr_state.moments.sum_and_m2(toys[name])[1].element_size(), trained[name].numel())
        for name in _names_with_vr(optimizer)
    ]
    return _OptimizerMemory(state, m2, (first, later))


def _sums_after_step(
    settings: Settings, optimizer: Optimizer, toys: Parameters, trained: Parameters
) -> int:
    """Bytes of a VR optimizer's own gradient sums in a step of two backwards."""
    optimizer.zero_grad()
    for power in (1, 2):
        losses = [
            (toy * torch.linspace(1, 2, toy.numel()).view_as(toy) ** power).sum()
            for toy in toys.values()
        ]
        torch.autograd.backward(losses)
    if settings.clip or settings.precision == "float16":  # clipping and GradScaler write to .grad
        nn.utils.clip_grad_norm_(toys.values(), settings.clip or 1.0)
    optimizer.step()
    if (reader := micro_batch_optimizer(optimizer)) is None:
        return 0
    moments = reader.gsnr_state.moments
    return sum(
        moments.sum_and_m2(toys[name])[0].element_size() * trained[name].numel()
        for name in _names_with_vr(optimizer)
        if moments.reached_and_own_sum(toys[name])[1] is not None
    )


def _names_with_vr(optimizer: Optimizer) -> list[str]:
    """Names of the parameters that the optimizer scales by GSNR."""
    groups = optimizer.param_groups
    return [name for group in groups if group["vr"] for name in group["param_names"]]


def _to_cpu(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


def _storage_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _tensors_in(batch: Batch) -> list[Tensor]:
    return [x for x in tree_leaves(batch) if isinstance(x, Tensor)]


def _bytes_of(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
