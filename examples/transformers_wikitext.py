"""A small language model by transformers' Trainer, with a batch size that follows its gradients.

    python examples/transformers_wikitext.py
    torchrun --nproc-per-node 2 examples/transformers_wikitext.py --epochs 2

Reads WikiText-2 (`train.txt.gz` in --data); without this file it reads Python's own modules.
Tokens are characters. It downloads nothing.
"""

import argparse
import gzip
import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import bigbatch as bb
from bigbatch.integrations.transformers import AdaptiveTrainer

LENGTH = 64  # characters of a sample


def read(folder: Path, characters: int) -> bytes:
    """The beginning of WikiText-2, or of the standard library."""
    file = folder / "train.txt.gz"
    if file.exists():
        with gzip.open(file) as text:
            return text.read(characters)
    modules = sorted(Path(os.__file__).parent.glob("*.py"))
    return b"".join(module.read_bytes() for module in modules)[:characters]


def samples_of(text: bytes) -> list[dict[str, torch.Tensor]]:
    """Sequences of one length, whose labels are their tokens."""
    tokens = torch.tensor(list(text)).split(LENGTH)[:-1]
    return [{"input_ids": token, "labels": token} for token in tokens]


def main() -> AdaptiveTrainer:
    """Trains and evaluates."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("../shared/data/wikitext-2"))
    parser.add_argument("--out", default="runs/wikitext")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--epochs", type=float, default=1.0)
    options = parser.parse_args()
    samples = samples_of(read(options.data, (options.samples + 257) * LENGTH))

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    trainer = AdaptiveTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.out,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            logging_steps=10,
            eval_strategy="epoch",
            report_to="none",
        ),
        train_dataset=samples[256:],
        eval_dataset=samples[:256],
        policy=bb.SimiGrad(target=0.5, min_batch=16, max_batch=512),
        batch_size=32,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
