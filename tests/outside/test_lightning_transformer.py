"""Lightning's own transformer: one callback more, with validation, clipping and checkpoints."""

import argparse
import csv
import inspect
from itertools import accumulate
from math import log, nan
from pathlib import Path

import pytest
import torch

from script_edits import edited, typed
from simigrad_rule import Rule, assert_followed
from torchrun import alone

SCRIPT = Path(__file__).parent / "scripts" / "lightning_transformer.py"
SAMPLES, WORDS = 256, 2466  # of the text below, which Python brings: trained on; different ones
EPOCHS, MICRO = 2, 4
LOWEST = 16
RULE = Rule(target=0.5, lowest=LOWEST, highest=64)

ADAPTIVE = f"""
 import torch
+import bigbatch as bb
+from bigbatch.integrations.lightning import AdaptiveBatchCallback
 from lightning.pytorch.callbacks import ModelCheckpoint
...
-        callbacks=[ModelCheckpoint(args.data / "saved", save_top_k=-1, filename="{{epoch}}")],
+        callbacks=[
+            ModelCheckpoint(args.data / "saved", save_top_k=-1, filename="{{epoch}}"),
+            AdaptiveBatchCallback(
+                {RULE},
+                batch_size={LOWEST},
+            ),
+        ],
"""
EVERY_STEP = ADAPTIVE.replace(str(RULE), RULE.controller(LOWEST)).replace(
    f"batch_size={LOWEST}", "every=1"
)
FIXED = ADAPTIVE.replace(str(RULE), f"bb.Fixed({LOWEST})").replace(
    f"batch_size={LOWEST}", "lr_scaling=None"
)
ACCUMULATED = f"""
         gradient_clip_val=0.25,
+        accumulate_grad_batches={LOWEST // MICRO},
"""


def train(folder, script, *options, devices=1):
    """What was logged, a dictionary a line."""
    folder.mkdir(exist_ok=True)
    (folder / "wikitext-2.txt").write_text(inspect.getsource(argparse))
    settings = {"data": folder, "max_epochs": EPOCHS, "devices": devices}
    given = [f"--{name}={value}" for name, value in settings.items()]
    run = alone(script, *given, *options)
    assert 0 == run.returncode, run.stderr
    *_, last = sorted(folder.rglob("metrics.csv"), key=lambda file: file.stat().st_mtime)
    with last.open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def column(rows, name):
    return [row[name] for row in rows if name in row]


def assert_same_weights(one, other, **tolerance):
    expected, actual = (torch.load(folder / "weights.pt") for folder in (one, other))
    for name, weight in expected.items():
        torch.testing.assert_close(weight, actual[name], **tolerance)


def test_the_edit_is_nine_lines():
    assert 9 == typed(ADAPTIVE)


def test_a_fixed_batch_trains_as_accumulation_does(tmp_path):
    """With the same dropout; in float32, where a loss is divided in another order."""
    plain, fixed = tmp_path / "plain", tmp_path / "fixed"
    expected = train(plain, edited(SCRIPT, ACCUMULATED, tmp_path))
    actual = train(fixed, edited(SCRIPT, FIXED, tmp_path))
    for name in ("val_loss", "test_loss"):
        assert column(expected, name) == pytest.approx(column(actual, name), rel=1e-4)
    assert_same_weights(plain, fixed, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_it_learns_with_batches_that_follow_the_policy(tmp_path, devices):
    logged = train(tmp_path / "run", edited(SCRIPT, EVERY_STEP, tmp_path), devices=devices)
    sizes = [int(size) for size in column(logged, "bigbatch/batch_size")]
    similar = [row.get("bigbatch/similarity", nan) for row in logged if "bigbatch/loss" in row]
    rows = list(zip(sizes, accumulate(sizes), similar, strict=True))
    grid = MICRO * devices
    assert_followed(rows, RULE, samples=SAMPLES, passes=EPOCHS, grid=grid, sizes=3)
    first, *_, last = column(logged, "val_loss")
    assert log(WORDS) - 0.5 > first > last  # than a predict's
    assert log(WORDS) - 0.5 > column(logged, "test_loss")[0]


def test_a_resumed_training_ends_as_if_never_interrupted(tmp_path):
    script = edited(SCRIPT, EVERY_STEP, tmp_path)
    train(tmp_path / "whole", script)
    saved = tmp_path / "whole" / "saved" / "epoch=0.ckpt"
    train(tmp_path / "resumed", script, f"--ckpt_path={saved}")
    assert_same_weights(tmp_path / "whole", tmp_path / "resumed", rtol=0, atol=0)
