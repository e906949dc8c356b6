"""peft's LoRA in a loop of one's own: adapters and the head are trained, and measured, alone."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("peft")

from edits import edited, typed
from followed import unfollowed
from torchrun import alone

SCRIPT = Path(__file__).parent / "scripts" / "peft_lora.py"
SAMPLES, EPOCHS, MICRO = 400, 4, 8
LOWEST, HIGHEST, TARGET = 8, 64, 0.6

ADAPTIVE = f"""
 import torch
+import bigbatch as bb
 from peft import LoraConfig, TaskType, get_peft_model
...
+    policy = bb.SimiGrad(target={TARGET}, min_batch={LOWEST}, max_batch={HIGHEST})
+    train = bb.AdaptiveBatch(model, optimizer, train_dataloader, policy=policy)
     for epoch in range(args.num_epochs):
         model.train()
-        for step, batch in enumerate(train_dataloader):
-            outputs = model(**batch)
-            loss = outputs.loss
-            loss.backward()
-            optimizer.step()
-            optimizer.zero_grad()
+        for step in train:
+            for batch in step:
+                outputs = model(**batch)
+                step.backward(outputs.loss)
+            done = step.update()
+            print("update", done.batch_size, done.samples, done.similarity, done.loss)
"""
FIXED = ADAPTIVE.replace(
    f"bb.SimiGrad(target={TARGET}, min_batch={LOWEST}, max_batch={HIGHEST})", f"bb.Fixed({MICRO})"
)
OPTIMIZER = """
-    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
+    optimizer = VRAdam((p for p in model.parameters() if p.requires_grad), lr=5e-3)
...
"""
REDUCED = ADAPTIVE.replace(
    "+import bigbatch as bb", "+import bigbatch as bb\n+from bigbatch.optim import VRAdam"
).replace("+    policy", OPTIMIZER[1:] + "+    policy")


def train(folder, script, out):
    """Of each epoch its accuracy; (batch, samples, similarity, loss) of each update; the rest."""
    run = alone(script, f"--output_dir={folder / out}", f"--num_epochs={EPOCHS}")
    assert 0 == run.returncode, run.stderr
    accuracies = [float(said) for said in re.findall(r"accuracy ([\d.]+)", run.stdout)]
    updates = re.findall(r"update (\d+) (\d+) (\S+) (\S+)", run.stdout)
    rows = [(int(size), int(so_far), *map(float, rest)) for size, so_far, *rest in updates]
    assert "frozen True" in run.stdout
    return accuracies, rows, load_file(folder / out / "adapter_model.safetensors")


def test_the_edit_is_nine_lines():
    assert 9 == typed(ADAPTIVE)


def test_a_fixed_batch_trains_as_the_script_does(tmp_path):
    """Four micro-batches of 2 for one of 8, in float32: rounding, and what Adam makes of it."""
    _, _, expected = train(tmp_path, SCRIPT, "plain")
    _, rows, actual = train(tmp_path, edited(SCRIPT, FIXED, tmp_path), "fixed")
    assert {MICRO} == {size for size, *_ in rows}
    for name, weight in expected.items():
        torch.testing.assert_close(weight, actual[name], rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("edit", [ADAPTIVE, REDUCED], ids=["AdamW", "VRAdam"])
def test_it_learns_with_batches_that_follow_the_policy(tmp_path, edit):
    accuracies, updates, saved = train(tmp_path, edited(SCRIPT, edit, tmp_path), "adaptive")
    assert EPOCHS * SAMPLES == updates[-1][1]  # each sample once a pass
    rows = [row[:3] for row in updates]
    kept = {"samples": SAMPLES, "target": TARGET, "bounds": (LOWEST, HIGHEST), "grid": MICRO}
    assert [] == unfollowed(rows, **kept)
    assert len({size for size, _, _ in rows}) > 2
    assert accuracies[-1] > 0.8  # .5 by a guess
    assert updates[-1][3] < updates[0][3] / 2
    assert all("lora_" in name or "classifier" in name for name in saved)
