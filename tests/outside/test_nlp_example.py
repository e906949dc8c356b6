"""accelerate's nlp_example: a loop of one's own, whose step becomes one of an AdaptiveBatch."""

import re
from pathlib import Path

import pytest
import torch

from script_edits import STEPS, edited, typed, updates_of
from simigrad_rule import Rule, assert_followed
from torchrun import alone, torchrun

SCRIPT = Path(__file__).parent / "scripts" / "nlp_example.py"
SAMPLES, EPOCHS, MICRO = 480, 3, 8
RULE = Rule(target=0.5, lowest=8, highest=48)

ADAPTIVE = f"""
 import torch
+import bigbatch as bb
+from bigbatch.integrations.accelerate import adaptive_batch
 from accelerate import Accelerator
...
+    policy = {RULE}
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
{STEPS.replace("print", "accelerator.print")}"""
EVERY_STEP = ADAPTIVE.replace("policy=policy", "policy=policy, every=1").replace(
    str(RULE), RULE.controller(f"{MICRO} * accelerator.num_processes")
)
FIXED = ADAPTIVE.replace(str(RULE), f"bb.Fixed({MICRO})")


def train(script, out, ranks=1):
    """Of each epoch its accuracy; (batch, samples, similarity, loss) of each update; last rate."""
    command = [script, "--cpu", f"--output_file={out}"]
    run = alone(*command) if ranks == 1 else torchrun(ranks, *command)
    assert 0 == run.returncode, run.stderr
    accuracies = [float(said) for said in re.findall(r"accuracy ([\d.]+) of 120", run.stdout)]
    (rate,) = re.findall(r"last learning rate ([\d.]+)", run.stdout)
    return accuracies, updates_of(run.stdout), float(rate)


def test_the_edit_is_twelve_lines():
    assert 12 == typed(ADAPTIVE)


def test_a_fixed_batch_trains_as_the_script_does(tmp_path):
    """A measured step has micro-batches for one of 8: rounding, and what Adam makes of it."""
    expected, _, _ = train(SCRIPT, tmp_path / "plain")
    actual, _, _ = train(edited(SCRIPT, FIXED, tmp_path), tmp_path / "fixed")
    assert expected == pytest.approx(actual, abs=0.02)
    plain, ours = torch.load(tmp_path / "plain"), torch.load(tmp_path / "fixed")
    for name, weight in plain.items():
        torch.testing.assert_close(weight, ours[name], rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_learns_with_batches_that_follow_the_policy(tmp_path, ranks):
    """The schedule, of as many steps as the loader had before `prepare`, ends at its end."""
    script = edited(SCRIPT, EVERY_STEP, tmp_path)
    accuracies, updates, rate = train(script, tmp_path / "weights", ranks)
    rows = [row[:3] for row in updates]
    assert_followed(rows, RULE, samples=SAMPLES, passes=EPOCHS, grid=MICRO, sizes=3)
    assert EPOCHS == len(accuracies)
    assert accuracies[-1] > 0.8  # .5 by a predict
    assert updates[-1][3] < updates[0][3] / 2
    assert 0 == pytest.approx(rate, abs=1e-4)  # of 2e-3: a last base batch may not be full
