"""In-batch contrastive learning: the loss of SimCLR (Chen et al. 2020, algorithm 1), or of CLIP."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def augmented(images):
    return images + 0.2 * torch.randn_like(images)


def simclr_loss(one, other, temperature=0.5):
    """Each view has to find the other one of its image among all views of the batch."""
    z = F.normalize(torch.cat([one, other]), dim=1)
    similarities = (z @ z.t() / temperature).masked_fill(torch.eye(len(z), dtype=bool), -1e9)
    return F.cross_entropy(similarities, torch.arange(len(z)).roll(len(one)))


class Contrastive(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.log_scale = encoder, nn.Parameter(torch.tensor(2.0))

    def forward(self, images):
        one, other = (F.normalize(self.encoder(augmented(images)), dim=1) for _ in range(2))
        similarities = self.log_scale.exp() * one @ other.t()
        return F.cross_entropy(similarities, torch.arange(len(one)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--loss", choices=["loop", "two-calls", "model"], default="loop")
    parser.add_argument("--norm", choices=["batch", "layer"], default="layer")
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(64) if args.norm == "batch" else nn.LayerNorm(64)
    model = nn.Sequential(nn.Linear(64, 64), norm, nn.ReLU(), nn.Linear(64, 16))
    if args.loss == "model":
        model = Contrastive(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images = torch.tensor(load_digits().data).float() / 16
    loader = DataLoader(TensorDataset(images), args.batch_size, shuffle=True, drop_last=True)
    for (x,) in loader:
        if args.loss == "model":
            loss = model(x)
        elif args.loss == "loop":
            loss = simclr_loss(*model(torch.cat([augmented(x), augmented(x)])).chunk(2))
        else:
            loss = simclr_loss(model(augmented(x)), model(augmented(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
