"""A row of metrics.jsonl."""


def row(step, *, batch=32, accuracy=None, **changes):
    values = {
        "schema": 2,
        "step": step,
        "epoch": 0,
        "samples": step * batch,
        "batch_size": batch,
        "micro_batches": 4,
        "loss": 2.0 / step,
        "lr": [0.1],
        "signal": 1.0,
        "noise": 96.0,
        "similarity": 0.14,
        "noise_scale": 96.0,
        "skipped": False,
        "next_batch": batch,
        "reason": "fixed",
        "scores": accuracy and {"test accuracy, %": 100 * accuracy},
        "seconds": step / 10,
    }
    return {**values, **changes}
