"""peft's LoRA in a loop of one's own: adapters and the head are trained, and measured, alone."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("peft")

from script_edits import STEPS, edited, typed, updates_of
from simigrad_rule import Rule, assert_followed
from torchrun import alone

SCRIPT = Path(__file__).parent / "scripts" / "peft_lora.py"
SAMPLES, EPOCHS, MICRO = 400, 4, 8
RULE = Rule(target=0.6, lowest=8, highest=64)

ADAPTIVE = f"""
 import torch
+import bigbatch as bb
 from peft import LoraConfig, TaskType, get_peft_model
...
+    policy = {RULE}
+    train = bb.AdaptiveBatch(model, optimizer, train_dataloader, policy=policy)
     for epoch in range(args.num_epochs):
         model.train()
-        for step, batch in enumerate(train_dataloader):
-            outputs = model(**batch)
-            loss = outputs.loss
-            loss.backward()
-            optimizer.step()
-            optimizer.zero_grad()
{STEPS}"""
EVERY_STEP = ADAPTIVE.replace("policy=policy", "policy=policy, every=1").replace(
    str(RULE), RULE.controller(MICRO)
)
FIXED = ADAPTIVE.replace(str(RULE), f"bb.Fixed({MICRO})")
OPTIMIZER = """
-    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
+    optimizer = VRAdam((p for p in model.parameters() if p.requires_grad), lr=5e-3)
...
"""
REDUCED = EVERY_STEP.replace(
    "+import bigbatch as bb", "+import bigbatch as bb\n+from bigbatch.optim import VRAdam"
).replace("+    policy", OPTIMIZER[1:] + "+    policy")


def train(folder, script, out):
    """Of each epoch its accuracy; (batch, samples, similarity, loss) of each update; the rest."""
    run = alone(script, f"--output_dir={folder / out}", f"--num_epochs={EPOCHS}")
    assert 0 == run.returncode, run.stderr
    accuracies = [float(said) for said in re.findall(r"accuracy ([\d.]+)", run.stdout)]
    assert "frozen True" in run.stdout
    return accuracies, updates_of(run.stdout), load_file(folder / out / "adapter_model.safetensors")


def test_the_edit_is_nine_lines():
    assert 9 == typed(ADAPTIVE)


def test_a_fixed_batch_trains_as_the_script_does(tmp_path):
    """A measured step has micro-batches for one of 8: rounding, and what Adam makes of it."""
    _, _, expected = train(tmp_path, SCRIPT, "plain")
    _, rows, actual = train(tmp_path, edited(SCRIPT, FIXED, tmp_path), "fixed")
    assert {MICRO} == {size for size, *_ in rows}
    for name, weight in expected.items():
        torch.testing.assert_close(weight, actual[name], rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("edit", [EVERY_STEP, REDUCED], ids=["AdamW", "VRAdam"])
def test_it_learns_with_batches_that_follow_the_policy(tmp_path, edit):
    accuracies, updates, saved = train(tmp_path, edited(SCRIPT, edit, tmp_path), "adaptive")
    rows = [row[:3] for row in updates]
    assert_followed(rows, RULE, samples=SAMPLES, passes=EPOCHS, grid=MICRO, sizes=3)
    assert accuracies[-1] > 0.8  # .5 by a predict
    assert updates[-1][3] < updates[0][3] / 2
    assert all("lora_" in name or "classifier" in name for name in saved)
