"""Rows of metrics.jsonl, and logs that no training has written."""

import json

from bigbatch.log.run_log import settings_json


def write_log(path, rows, settings=None):
    """Writes the folder of a log; returns it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "settings.json").write_bytes(settings_json(settings or {}))
    add_rows(path, rows)
    return path


def add_rows(path, rows):
    """Adds rows to a log."""
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


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
