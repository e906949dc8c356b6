"""Fashion-MNIST with Lightning and a batch size that follows the gradient noise.

python examples/lightning_fashion_mnist.py --data ../shared/data/fashion-mnist
python examples/lightning_fashion_mnist.py --data digits --devices 2
"""

import argparse
import gzip

import lightning.pytorch as pl
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.integrations.lightning import AdaptiveBatchCallback


def read(folder: str, part: str) -> TensorDataset:
    """The images and labels of "train" or "t10k"."""
    with gzip.open(f"{folder}/{part}-images-idx3-ubyte.gz") as file:
        images = torch.tensor(np.frombuffer(file.read(), np.uint8, offset=16))
    with gzip.open(f"{folder}/{part}-labels-idx1-ubyte.gz") as file:
        labels = torch.tensor(np.frombuffer(file.read(), np.uint8, offset=8))
    return TensorDataset(images.view(-1, 784) / 255 - 0.5, labels.long())


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The digits of scikit-learn."""
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    x = x.float() / 16 - 0.5
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="../shared/data/fashion-mnist", help='or "digits"')
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--logs", default="lightning_logs")
    options = parser.parse_args()
    pl.seed_everything(0)
    data = options.data
    train, test = digits() if data == "digits" else (read(data, "train"), read(data, "t10k"))
    policy = bb.SimiGrad(target=0.3, max_batch=len(train) // 20)
    adaptive_batch = AdaptiveBatchCallback(policy, batch_size=64)
    strategy = "ddp" if options.devices > 1 else "auto"
    trainer = pl.Trainer(
        accelerator="cpu", devices=options.devices, strategy=strategy, max_epochs=4,
        callbacks=[adaptive_batch], log_every_n_steps=10, default_root_dir=options.logs,
    )  # fmt: skip
    model = Classifier(train.tensors[0].shape[1])
    trainer.fit(model, DataLoader(train, 16, shuffle=True), DataLoader(test, 500))
    accuracy = trainer.callback_metrics["accuracy"].item()
    trainer.print(f"accuracy {accuracy:.3f} after {trainer.global_step} updates")


if __name__ == "__main__":
    main()
