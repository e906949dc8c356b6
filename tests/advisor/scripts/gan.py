"""Trains a generator and a discriminator, one step each in turn."""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--losses", type=Path)
    return parser.parse_args(argv)


def main():
    args = parse()
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
    losses = []
    for _ in range(args.steps):
        angle = 6.28 * torch.rand(32)
        real = torch.stack([angle.cos(), angle.sin()], dim=1)
        fake = generator(torch.randn(32, 4))

        optimizer_d.zero_grad()
        errD_real = binary_cross_entropy_with_logits(discriminator(real), ones)
        errD_real.backward()
        errD_fake = binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
        errD_fake.backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        errG = binary_cross_entropy_with_logits(discriminator(fake), ones)
        errG.backward()
        optimizer_g.step()
        losses.append((errD_real + errD_fake).item() + errG.item())
    if args.losses:
        args.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
