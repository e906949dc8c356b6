"""Loops whose loss is no mean over samples, or whose loader reuses its memory: trained as uncut."""

from pathlib import Path

import pytest
import torch

from script_edits import edited, typed
from torchrun import alone

SCRIPTS = Path(__file__).parent / "scripts"
IMPORT = """
 import torch
+import bigbatch as bb
 from torch import nn
...
"""
LOOP = """
-for epoch in range(3):
-    for x, y in loader:
-        optimizer.zero_grad()
-        loss = criterion(model(x), y)
-        loss.backward()
-        optimizer.step()
+train = bb.AdaptiveBatch(model, optimizer, loader, policy=bb.Fixed({size}), micro_batch={micro})
+for epoch in range(3):
+    for step in train:
+        for x, y in step:
+            step.backward(criterion(model(x), y))
+        step.update()
"""
TOKENS = """
-for x, y in loader:
-    loss = model(x, y)
-    loss.backward()
-    optimizer.step()
-    optimizer.zero_grad()
+train = bb.AdaptiveBatch(model, optimizer, loader, policy=bb.Fixed({size}), micro_batch={micro})
+for step in train:
+    for x, y in step:
+        step.backward(model(x, y))
+    step.update()
"""
GRAPHS = """
-for epoch in range(3):
-    for graph in loader:
-        optimizer.zero_grad()
-        loss = cross_entropy(model(graph), graph.y)
-        loss.backward()
-        optimizer.step()
+batches = bb.Batches(
+    loader, split=lambda b, lo, hi: Batch.from_data_list(b[lo:hi]), count=lambda b: b.num_graphs
+)
+train = bb.AdaptiveBatch(model, optimizer, batches, policy=bb.Fixed({size}), micro_batch={micro})
+for epoch in range(3):
+    for step in train:
+        for graph in step:
+            step.backward(cross_entropy(model(graph), graph.y))
+        step.update()
"""
LOOPS = {  # script: the edit, its lines, the size of its batch
    "packed_tokens": (TOKENS, 6, 8),
    "rare_classes": (LOOP, 7, 24),
    "molecules": (GRAPHS, 10, 24),
}


def weights(script, out):
    run = alone(script, out)
    assert 0 == run.returncode, run.stderr
    assert "Warning" not in run.stderr
    return torch.cat([weight.flatten() for weight in torch.load(out).values()])


@pytest.mark.parametrize("name", LOOPS)
def test_a_converted_loop_trains_as_the_script_does(name, tmp_path):
    change, lines, size = LOOPS[name]
    if name == "molecules":
        pytest.importorskip("torch_geometric")
    assert lines == typed(IMPORT + change)
    expected = weights(SCRIPTS / f"{name}.py", tmp_path / "plain")
    for micro in (size, 4):
        edit = IMPORT + change.strip("\n").format(size=size, micro=micro)
        ours = weights(edited(SCRIPTS / f"{name}.py", edit, tmp_path), tmp_path / "ours")
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)
