"""The exact settings of each trainer for an advised batch size."""

import json
import math

from bigbatch.advisor.batch_advice import BatchAdvice, DeviceAdvice

ADAPTIVE = "bigbatch, measuring"  # the trainer that follows the noise scale
_MOVES = 2.0  # factor of the fastest batch size from which a schedule is worth its line


def lines_to_add(advice: BatchAdvice) -> dict[str, str]:
    """The settings for the advised batch size by trainer, those of the observed one first."""
    row = advice.this_machine
    if row is None or row.batch_size == advice.found.batch_size or not advice.found.is_loaders:
        return {}
    batch, found, ranks = row.batch_size, advice.found, advice.found.ranks
    micro, accumulation = _split(advice, batch // ranks)
    backwards = f"  # and {accumulation} backwards a step" if accumulation > 1 else ""
    rates = {
        name: [f"{lr * advice.lr_factor(batch, name):.3g}" for lr in found.lr.get(name, ())]
        or ["..."]
        for name in found.optimizers
    }
    is_one = len(rates) == 1
    of_optimizers = [f"{'optimizer' if is_one else n} lr={', '.join(r)}" for n, r in rates.items()]
    optimizer = f"bb.Composite({found.composite})" if found.composite else "optimizer"
    accumulate = f"gradient_accumulation_steps={accumulation}"
    arguments = f"per_device_train_batch_size={micro}, {accumulate}"
    if is_one and not found.composite:
        trainer = f"TrainingArguments({arguments}, learning_rate={rates[found.optimizers[0]][0]})"
    else:  # the Trainer's own learning_rate would be that of one optimizer
        lines_of_trainer = [f"TrainingArguments({arguments})", f"optimizers=({optimizer}, None)"]
        trainer = "\n".join([*lines_of_trainer, *of_optimizers])
    loader = f"DataLoader(..., batch_size={micro})"
    deepspeed = {
        "train_batch_size": micro * accumulation * ranks,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    lines = {
        "PyTorch": "\n".join([f"{loader}{backwards}", *of_optimizers]),
        "HF Trainer": trainer,
        "Lightning": f"{loader}\nTrainer(accumulate_grad_batches={accumulation})",
        "DeepSpeed": json.dumps(deepspeed),
        "Megatron-LM": f"--micro-batch-size {micro} --global-batch-size {batch}",
        "bigbatch, a schedule": f'policy=bb.Schedule("{schedule(advice)}")',
    }
    if not advice.observations.coupling:
        lines[ADAPTIVE] = _adaptive_batch(advice, row, optimizer)
    engine = found.engine
    own = "PyTorch" if engine in ("DDP", "FSDP2", "Accelerate") else engine
    return dict(sorted(lines.items(), key=lambda item: item[0] != own))


def _adaptive_batch(advice: BatchAdvice, row: DeviceAdvice, optimizer: str) -> str:
    """A loop that starts at the advised batch size and follows the noise scale within bounds."""
    batch, present = row.batch_size, advice.found.batch_size
    most = max(present, row.high or batch)
    rule = "adascale" if advice.found.optimizers == ["SGD"] else "sqrt"
    return (
        f"train = bb.AdaptiveBatch(\n    model, {optimizer}, loader,\n"
        f"    policy=bb.Goodput(min_batch={min(present, batch)}, max_batch={most}),\n"
        f'    batch_size={batch}, base_batch={present}, lr_scaling="{rule}",\n)'
    )


def schedule(advice: BatchAdvice) -> str:
    """The batch size in the words of `Schedule`: a ramp if the fastest one has moved by 2."""
    segments = advice.trend.segments
    scales = segments[0].noise_scale, segments[-1].noise_scale
    if all(map(math.isfinite, scales)):
        first, last = (advice.fastest(scale) for scale in scales)
        if last >= _MOVES * first:
            samples = advice.observations.steps * advice.found.batch_size
            return f"{first} to {last} over {samples} samples"
    return f"{advice.batch_size}"


def _split(advice: BatchAdvice, samples: int) -> tuple[int, int]:
    """(samples of a backward, backwards) of a rank, as few equal backwards as memory allows."""
    time = advice.observations.time
    largest = time.largest if time is not None and time.largest else samples
    if advice.observations.coupling:
        largest = advice.found.micro_batch
    micro = next(n for n in range(min(largest, samples), 0, -1) if not samples % n)
    return micro, samples // micro
