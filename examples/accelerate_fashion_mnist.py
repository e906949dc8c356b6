"""A small network on Fashion-MNIST by accelerate, with a batch size that follows gradients.

    python examples/accelerate_fashion_mnist.py
    accelerate launch --num-processes 2 --cpu examples/accelerate_fashion_mnist.py

Reads `train-images-idx3-ubyte.gz` and its labels from the folder --data; without these files it
reads scikit-learn's digits. It downloads nothing.
"""

import argparse
import gzip
from pathlib import Path

import numpy
import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.integrations.accelerate import adaptive_batch


def read(folder: Path, samples: int) -> TensorDataset:
    """Images as rows of standardized pixels, and their classes."""
    try:
        with gzip.open(folder / "train-images-idx3-ubyte.gz") as file:
            images = numpy.frombuffer(file.read(), numpy.uint8, offset=16).reshape(-1, 784) / 255
        with gzip.open(folder / "train-labels-idx1-ubyte.gz") as file:
            labels = numpy.frombuffer(file.read(), numpy.uint8, offset=8)
    except FileNotFoundError:
        images, labels = load_digits(return_X_y=True)
        images = images / 16
    x = torch.tensor(images[:samples], dtype=torch.float32)
    return TensorDataset((x - x.mean()) / x.std(), torch.tensor(labels[:samples]).long())


def main() -> bb.AdaptiveBatch:
    """Trains, and prints the end of each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("../shared/data/fashion-mnist"))
    parser.add_argument("--samples", type=int, default=12_000)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    accelerator = Accelerator(cpu=True)

    torch.manual_seed(0)
    data = read(options.data, options.samples)
    model = nn.Sequential(nn.Linear(data.tensors[0].shape[1], 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    policy = bb.SimiGrad(target=0.6, min_batch=32, max_batch=1024)
    train = adaptive_batch(accelerator, model, optimizer, loader, policy=policy)
    train.scheduler = CosineAnnealingLR(optimizer.optimizer, train.base_steps(options.epochs))
    for epoch in train.epochs(options.epochs):
        for step in train:
            for x, y in step:
                step.backward(cross_entropy(model(x), y))
            record = step.update()
        accelerator.print(f"epoch {epoch + 1}: batch {record.batch_size}, loss {record.loss:.3f}")
    return train


if __name__ == "__main__":
    main()
