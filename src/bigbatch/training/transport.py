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
    """Raises SettingError for an optimizer or batch sizes with which `transported` cannot help."""
    name, problem = type(optimizer).__name__, ""
    if is_vr:
        problem = f"{name}, whose own averages (beta3, those of GSNR) would not follow"
    for number, group in enumerate(optimizer.param_groups):
        betas, decay = group.get("betas"), group.get("weight_decay", 0)
        if betas is None or any(isinstance(beta, Tensor) for beta in betas):
            kind = "no betas" if betas is None else "betas that are tensors"
            problem = problem or f"parameter group {number} of {name} has {kind}"
        elif decay and not _is_decoupled(optimizer, group):
            problem = problem or (
                f"the weight_decay={decay} of {name} is added to the gradient, or does not say "
                "that it is decoupled (decoupled_weight_decay=True in its group)"
            )
    if problem:
        raise SettingError(f"transport=True: {problem}; use AdamW, or leave transport out")
    low, high = -(-base_batch // RANGE), RANGE * base_batch
    if min_batch < low or max_batch is None or max_batch > high:
        raise SettingError(
            f"transport=True: batch sizes from {min_batch} to {max_batch} around base_batch="
            f"{base_batch}; it helps within a factor of {RANGE} (docs/policies.md); pass a policy, "
            f"or a Controller, with min_batch={low} and max_batch={high}"
        )


@contextmanager
def transported(optimizer: Optimizer, ratio: float, lr_factor: float) -> Iterator[None]:
    """Keeps half-lives and weight decay per sample inside the block; restores them afterwards.

        betas <- betas^ratio,    weight decay <- ratio / lr_factor x weight decay

    `lr_factor` is in the learning rate already, so the decay of a step, rate x weight decay, is
    multiplied by `ratio`. A ratio beyond the measured range, such as that of the last samples of an
    epoch, counts as its end.
    """
    ratio = min(max(ratio, 1 / RANGE), RANGE)
    groups = [*optimizer.param_groups]
    saved = [{name: group[name] for name in _TRANSPORTED if name in group} for group in groups]
    try:
        for group in groups:
            betas, decay = group["betas"], group.get("weight_decay", 0)
            group["betas"] = type(betas)(beta**ratio for beta in betas)
            if decay and lr_factor and _is_decoupled(optimizer, group):
                group["weight_decay"] = decay * ratio / lr_factor
        yield
    finally:
        for group, values in zip(groups, saved, strict=True):
            group.update(values)


def _is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a group's weight decay shrinks the weights by rate x decay, past the gradient."""
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))
