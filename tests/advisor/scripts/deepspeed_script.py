"""Trains by DeepSpeed's engine on CPUs; start it by torchrun."""

import argparse
import json
import os
from pathlib import Path

import torch
from torch import nn


def made_rows(rank, samples=256):
    draw = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(samples, 6, generator=draw)
    noise = torch.randn(samples, generator=draw)
    return x, (x[:, 0] + noise > 0).long() + (x[:, 1] > 0).long()


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--micro_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--losses", type=Path)
    return parser.parse_args(argv)


def build():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def micro_batch(rows, number, args):
    x, y = rows
    first = number * args.micro_batch_size % len(x)
    return x[first : first + args.micro_batch_size], y[first : first + args.micro_batch_size]


def config_of(args, world_size):
    accumulated = args.micro_batch_size * args.gradient_accumulation_steps
    return {
        "train_batch_size": accumulated * world_size,
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def main():
    import deepspeed

    args = parse()
    deepspeed.init_distributed("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model, optimizer = build()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config_of(args, world_size)
    )
    rows, losses = made_rows(rank), []
    for number in range(args.steps * args.gradient_accumulation_steps):
        x, y = micro_batch(rows, number, args)
        loss = nn.functional.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if args.losses and rank == 0:
        args.losses.write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
