"""The exact settings of each trainer for an advised batch size."""

import json
import math
from dataclasses import dataclass

from bigbatch.advisor.batch_advice import BatchAdvice

_MOVES = 2.0  # factor of the fastest batch size from which a schedule is worth its line


@dataclass(frozen=True)
class SettingLines:
    """Lines to add for one trainer."""

    trainer: str  # its name
    lines: str  # what to write


def lines_to_add(advice: BatchAdvice) -> list[SettingLines]:
    """The settings for the advised batch size, those of the observed trainer first."""
    batch = advice.batch_size
    if batch is None:
        return []
    ranks = advice.found.ranks
    micro, accumulation = _split(advice, batch // ranks)
    rates = [f"{lr * advice.lr_factor(batch):.3g}" for lr in dict.fromkeys(advice.found.lr)]
    rate = rates[0] if rates else "..."
    deepspeed = {
        "train_batch_size": micro * accumulation * ranks,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    found = [
        SettingLines(
            "PyTorch",
            f"DataLoader(..., batch_size={micro})"
            + (f"  # and {accumulation} backwards a step" if accumulation > 1 else "")
            + f"\noptimizer lr={', '.join(rates) or '...'}",
        ),
        SettingLines(
            "HF Trainer",
            f"TrainingArguments(per_device_train_batch_size={micro}, "
            f"gradient_accumulation_steps={accumulation}, learning_rate={rate})",
        ),
        SettingLines(
            "Lightning",
            f"DataLoader(..., batch_size={micro})\nTrainer(accumulate_grad_batches={accumulation})",
        ),
        SettingLines("DeepSpeed", json.dumps(deepspeed)),
        SettingLines("Megatron-LM", f"--micro-batch-size {micro} --global-batch-size {batch}"),
        SettingLines("bigbatch, a schedule", f'policy=bb.Schedule("{schedule(advice)}")'),
        SettingLines(
            "bigbatch, measuring",
            "train = bb.AdaptiveBatch(model, optimizer, loader, policy=bb.Goodput())",
        ),
    ]
    engine = {"DDP": "PyTorch", "FSDP2": "PyTorch", "Accelerate": "PyTorch"}
    own = engine.get(advice.found.engine, advice.found.engine)
    return sorted(found, key=lambda lines: lines.trainer != own)


def schedule(advice: BatchAdvice) -> str:
    """The batch size in the words of `Schedule`: a ramp if the fastest one has moved by 2."""
    first, last = _moves(advice)
    if first == last:
        return f"{advice.batch_size}"
    samples = advice.observations.steps * advice.found.batch_size
    return f"{first} to {last} over {samples} samples"


def _moves(advice: BatchAdvice) -> tuple[int, int]:
    """The fastest batch sizes of the first and last segment, if they differ enough."""
    batch, segments = advice.batch_size or 1, advice.trend.segments
    scales = segments[0].noise_scale, segments[-1].noise_scale
    if len(segments) < 2 or not all(map(math.isfinite, scales)):
        return batch, batch
    first, last = (advice.fastest(scale) for scale in scales)
    return (first, last) if last >= _MOVES * first else (batch, batch)


def _split(advice: BatchAdvice, samples: int) -> tuple[int, int]:
    """(samples of a backward, backwards) of a rank, as few equal backwards as memory allows."""
    time = advice.observations.time
    largest = time.largest if time is not None and time.largest else samples
    micro = next(n for n in range(min(largest, samples), 0, -1) if not samples % n)
    return micro, samples // micro
