"""Trains a WGAN's critic with a gradient penalty."""

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


def penalty_of(critic, real, fake):
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((gradient.norm(dim=1) - 1) ** 2).mean()


def main():
    args = parse()
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    losses = []
    for _ in range(args.steps):
        real, fake = torch.randn(32, 2) + 2, torch.randn(32, 2)
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty_of(critic, real, fake)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if args.losses:
        args.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
