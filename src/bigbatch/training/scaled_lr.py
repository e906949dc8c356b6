"""A factor of the learning rate that is in force during a step."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from bigbatch.errors import LoopError, SettingError
from bigbatch.optim.learning_rates import RATE, rates_of


def scale_lr(optimizer: Optimizer, factor: float) -> AbstractContextManager[list[float]]:
    """Multiplies every group's learning rate inside the block and restores it afterwards.

        lr <- factor lr,   and after the block lr as it was, to the last bit

    Schedulers never see the factor. A tensor stays the same tensor, as compiled and captured steps
    need; one that several groups share is multiplied once. A factor of 1 changes nothing, so an
    optimizer that sets learning rates inside its `step()` needs `lr_scaling=None`.

    Returns:
        The learning rates in force, one per group; nan for a group without one.
    Raises:
        SettingError: another factor, one for a group without a learning rate, or a learning rate
            that is not a finite number of at least 0.
        LoopError: at the block's end, if a learning rate was set inside it; the old ones are
            restored.
    """
    factor = float(factor)
    if not (math.isfinite(factor) and factor >= 0):
        raise SettingError(f"the learning-rate factor {factor} is not finite, or negative")
    return nullcontext(rates_of(optimizer)) if factor == 1 else _scaled(optimizer, factor)


@contextmanager
def _scaled(optimizer: Optimizer, factor: float) -> Iterator[list[float]]:
    groups = list(optimizer.param_groups)
    for number, group in enumerate(groups):
        if group.get("lr") is None:
            raise SettingError(
                f"parameter group {number} has no learning rate to scale; give it lr=, or pass "
                "lr_scaling=None"
            )
    with restored(groups, "lr") as tensors:
        for tensor in tensors:
            tensor.detach().mul_(factor)
        for group in groups:
            group["lr"] = lr * factor if (lr := group["lr"]) in RATE else lr
        rates = rates_of(optimizer)
        scaled = [(group["lr"], times_written(group["lr"])) for group in groups]
        yield rates
        _require_unchanged(groups, scaled, rates)


@contextmanager
def restored(groups: list[dict[str, Any]], *names: str) -> Iterator[list[Tensor]]:
    """Restores these settings of the groups afterwards; yields those that are tensors, each once.

    A tensor stays the same tensor, as compiled and captured steps need.
    """
    saved = [(group, {name: group[name] for name in names if name in group}) for group in groups]
    leaves = tree_leaves([values for _, values in saved])
    tensors = {leaf: leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)}
    try:
        yield [*tensors]
    finally:
        for group, values in saved:
            group.update(values)
        for tensor, value in tensors.items():
            tensor.detach().copy_(value)


def _require_unchanged(
    groups: list[dict[str, Any]], scaled: list[tuple[float | Tensor, int]], rates: list[float]
) -> None:
    """Compares values only after a write, as reading them from a GPU would wait."""
    for number, (group, (lr, writes), rate) in enumerate(zip(groups, scaled, rates, strict=True)):
        present = group.get("lr")
        written = present is not lr or times_written(lr) != writes
        if (
            written
            and (other := present.item() if isinstance(present, Tensor) else present) != rate
        ):
            raise LoopError(
                f"the learning rate of parameter group {number} was set to {other} during the "
                f"step, where AdaptiveBatch had set {rate}; set it between the steps, or pass "
                "lr_scaling=None"
            )


def times_written(lr: float | Tensor | None) -> int:
    """Number of in-place writes to a rate that autograd has seen; 0 for a number."""
    return lr._version if isinstance(lr, Tensor) else 0
