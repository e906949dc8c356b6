"""Averages the gradients of all ranks by hand; start it by torchrun."""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--losses", type=Path)
    return parser.parse_args(argv)


def main():
    args = parse()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(args.steps):
        x = torch.randn(32, 6, generator=draw)
        y = (x[:, 0] > 0).long()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        losses.append(loss.item())
    if args.losses and dist.get_rank() == 0:
        args.losses.write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
