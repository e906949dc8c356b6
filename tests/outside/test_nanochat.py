"""nanochat's loop: Muon and AdamW, the rates of all their groups set by hand at each step."""

import re
from difflib import ndiff
from math import sqrt
from pathlib import Path

import pytest
import torch

from script_edits import edited
from torchrun import alone

SCRIPT = Path(__file__).parent / "scripts" / "nanochat.py"
BASE = 32  # samples of a step

FIXED = """
 import torch
+import bigbatch as bb
...
-x, y = next(train_loader)  # kick off load of the very first batch of data
...
-step = 0
-while True:
-    last_step = step == num_iterations
+optimizer = bb.Composite(*optimizers)
+schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, get_lr_multiplier)
+train = bb.AdaptiveBatch(model, optimizer, lambda: next(train_loader), policy=bb.Fixed(32),
+    micro_batch=device_batch_size, scheduler=schedule)
+for update in train:
+    step = train.base_step
+    last_step = step >= num_iterations
...
-    for micro_step in range(grad_accum_steps):
+    for x, y in update:
         loss = model(x, y)
         train_loss = loss.detach()
-        loss = loss / grad_accum_steps
-        loss.backward()
-        x, y = next(train_loader)
+        update.backward(loss)
     # step the optimizers
-    lrm = get_lr_multiplier(step)
-    for opt in optimizers:
-        for group in opt.param_groups:
-            group["lr"] = group["initial_lr"] * lrm
     muon_momentum = get_muon_momentum(step)
...
-    for opt in optimizers:
-        opt.step()
-    model.zero_grad(set_to_none=True)
+    record = update.update()
     # logging
-    rates = [group["lr"] for opt in optimizers for group in opt.param_groups]
+    rates = record.lr
...
-    step += 1

"""
GROWING = FIXED.replace("bb.Fixed(32)", 'bb.Schedule("32, x2 every 256 samples up to 128")')


def train(folder, edit=""):
    """What the script prints after the edit, its warnings, and the final weights."""
    folder.mkdir(exist_ok=True)
    run = alone(edited(SCRIPT, edit, folder) if edit else SCRIPT, folder)
    assert 0 == run.returncode, run.stderr
    lines = re.findall(r"step (\d+) (\S+) (\S+) (\S+)", run.stdout)
    steps = [(int(step), [*map(float, rates)]) for step, *rates in lines]
    warnings = re.findall(r"\w+Warning: (.*)", run.stderr)
    return steps, warnings, torch.load(folder / "final.pt")


def test_twelve_lines_come_and_seventeen_leave(tmp_path):
    texts = [path.read_text().splitlines() for path in (SCRIPT, edited(SCRIPT, FIXED, tmp_path))]
    kinds = [line[0] for line in ndiff(*texts)]
    assert (17, 12) == (kinds.count("-"), kinds.count("+"))


def test_a_fixed_batch_ends_with_the_weights_of_the_script(tmp_path):
    expected_steps, _, expected = train(tmp_path / "script")
    steps, warnings, actual = train(tmp_path / "fixed", FIXED)
    assert expected_steps == steps
    assert 24 == len(steps)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert [] == warnings


def test_the_rates_of_a_growing_batch_follow_the_samples(tmp_path):
    by_iteration = dict(train(tmp_path / "script")[0])
    steps, warnings, _ = train(tmp_path / "growing", GROWING)
    assert [*range(8), 8, 10, 12, 14, 16, 20] == [step for step, _ in steps]
    for (step, rates), size in zip(steps, [32] * 8 + [64] * 4 + [128] * 2, strict=True):
        assert pytest.approx([rate * sqrt(size / BASE) for rate in by_iteration[step]]) == rates
    assert [] == warnings


def test_lines_that_still_set_the_rates_are_warned_of(tmp_path):
    lines = re.search(r"-    lrm = .*\n(-.*\n){3}", GROWING)[0]
    left = GROWING.replace(lines, re.sub("^-", " ", lines, flags=re.MULTILINE))
    _, (warning,), _ = train(tmp_path, left.replace("train.base_step", "train.steps"))
    assert "leave out the lines that set it" in warning
