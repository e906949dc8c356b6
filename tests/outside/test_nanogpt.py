"""nanoGPT's loop: batches from get_batch(), the learning rate set by hand at each step."""

import re
from difflib import ndiff
from math import sqrt
from pathlib import Path

import pytest
import torch

from script_edits import edited
from torchrun import alone, torchrun

SCRIPT = Path(__file__).parent / "scripts" / "nanogpt.py"
BASE = 32  # samples of a step

FIXED = """
 import torch
+import bigbatch as bb
...
 # training loop
-X, Y = get_batch("train")
+train = bb.AdaptiveBatch(model, optimizer, lambda: get_batch("train"), policy=bb.Fixed(32),
+    micro_batch=batch_size, scheduler=get_lr if decay_lr else None, scaler=scaler)
+if init_from == "resume":
+    train.load_state_dict(checkpoint["train"])
 raw_model = model.module if ddp else model
-while True:
+for step in train:
     # determine and set the learning rate for this iteration
-    lr = get_lr(iter_num) if decay_lr else learning_rate
-    for param_group in optimizer.param_groups:
-        param_group["lr"] = lr
+    lr = optimizer.param_groups[0]["lr"]
...
                     "optimizer": optimizer.state_dict(),
+                    "train": train.state_dict(),
...
-    for micro_step in range(gradient_accumulation_steps):
-        if ddp:
-            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
+    for X, Y in step:
         with ctx:
             _, loss = model(X, Y)
-            loss = loss / gradient_accumulation_steps
-        X, Y = get_batch("train")
-        scaler.scale(loss).backward()
+        step.backward(loss)
...
-    scaler.step(optimizer)
-    scaler.update()
+    record = step.update()
...
-        lossf = loss.item() * gradient_accumulation_steps
+        lossf = record.loss
...
-    if iter_num > max_iters:
+    if train.base_step > max_iters:
"""
GROWING = (
    FIXED.replace("bb.Fixed(32)", 'bb.Schedule("32, x2 every 256 samples up to 256")')
    + """\
...
     iter_num += 1
+    if master_process:
+        print("update", record.batch_size, record.samples, record.lr[0])
"""
)
# the evaluation draws from the generator of the batches, and a resumed run evaluates once more
APART = (
    GROWING
    + """\
...
 def estimate_loss():
     out = {}
+    before = torch.get_rng_state()
...
     model.train()
+    torch.set_rng_state(before)
"""
)


def train(folder, edit="", *options, ranks=1):
    """What the script prints after the edit, its warnings, and the final weights."""
    folder.mkdir(exist_ok=True)
    script = edited(SCRIPT, edit, folder) if edit else SCRIPT
    command = [script, folder, *options]
    run = alone(*command) if ranks == 1 else torchrun(ranks, *command)
    assert 0 == run.returncode, run.stderr
    warnings = re.findall(r"\w+Warning: (.*)", run.stderr)
    return run.stdout, warnings, torch.load(folder / "final.pt")


def rates_of(output):
    """The rate that the loop has set at each iteration."""
    return [float(lr) for lr in re.findall(r"iter \d+: loss \S+, lr (\S+)", output)]


def updates_of(output):
    """(batch size, samples after it, learning rate) of each update."""
    found = re.findall(r"update (\d+) (\d+) (\S+)", output)
    return [(int(size), int(samples), float(lr)) for size, samples, lr in found]


def test_no_more_than_fifteen_lines_leave_and_come(tmp_path):
    texts = [path.read_text().splitlines() for path in (SCRIPT, edited(SCRIPT, FIXED, tmp_path))]
    kinds = [line[0] for line in ndiff(*texts)]
    assert (15, 13) == (kinds.count("-"), kinds.count("+"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fixed_batch_ends_with_the_weights_of_the_script(tmp_path, ranks):
    expected_output, _, expected = train(tmp_path / "script", ranks=ranks)
    output, warnings, actual = train(tmp_path / "fixed", FIXED, ranks=ranks)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert rates_of(expected_output) == rates_of(output)
    assert [] == warnings


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_rate_of_a_growing_batch_follows_the_samples(tmp_path, ranks):
    expected, _, _ = train(tmp_path / "script")
    output, warnings, _ = train(tmp_path / "growing", GROWING, ranks=ranks)
    updates, by_iteration = updates_of(output), rates_of(expected)
    assert [32] * 8 + [64] * 4 + [128] * 2 + [256] == [size for size, _, _ in updates]
    base_steps = [(samples - size) // BASE for size, samples, _ in updates]
    assert [by_iteration[step] for step in base_steps] == rates_of(output)
    for (size, _, in_force), rate in zip(updates, rates_of(output), strict=True):
        assert pytest.approx(rate * sqrt(size / BASE), rel=1e-4) == in_force
    assert [] == warnings


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    output, _, expected = train(tmp_path, APART)
    resumed, warnings, actual = train(tmp_path, APART, "--init_from=resume")
    assert updates_of(output)[8:] == updates_of(resumed)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert [] == warnings


def test_ranks_resume_from_the_checkpoint_of_one_at_its_rate(tmp_path):
    output, _, _ = train(tmp_path, GROWING, ranks=2)
    resumed, warnings, _ = train(tmp_path, GROWING, "--init_from=resume", ranks=2)
    assert updates_of(output)[8:] == updates_of(resumed)
    assert rates_of(output)[8:] == rates_of(resumed)
    assert all("random states are not those of" in warning for warning in warnings)
    assert warnings


@pytest.mark.parametrize("passed", ["get_lr if decay_lr else None", "None"])
def test_lines_that_still_set_the_rate_by_the_number_of_steps_are_warned_of(tmp_path, passed):
    edit = GROWING.replace("get_lr if decay_lr else None", passed)
    left = re.sub(
        r"-    lr = get.*\n(-.*\n)+\+.*",
        "     lr = get_lr(iter_num) if decay_lr else learning_rate",
        edit,
    )
    _, (warning,), _ = train(tmp_path, left)
    assert "leave out the lines that set it" in warning
