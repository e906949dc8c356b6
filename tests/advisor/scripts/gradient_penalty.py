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


def build():
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    return critic, torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))


def get_batch():
    return torch.randn(32, 2) + 2, torch.randn(32, 2), torch.rand(32, 1)


def loss_of(critic, real, fake, share):
    between = (share * real + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = ((gradient.norm(dim=1) - 1) ** 2).mean()
    return critic(fake).mean() - critic(real).mean() + 10 * penalty


def main():
    args = parse()
    critic, optimizer = build()
    losses = []
    for _ in range(args.steps):
        loss = loss_of(critic, *get_batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if args.losses:
        args.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
