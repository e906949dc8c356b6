"""Fine-tuning BERT for pairs of sentences, in the shape of accelerate's examples/nlp_example.py.

Written from scratch, short: its loaders, its loop, its evaluation. GLUE's MRPC is replaced by pairs
that are made here, and the pretrained BERT by a small one that is not trained yet.
"""

import argparse
import random

import torch
from accelerate import Accelerator
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
    set_seed,
)

EVAL_BATCH_SIZE = 32
WORDS, LENGTH, PAIRS = 20, 6, 600


def made_pairs():
    """Two sentences, each of one of two kinds of words; which kind the second is of."""
    draw = random.Random(0)
    pairs = []
    for _ in range(PAIRS):
        kinds = [draw.randrange(2) for _ in range(2)]
        words = [
            [4 + WORDS * kind + draw.randrange(WORDS) for _ in range(LENGTH)] for kind in kinds
        ]
        ids = [1, *words[0], 2, *words[1], 2]
        types = [0] * (LENGTH + 2) + [1] * (LENGTH + 1)
        pairs.append({"input_ids": ids, "token_type_ids": types, "labels": kinds[1]})
    return pairs


def get_dataloaders(accelerator, batch_size=16):
    def collate_fn(examples):
        return {name: torch.tensor([each[name] for each in examples]) for name in examples[0]}

    with accelerator.main_process_first():
        pairs = made_pairs()
    train_dataloader = DataLoader(
        pairs[:480], shuffle=True, collate_fn=collate_fn, batch_size=batch_size, drop_last=True
    )
    eval_dataloader = DataLoader(
        pairs[480:], shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE
    )
    return train_dataloader, eval_dataloader


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    lr = config["lr"]
    num_epochs = int(config["num_epochs"])
    seed = int(config["seed"])
    batch_size = int(config["batch_size"])

    set_seed(seed)
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=4 + 2 * WORDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=10,
        num_training_steps=len(train_dataloader) * num_epochs,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        model.eval()
        right = seen = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right += int((predictions == references).sum())
            seen += len(references)
        accelerator.print(f"epoch {epoch}: accuracy {right / seen:.4f} of {seen}")
    accelerator.print(f"last learning rate {lr_scheduler.get_last_lr()[0]:.8f}")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.get_state_dict(model), args.output_file)
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="If passed, will train on the CPU.")
    parser.add_argument("--output_file", required=True, help="Where the weights go.")
    args = parser.parse_args()
    config = {"lr": 2e-3, "num_epochs": 3, "seed": 42, "batch_size": 8}
    training_function(config, args)


if __name__ == "__main__":
    main()
