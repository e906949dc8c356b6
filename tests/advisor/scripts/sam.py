"""Trains by sharpness-aware minimization: the second backward is at other weights."""

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


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    def each(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield group, p

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for _, p in self.each()]).norm()
        for group, p in self.each():
            self.state[p]["old"] = p.clone()
            p.add_(p.grad * group["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for _, p in self.each():
            p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        self.zero_grad()


def main():
    args = parse()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    losses = []
    for _ in range(args.steps):
        x = torch.randn(32, 6)
        y = (x[:, 0] + torch.randn(32) > 0).long()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.first_step()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.second_step()
        losses.append(loss.item())
    if args.losses:
        args.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
