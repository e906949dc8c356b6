"""Fashion-MNIST with Lightning, and a batch size that follows the gradient noise.

    python examples/lightning_fashion_mnist.py
    python examples/lightning_fashion_mnist.py --devices 2

Without the files of Fashion-MNIST in the folder --data it trains on scikit-learn's digits.
"""

import argparse
from pathlib import Path

import fashion_mnist
import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import bigbatch as bb
from bigbatch.integrations.lightning import AdaptiveBatchCallback


class Classifier(pl.LightningModule):
    """Two layers, without any code for batch sizes."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(pixels, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        accuracy = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", accuracy, prog_bar=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        accuracy = self.trainer.callback_metrics["accuracy"]
        self.print(f"accuracy {accuracy:.3f} after {self.global_step} updates")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default="data/fashion-mnist")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--logs", default="lightning_logs")
    options = parser.parse_args()
    pl.seed_everything(0)
    train, test = fashion_mnist.load(options.data)
    policy = bb.SimiGrad(target=0.3, max_batch=len(train) // 20)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        max_epochs=4,
        callbacks=[AdaptiveBatchCallback(policy, batch_size=64)],
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        default_root_dir=options.logs,
    )
    model = Classifier(train.tensors[0].shape[1])
    trainer.fit(model, DataLoader(train, 16, shuffle=True), DataLoader(test, 500))


if __name__ == "__main__":
    main()
