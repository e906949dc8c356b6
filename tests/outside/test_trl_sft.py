"""TRL's own sft.py, as its package ships it: supervised fine-tuning, whole and by peft's LoRA."""

import json
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("trl")

from transformers import AutoConfig, AutoModelForCausalLM

from script_edits import edited, typed
from simigrad_rule import Rule, assert_followed, rows_of
from tiny_language_files import write_language
from torchrun import alone, torchrun

SCRIPT = Path(find_spec("trl").origin).parent / "scripts" / "sft.py"
SAMPLES, EPOCHS, MICRO = 160, 3, 4
LOWEST = 8
RULE = Rule(target=0.8, lowest=LOWEST, highest=48)

ADAPTIVE = f"""
     from trl import SFTTrainer, get_dataset, get_peft_config, get_quantization_config
+    import bigbatch as bb
+    from bigbatch.integrations.transformers import AdaptiveMixin
+
+    class AdaptiveSFTTrainer(AdaptiveMixin, SFTTrainer):
+        pass
...
-    trainer = SFTTrainer(
+    trainer = AdaptiveSFTTrainer(
...
         peft_config=get_peft_config(model_args),
+        policy={RULE},
+        batch_size={LOWEST},
     )
"""
EVERY_STEP = ADAPTIVE.replace(str(RULE), RULE.controller(LOWEST)).replace(
    f"batch_size={LOWEST}", "every=1"
)
FIXED = ADAPTIVE.replace(str(RULE), f"bb.Fixed({LOWEST})")
LORA = [
    "--use_peft",
    "--lora_r=4",
    "--lora_alpha=8",
    "--lora_target_modules=.*c_attn",
    "--lora_dropout=0",
]


@pytest.fixture
def sums(tmp_path):
    """A model that has learnt nothing, and sums to learn: prompts are given, answers asked for."""
    write_language(tmp_path)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    draw = random.Random(0)
    pairs = [(draw.randrange(5), draw.randrange(5)) for _ in range(SAMPLES)]
    rows = [{"prompt": f"{a} plus {b} is", "completion": f" {a + b}."} for a, b in pairs]
    (tmp_path / "data").mkdir()
    for part, some in (("train", rows), ("test", rows[:32])):
        (tmp_path / "data" / f"{part}.jsonl").write_text("\n".join(map(json.dumps, some)))
    return tmp_path


def train(folder, script, out, *options, ranks=1):
    """What the Trainer logged, a dictionary a line."""
    settings = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "data",
        "output_dir": folder / out,
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": MICRO,
        "learning_rate": 1e-2,
        "eval_strategy": "epoch",
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "epoch",
        "disable_tqdm": True,
    }
    given = [f"--{name}={value}" for name, value in settings.items()]
    given = [*given, "--use_cpu", *options]
    run = alone(script, *given) if ranks == 1 else torchrun(ranks, script, *given)
    assert 0 == run.returncode, run.stderr
    *_, last = sorted((folder / out).glob("checkpoint-*"), key=lambda f: int(f.name[11:]))
    return json.loads((last / "trainer_state.json").read_text())["log_history"]


def column(logged, name):
    return [row[name] for row in logged if name in row]


def test_the_edit_is_eight_lines():
    assert 8 == typed(ADAPTIVE)


@pytest.mark.parametrize("lora", [[], LORA], ids=["whole", "lora"])
def test_a_fixed_batch_trains_as_the_script_does(sums, lora):
    """Answers have one or two digits: each label counts alike. In float32, by Adam."""
    accumulated = f"--gradient_accumulation_steps={LOWEST // MICRO}"
    expected = train(sums, SCRIPT, "plain", accumulated, *lora)
    actual = train(sums, edited(SCRIPT, FIXED, sums), "fixed", *lora)
    for name in ("loss", "eval_loss", "learning_rate", "grad_norm"):
        assert column(expected, name) == pytest.approx(column(actual, name), rel=1e-2, abs=1e-5)


@pytest.mark.parametrize("lora", [[], LORA], ids=["whole", "lora"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_learns_with_batches_that_follow_the_policy(sums, ranks, lora):
    logged = train(sums, edited(SCRIPT, EVERY_STEP, sums), "adaptive", *lora, ranks=ranks)
    updates = [row for row in logged if "loss" in row]
    rows, grid = rows_of(updates), MICRO * ranks
    assert_followed(rows, RULE, samples=SAMPLES, passes=EPOCHS, grid=grid, sizes=3)
    first, last = updates[0]["loss"], column(logged, "eval_loss")[-1]
    assert last < first - (0.1 if lora else 2)  # adapters of a model that knows nothing do little


def test_adapters_alone_are_saved(sums):
    train(sums, edited(SCRIPT, ADAPTIVE, sums), "adaptive", *LORA, "--num_train_epochs=1")
    saved = load_file(sums / "adaptive" / "adapter_model.safetensors")
    assert saved.keys()
    assert all("lora_" in name for name in saved)
    assert any(weight.abs().sum() > 0 for name, weight in saved.items() if "lora_B" in name)
