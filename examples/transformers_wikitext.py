"""A small language model by the Hugging Face Trainer, with a batch size that follows gradients.

    python examples/transformers_wikitext.py
    torchrun --nproc_per_node 2 examples/transformers_wikitext.py

Without WikiText-2 (`train.txt.gz` in the folder --data) it trains on the source texts of Python's
standard library. Tokens are bytes. Nothing is downloaded.
"""

import argparse
import gzip
import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import bigbatch as bb
from bigbatch.integrations.transformers import AdaptiveTrainer

LENGTH = 64  # bytes of a sample


def read(folder: Path, size: int) -> bytes:
    """The first bytes of WikiText-2, or of the standard library."""
    file = folder / "train.txt.gz"
    if file.exists():
        with gzip.open(file) as text:
            return text.read(size)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"No WikiText-2 in {folder}: training on the source texts of the standard library")
    modules = sorted(Path(os.__file__).parent.glob("*.py"))
    return b"".join(module.read_bytes() for module in modules)[:size]


def samples_of(text: bytes) -> list[dict[str, torch.Tensor]]:
    """Sequences of one length, whose labels are their tokens."""
    tokens = torch.tensor(list(text)).split(LENGTH)[:-1]
    return [{"input_ids": token, "labels": token} for token in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default="data/wikitext-2")
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
            use_cpu=not torch.cuda.is_available(),  # or processes on CPUs train each by itself
        ),
        train_dataset=samples[256:],
        eval_dataset=samples[:256],
        policy=bb.SimiGrad(target=0.5, min_batch=16, max_batch=512),
        batch_size=32,
    )
    trainer.train()


if __name__ == "__main__":
    main()
