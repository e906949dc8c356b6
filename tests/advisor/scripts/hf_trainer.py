"""Trains GPT-2 with transformers' Trainer on made sequences."""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

SYMBOLS, LENGTH = 8, 8


class Walks(Dataset):
    """Each symbol is the last one, or the next, by chance."""

    def __init__(self, samples=256):
        draw = torch.Generator().manual_seed(3)
        moves = torch.randint(3, (samples, LENGTH), generator=draw)
        self.rows = moves.cumsum(1) % SYMBOLS

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class RecordingTrainer(Trainer):
    """Remembers every loss."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--losses", type=Path)
    return parser.parse_args(argv)


def build(args):
    set_seed(9)
    config = GPT2Config(
        vocab_size=SYMBOLS,
        n_positions=LENGTH,
        n_embd=8,
        n_layer=2,
        n_head=2,
        n_inner=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    training_args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=args.steps,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        learning_rate=5e-3,
        warmup_steps=5,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    return RecordingTrainer(GPT2LMHeadModel(config), training_args, train_dataset=Walks())


def main():
    args = parse()
    trainer = build(args)
    trainer.train()
    if args.losses:
        args.losses.write_text(json.dumps(trainer.losses))


if __name__ == "__main__":
    main()
