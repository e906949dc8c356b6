"""A row of metrics.jsonl."""


def row(step, *, batch=32, accuracy=None, **changes):
    values = {
        "schema": 3,
        "step": step,
        "epoch": 0,
        "samples": step * batch,
        "batch_size": batch,
        "target_batch_size": batch,
        "micro_batches": 4,
        "loss": 2.0 / step,
        "lr": [0.1],
        "grad_sqnorm": 1.0,
        "grad_variance": 96.0,
        "similarity": 0.14,
        "noise_scale": 96.0,
        "skipped": False,
        "next_batch_size": batch,
        "next_lr_factor": 1.0,
        "decision_reason": "fixed",
        "metrics": accuracy and {"test accuracy, %": 100 * accuracy},
        "every": 1,
        "elapsed_seconds": step / 10,
    }
    return {**values, **changes}
