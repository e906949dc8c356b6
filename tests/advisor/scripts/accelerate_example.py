"""Trains a classifier by accelerate, with its accumulation."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.LayerNorm(width), nn.GELU())
        self.head = nn.Linear(width, 3)

    def forward(self, inputs, labels):
        logits = self.head(self.body(inputs))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def made_rows(samples=384):
    x = torch.randn(samples, 6)
    y = (x[:, 0] + torch.randn(samples) > 0).long() + (x[:, 1] > 0).long()
    return TensorDataset(x, y)


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--per_device_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--losses", type=Path)
    return parser.parse_args(argv)


def build(args):
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
    )
    set_seed(7)
    loader = DataLoader(made_rows(), args.per_device_batch_size, shuffle=True)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / (2 * args.steps)))
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def main():
    args = parse()
    accelerator, model, optimizer, loader, scheduler = build(args)
    losses, completed_steps = [], 0
    model.train()
    while completed_steps < args.steps:
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = model(inputs, labels)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            completed_steps += accelerator.sync_gradients
            if completed_steps == args.steps:
                break
    if args.losses and accelerator.is_main_process:
        args.losses.write_text(json.dumps(losses))
    accelerator.end_training()


if __name__ == "__main__":
    main()
