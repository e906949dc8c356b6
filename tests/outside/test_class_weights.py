"""Class weights in the loops of trainers, where they divide the mean: trained as uncut."""

from pathlib import Path

import pytest
import torch

from script_edits import edited, typed
from torchrun import alone

SCRIPTS = Path(__file__).parent / "scripts"
TRAINER = """
 import torch
+import bigbatch as bb
+from bigbatch.integrations.transformers import AdaptiveTrainer
 from torch import nn
...
-class CustomTrainer(Trainer):
+class CustomTrainer(AdaptiveTrainer):
...
     train_dataset=train,
+    policy=bb.Fixed(24),
+    micro_batch={micro},
"""
LIGHTNING = """
 import lightning as L
+import bigbatch as bb
 import torch
+from bigbatch.integrations.lightning import AdaptiveBatchCallback
...
-loader = DataLoader(TensorDataset(features, labels), batch_size=24)
+loader = DataLoader(TensorDataset(features, labels), batch_size={micro})
...
 trainer = L.Trainer(
+    callbacks=[AdaptiveBatchCallback(bb.Fixed(24), lr_scaling=None, min_micro_batches=2)],
"""


def weights(script, out):
    run = alone(script, out)
    assert 0 == run.returncode, run.stderr
    return torch.cat([weight.flatten() for weight in torch.load(out).values()])


@pytest.mark.parametrize(
    ("name", "change", "lines"),
    [("weighted_trainer", TRAINER, 5), ("weighted_lightning", LIGHTNING, 4)],
)
def test_a_converted_loop_trains_as_the_script_does(name, change, lines, tmp_path):
    script = SCRIPTS / f"{name}.py"
    assert lines == typed(change)
    expected = weights(script, tmp_path / "plain")
    for micro in (12, 4):
        converted = edited(script, change.format(micro=micro), tmp_path)
        ours = weights(converted, tmp_path / "ours")
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
