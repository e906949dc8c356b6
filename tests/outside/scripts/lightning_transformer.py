"""Lightning's transformer on words, in the shape of its examples/pytorch/basics/transformer.py.

Model and data set are those of `lightning.pytorch.demos`; the text comes from a folder.
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.transformer import LightningTransformer, WikiText2
from lightning.pytorch.loggers import CSVLogger
from torch.nn.functional import nll_loss
from torch.utils.data import DataLoader, random_split


class LanguageModel(LightningTransformer):
    def validation_step(self, batch, batch_idx):
        inputs, target = batch
        loss = nll_loss(self(inputs, target), target.view(-1))
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def test_step(self, batch, batch_idx):
        inputs, target = batch
        loss = nll_loss(self(inputs, target), target.view(-1))
        self.log("test_loss", loss, sync_dist=True)

    def prepare_data(self):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--max_epochs", type=int, default=2)
    parser.add_argument("--ckpt_path")
    args = parser.parse_args()
    pl.seed_everything(42)

    dataset = WikiText2(args.data, download=False)
    train, val, test = random_split(dataset, [len(dataset) - 74, 42, 32])
    train_dataloader = DataLoader(train, batch_size=4, shuffle=True)
    val_dataloader = DataLoader(val, batch_size=8)
    test_dataloader = DataLoader(test, batch_size=8)

    model = LanguageModel(vocab_size=dataset.vocab_size)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        gradient_clip_val=0.25,
        max_epochs=args.max_epochs,
        log_every_n_steps=1,
        enable_progress_bar=False,
        logger=CSVLogger(args.data),
        callbacks=[ModelCheckpoint(args.data / "saved", save_top_k=-1, filename="{epoch}")],
    )
    trainer.fit(model, train_dataloader, val_dataloader, ckpt_path=args.ckpt_path)
    trainer.test(model, test_dataloader)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), args.data / "weights.pt")


if __name__ == "__main__":
    main()
