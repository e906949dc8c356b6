"""GRPO by hand: each prompt's rollouts in two backwards, and what that says of other steps."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import bigbatch as bb
from script_edits import edited, typed
from torchrun import alone

SCRIPT = Path(__file__).parent / "scripts" / "grpo.py"

HALVES = """
 import torch
+import bigbatch as bb
 from torch import nn
...
     optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
+    meter = bb.GradientMeter(policy, cluster_parts=2)
...
-            loss = policy_loss(policy, text, advantage)
-            (loss / args.prompts).backward()
+            for half, part in zip(text.chunk(2), advantage.chunk(2), strict=True):
+                loss = policy_loss(policy, half, part)
+                (loss / (2 * args.prompts)).backward()
...
-        optimizer.step()
+        nested = meter.read([args.num_generations // 2] * (2 * args.prompts)).nested
+        print("nested", nested.grad_sqnorm, nested.between, nested.within)
+        optimizer.step()
"""


def train(folder, script):
    run = alone(script, f"--output_dir={folder}", "--steps=20")
    assert 0 == run.returncode, run.stderr
    rewards = [float(said) for said in re.findall(r"reward (\S+)", run.stdout)]
    nested = [list(map(float, line.split())) for line in re.findall(r"nested (.*)", run.stdout)]
    return rewards, np.array(nested), torch.load(folder / "policy.pt", weights_only=True)


def test_the_edit_is_eight_lines():
    assert 8 == typed(HALVES)


def test_halves_of_a_prompt_train_as_whole_ones(tmp_path):
    expected_rewards, _, expected = train(tmp_path, SCRIPT)
    rewards, nested, weights = train(tmp_path, edited(SCRIPT, HALVES, tmp_path))
    assert expected_rewards[:5] == rewards[:5]  # rounding may change a later rollout
    assert rewards[-1] > rewards[0]
    assert expected.keys() == weights.keys()
    assert (20, 3) == nested.shape
    assert np.isfinite(nested).all()
    assert (nested[:, 2] > 0).all()


@pytest.fixture
def grpo():
    spec = importlib.util.spec_from_file_location("grpo", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_components_predict_the_variance_of_other_steps(grpo):
    """Of steps of 8 prompts x 8 rollouts; the variance is that of 100 gradients of other steps.

    Each variance has a standard error near 5 %. At another number of rollouts the group's own mean
    in the baseline makes gradients longer, by up to (1 - 1/R') / (1 - 1/R).
    """
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    policy = grpo.Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)

    def accumulate(prompts, rollouts, parts=1):
        policy.zero_grad()
        for prompt in grpo.drawn(prompts, draw):
            text = grpo.rollouts(policy, prompt, rollouts, draw)
            pairs = zip(text.chunk(parts), grpo.advantages(text).chunk(parts), strict=True)
            for some, advantage in pairs:
                (grpo.policy_loss(policy, some, advantage) / (parts * prompts)).backward()

    def variance(prompts, rollouts):
        rows = []
        for _ in range(100):
            accumulate(prompts, rollouts)
            rows.append(torch.cat([p.grad.flatten() for p in policy.parameters()]).double())
        return float(torch.stack(rows).var(0).sum())

    for _ in range(20):
        accumulate(8, 8)
        optimizer.step()
    found = []
    with bb.GradientMeter(policy, cluster_parts=2) as meter:
        for _ in range(100):
            accumulate(8, 8, parts=2)
            found.append(meter.read([4] * 16).nested)
    noise = bb.NestedNoise.average(found)
    assert pytest.approx(variance(8, 8), rel=0.15) == noise.variance(8, 8)
    assert pytest.approx(variance(16, 8), rel=0.15) == noise.variance(16, 8)
    longer = (1 - 1 / 24) / (1 - 1 / 8)
    assert noise.variance(4, 24) * 0.85 < variance(4, 24) < noise.variance(4, 24) * longer**2 * 1.15
