"""Trains hidden matrices by Muon and everything else by AdamW, after one backward."""

import argparse
import json
from pathlib import Path

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, width=8, symbols=8):
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.hidden:
            x = x + torch.tanh(layer(x)).roll(1, dims=1)
        return self.head(self.norm(x))


def get_batch(args, length=6):
    tokens = torch.randint(8, (args.batch_size, length))
    return tokens, (tokens + tokens.roll(1, dims=1)) % 8


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=24)
    parser.add_argument("--losses", type=Path)
    return parser.parse_args(argv)


def build():
    torch.manual_seed(21)
    model = Tagger()
    hidden = list(model.hidden.parameters())
    names = {id(p) for p in hidden}
    others = [p for p in model.parameters() if id(p) not in names]
    muon = torch.optim.Muon(hidden, lr=0.02, momentum=0.95)
    adamw = torch.optim.AdamW(others, lr=3e-3)
    return model, [muon, adamw]


def loss_of(model, tokens, targets):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def main():
    args = parse()
    model, optimizers = build()
    losses = []
    for _ in range(args.steps):
        loss = loss_of(model, *get_batch(args))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
    if args.losses:
        args.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
