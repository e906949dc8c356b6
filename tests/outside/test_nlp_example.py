"""accelerate's nlp_example: a loop of one's own, whose step becomes one of an AdaptiveBatch."""

import re
from pathlib import Path

import pytest
import torch

from edits import edited, typed
from followed import unfollowed
from torchrun import alone, torchrun

SCRIPT = Path(__file__).parent / "scripts" / "nlp_example.py"
SAMPLES, EPOCHS, MICRO = 480, 3, 8
LOWEST, HIGHEST, TARGET = 8, 48, 0.5

ADAPTIVE = f"""
 import torch
+import bigbatch as bb
+from bigbatch.connect.accelerate import adaptive_batch
 from accelerate import Accelerator
...
+    policy = bb.SimiGrad(target={TARGET}, min_batch={LOWEST}, max_batch={HIGHEST})
+    train = adaptive_batch(
+        accelerator, model, optimizer, train_dataloader, scheduler=lr_scheduler, policy=policy
+    )
     for epoch in range(num_epochs):
         model.train()
-        for step, batch in enumerate(train_dataloader):
-            outputs = model(**batch)
-            loss = outputs.loss
-            accelerator.backward(loss)
-            optimizer.step()
-            lr_scheduler.step()
-            optimizer.zero_grad()
+        for step in train:
+            for batch in step:
+                outputs = model(**batch)
+                step.backward(outputs.loss)
+            done = step.update()
+            accelerator.print("update", done.batch_size, done.samples, done.similarity, done.loss)
"""
FIXED = ADAPTIVE.replace(
    f"bb.SimiGrad(target={TARGET}, min_batch={LOWEST}, max_batch={HIGHEST})", f"bb.Fixed({MICRO})"
)


def train(script, out, ranks=1):
    """Of each epoch its accuracy; (batch, samples, similarity, loss) of each update; last rate."""
    command = [script, "--cpu", f"--output_file={out}"]
    run = alone(*command) if ranks == 1 else torchrun(ranks, *command)
    assert 0 == run.returncode, run.stderr
    accuracies = [float(said) for said in re.findall(r"accuracy ([\d.]+) of 120", run.stdout)]
    updates = re.findall(r"update (\d+) (\d+) (\S+) (\S+)", run.stdout)
    rows = [(int(size), int(so_far), *map(float, rest)) for size, so_far, *rest in updates]
    (rate,) = re.findall(r"last learning rate ([\d.]+)", run.stdout)
    return accuracies, rows, float(rate)


def test_the_edit_is_twelve_lines():
    assert 12 == typed(ADAPTIVE)


def test_a_fixed_batch_trains_as_the_script_does(tmp_path):
    """Two micro-batches of 4 for one of 8, in float32: rounding, and what Adam makes of it."""
    expected, _, _ = train(SCRIPT, tmp_path / "plain")
    actual, _, _ = train(edited(SCRIPT, FIXED, tmp_path), tmp_path / "fixed")
    assert expected == pytest.approx(actual, abs=0.02)
    plain, ours = torch.load(tmp_path / "plain"), torch.load(tmp_path / "fixed")
    for name, weight in plain.items():
        torch.testing.assert_close(weight, ours[name], rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_learns_with_batches_that_follow_the_policy(tmp_path, ranks):
    """The schedule, of as many steps as the loader had before `prepare`, ends at its end."""
    script = edited(SCRIPT, ADAPTIVE, tmp_path)
    accuracies, updates, rate = train(script, tmp_path / "weights", ranks)
    assert EPOCHS * SAMPLES == updates[-1][1]  # each sample once a pass
    rows = [row[:3] for row in updates]
    kept = {"samples": SAMPLES, "target": TARGET, "bounds": (LOWEST, HIGHEST), "grid": MICRO}
    assert [] == unfollowed(rows, **kept)
    assert len({size for size, _, _ in rows}) > 2
    assert EPOCHS == len(accuracies)
    assert accuracies[-1] > 0.8  # .5 by a guess
    assert updates[-1][3] < updates[0][3] / 2
    assert 0 == pytest.approx(rate, abs=1e-4)  # of 2e-3: a last base batch may not be full
