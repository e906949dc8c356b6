"""TRL's GRPOTrainer on a made model: its step is cut into halves of each prompt's rollouts."""

import json
import random

import pytest
import torch

pytest.importorskip("trl")

from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict

import bigbatch as bb
from tiny_language_files import write_language

PROMPTS, ROLLOUTS, STEPS = 4, 4, 3


class NestedGRPOTrainer(GRPOTrainer):
    """Reads the noise between prompts and between rollouts; each step is one generation batch."""

    meter = None

    def training_step(self, model, inputs, num_items_in_batch):
        if self.meter is None:
            self.meter, self.read = bb.GradientMeter(model, cluster_parts=2), []
        rows = self._prepare_inputs(inputs)  # in random order
        prompts = rows["prompt_ids"].unique(dim=0, return_inverse=True)[1]
        order = prompts.argsort(stable=True)
        rows = {name: value[order] if value.dim() else value for name, value in rows.items()}
        parts = split_tensor_dict(rows, 2 * len(order) // self.num_generations)
        total = 0.0
        for part in parts:
            loss = self.compute_loss(model, part) / len(parts)
            self.accelerator.backward(loss)
            total += loss.detach()
        self.read.append(self.meter.read([self.num_generations // 2] * len(parts)))
        self._step += 1
        return total


def trained(folder, trainer, **settings):
    """The trainer after its training, whose model has learnt nothing before."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    draw = random.Random(0)
    prompts = [" ".join(draw.choices(["text", "line", "word", "width"], k=3)) for _ in range(40)]
    rows = folder / "prompts.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": one}) for one in dict.fromkeys(prompts)))
    arguments = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=PROMPTS * ROLLOUTS,
        num_generations=ROLLOUTS,
        max_completion_length=6,
        max_steps=STEPS,
        learning_rate=1e-3,
        loss_type="grpo",
        logging_steps=1,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    made = trainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(text.count("e")) for text in completions],
        args=arguments,
        train_dataset=load_dataset("json", data_files=str(rows), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    made.train()
    return made


def test_halves_of_prompts_train_as_the_trainer_does(tmp_path):
    write_language(tmp_path)
    expected = trained(tmp_path, GRPOTrainer).state.log_history
    nested = trained(tmp_path, NestedGRPOTrainer)
    for name in ("reward", "grad_norm"):
        rows = zip(expected, nested.state.log_history, strict=True)
        for one, other in [pair for pair in rows if name in pair[0]]:
            assert one[name] == pytest.approx(other[name], rel=1e-3)
    assert STEPS == len(nested.read)
    for statistics in nested.read:
        assert PROMPTS == statistics.micro_batches
        assert statistics.nested.within > 0
