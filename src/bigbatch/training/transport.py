"""Half-lives in samples: betas, weight decay and weight averages that follow the batch size."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import AdamW, Optimizer

from bigbatch.errors import SettingError
from bigbatch.setting_types import Count, Share, checked

_TRANSPORTED = "betas", "weight_decay"

RANGE = 4  # the measured range: B / B_base from 1/4 to 4


@checked
def ema_decay(decay: Share, batch_size: Count, base_batch: Count) -> float:
    """The decay of an exponential average that keeps its half-life in samples.

        decay_B = decay^(B / B_base)

    One update of a step of B samples then forgets as much as B / B_base updates of base batches.

    Args:
        decay: decay for an update after every step of `base_batch` samples.
        batch_size: B, samples of the step that the average is updated after.
        base_batch: B_base, samples of the step that `decay` was chosen for.
    Raises:
        SettingError: a decay outside [0, 1), or a size below 1.
    Source:
        Marek et al. 2025 (arXiv 2507.07101), for Adam's beta2.
    Example:
        >>> ema_decay(0.5, batch_size=512, base_batch=128)
        0.0625
    """
    return float(decay ** (batch_size / base_batch))


def require_transportable(
    optimizer: Optimizer, base_batch: int, min_batch: int, max_batch: int | None, *, is_vr: bool
) -> None:
    """Checks that `transported` knows what to do with an optimizer and with these batch sizes.

    Raises:
        SettingError: the optimizer has no betas, L2 weight decay, or momenta of its own; or the
            bounds are wider than what was measured.
    """
    name = type(optimizer).__name__
    if is_vr:
        raise SettingError(
            f"transport=True with {name}, whose own averages would not follow (beta3, and those of "
            "GSNR); leave transport out, or pass the base optimizer"
        )
    for number, group in enumerate(optimizer.param_groups):
        if "betas" not in group:
            raise SettingError(
                f"transport=True needs betas, and parameter group {number} of {name} has none; use "
                "AdamW or another optimizer that has them, or leave transport out"
            )
        decay = group.get("weight_decay", 0)
        if decay and not _is_decoupled(optimizer, group):
            raise SettingError(
                f"transport=True: the weight_decay={decay} of {name} is added to the gradient, or "
                "does not say that it is decoupled (decoupled_weight_decay=True in its group); use "
                "AdamW, or weight_decay=0"
            )
    low, high = -(-base_batch // RANGE), RANGE * base_batch
    if min_batch < low or max_batch is None or max_batch > high:
        raise SettingError(
            f"transport=True: batch sizes from {min_batch} to {max_batch} around base_batch="
            f"{base_batch}; it helps within a factor of {RANGE}, and at 16 it was worse than none "
            "in some trainings (.0718 for .0538, docs/policies.md); pass a policy, or a "
            f"Controller, with min_batch={low} and max_batch={high}"
        )


@contextmanager
def transported(optimizer: Optimizer, ratio: float, lr_factor: float) -> Iterator[None]:
    """Keeps half-lives and weight decay per sample inside the block; restores them afterwards.

        betas <- betas^ratio,    weight decay <- ratio / lr_factor x weight decay

    `lr_factor` is in the learning rate already, so the decay of a step, rate x weight decay, is
    multiplied by `ratio`. A ratio beyond the measured range, such as that of the last samples of an
    epoch, counts as its end. A tensor stays the same tensor.
    """
    ratio = min(max(ratio, 1 / RANGE), RANGE)
    groups = [group for group in optimizer.param_groups if "betas" in group]
    saved = [{name: group[name] for name in _TRANSPORTED if name in group} for group in groups]
    betas = {b: b.detach().clone() for g in groups for b in g["betas"] if isinstance(b, Tensor)}
    try:
        for tensor in betas:
            tensor.detach().pow_(ratio)
        for group in groups:
            pair, decay = group["betas"], group.get("weight_decay", 0)
            group["betas"] = type(pair)(b if isinstance(b, Tensor) else b**ratio for b in pair)
            if decay and lr_factor and _is_decoupled(optimizer, group):
                group["weight_decay"] = decay * ratio / lr_factor
        yield
    finally:
        for group, values in zip(groups, saved, strict=True):
            group.update(values)
        for tensor, value in betas.items():
            tensor.detach().copy_(value)


def _is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a group's weight decay shrinks the weights by rate x decay, past the gradient."""
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))
