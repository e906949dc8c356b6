"""transformers' run_clm: its Trainer made adaptive, by four lines."""

import json
from math import log
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("datasets")

from script_edits import edited, typed
from simigrad_rule import Rule, assert_followed, rows_of
from tiny_language_files import LENGTH, WORDS, write_language
from torchrun import alone, torchrun

SCRIPT = Path(__file__).parent / "scripts" / "run_clm.py"
SAMPLES, EPOCHS = 168, 3
MICRO, LOWEST = 4, 8
RULE = Rule(target=0.5, lowest=LOWEST, highest=48)

ADAPTIVE = f"""
 from datasets import load_dataset
+import bigbatch as bb
+from bigbatch.integrations.transformers import AdaptiveTrainer as Trainer
...
     HfArgumentParser,
-    Trainer,
     TrainingArguments,
...
         preprocess_logits_for_metrics=preprocess_logits_for_metrics,
+        policy={RULE},
+        batch_size={LOWEST},
     )
"""
EVERY_STEP = ADAPTIVE.replace(str(RULE), RULE.controller(LOWEST)).replace(
    f"batch_size={LOWEST}", "every=1"
)
FIXED = ADAPTIVE.replace(str(RULE), f"bb.Fixed({LOWEST})")


@pytest.fixture
def language(tmp_path):
    write_language(tmp_path)
    return tmp_path


def train(language, script, out, *options, ranks=1):
    """Every update, as it was logged."""
    defaults = {
        "--config_name": language / "model",
        "--tokenizer_name": language / "model",
        "--train_file": language / "train.txt",
        "--validation_file": language / "validation.txt",
        "--max_train_samples": SAMPLES,
        "--block_size": LENGTH,
        "--output_dir": language / out,
        "--per_device_train_batch_size": MICRO,
        "--learning_rate": 5e-3,
        "--num_train_epochs": EPOCHS,
        "--logging_steps": 1,
        "--report_to": "none",
        "--save_strategy": "no",
    }
    given = [f"{name}={value}" for name, value in defaults.items()]
    given += ["--do_train", "--do_eval", "--use_cpu", "--disable_tqdm=True", *options]
    run = alone(script, *given) if ranks == 1 else torchrun(ranks, script, *given)
    assert 0 == run.returncode, run.stderr
    return [row for row in history(language, out) if "loss" in row]


def history(language, out):
    return json.loads((language / out / "trainer_state.json").read_text())["log_history"]


def weights(language, out):
    return load_file(language / out / "model.safetensors")


def evaluation(language, out):
    return json.loads((language / out / "eval_results.json").read_text())


def test_the_edit_is_four_lines():
    assert 4 == typed(ADAPTIVE)


def test_a_fixed_batch_trains_as_the_script_does(language):
    """In float32, where the two divide a loss in another order: 1e-7 at first, more by Adam."""
    accumulated = f"--gradient_accumulation_steps={LOWEST // MICRO}"
    expected = train(language, SCRIPT, "plain", accumulated)
    actual = train(language, edited(SCRIPT, FIXED, language), "fixed")
    for name in ("loss", "grad_norm", "learning_rate"):
        torch.testing.assert_close(
            torch.tensor([row[name] for row in expected]),
            torch.tensor([row[name] for row in actual]),
            rtol=1e-3,
            atol=1e-6,
        )
    for name, weight in weights(language, "plain").items():
        torch.testing.assert_close(weight, weights(language, "fixed")[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_learns_with_batches_that_follow_the_policy(language, ranks):
    found = train(language, edited(SCRIPT, EVERY_STEP, language), "adaptive", ranks=ranks)
    rows, grid = rows_of(found), MICRO * ranks
    assert_followed(rows, RULE, samples=SAMPLES, passes=EPOCHS, grid=grid, sizes=4)
    assert 0 == pytest.approx(found[-1]["learning_rate"], abs=1e-3)  # of a last base batch
    assert log(WORDS) - 1 > evaluation(language, "adaptive")["eval_loss"]  # than a predict's


def test_a_resumed_training_ends_as_if_never_interrupted(language):
    """With evaluation in between, and as many updates as the user says."""
    script = edited(SCRIPT, EVERY_STEP, language)
    steps = ["--max_steps=24", "--eval_strategy=steps", "--eval_steps=6"]
    saved = ["--save_strategy=steps", "--save_steps=9"]
    expected = train(language, script, "whole", *steps)
    first = train(language, script, "killed", *steps, *saved)
    assert expected == first
    again = f"--resume_from_checkpoint={language / 'killed' / 'checkpoint-9'}"
    assert expected == train(language, script, "killed", *steps, again)
    for name, weight in weights(language, "whole").items():
        assert torch.equal(weight, weights(language, "killed")[name])
    evaluated = [row["step"] for row in history(language, "killed") if "eval_loss" in row]
    assert [6, 12, 18, 24] == evaluated[:4]
