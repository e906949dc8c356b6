"""Trains an embedding whose gradients are sparse."""

import argparse
import json
from pathlib import Path

import torch
from torch import nn


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--losses", type=Path)
    return parser.parse_args(argv)


class Recommender(nn.Module):
    def __init__(self, users=64, items=64, width=8):
        super().__init__()
        self.users = nn.Embedding(users, width, sparse=True)
        self.items = nn.Embedding(items, width, sparse=True)

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(1)


def main():
    args = parse()
    torch.manual_seed(0)
    model = Recommender()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(args.steps):
        user, item = torch.randint(64, (32,)), torch.randint(64, (32,))
        rating = ((user + item) % 2).float()
        loss = nn.functional.mse_loss(model(user, item), rating)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if args.losses:
        args.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
