"""Trains a LightningModule with Lightning's own loop."""

import argparse
import json
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitRegressor(pl.LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=15, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def made_rows(samples=256):
    x = torch.randn(samples, 5)
    return TensorDataset(x, torch.sin(x[:, :1]) + 0.3 * torch.randn(samples, 1))


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--accumulate_grad_batches", type=int, default=1)
    parser.add_argument("--losses", type=Path)
    return parser.parse_args(argv)


def build(args):
    pl.seed_everything(11, verbose=False)
    loader = DataLoader(made_rows(), args.batch_size, shuffle=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=args.steps,
        gradient_clip_val=0.5,
        accumulate_grad_batches=args.accumulate_grad_batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return LitRegressor(), loader, trainer


def main():
    args = parse()
    module, loader, trainer = build(args)
    trainer.fit(module, loader)
    if args.losses:
        args.losses.write_text(json.dumps(module.losses))


if __name__ == "__main__":
    main()
