"""A small network on Fashion-MNIST by Accelerate, with a batch size that follows its gradients.

    python examples/accelerate_fashion_mnist.py
    torchrun --nproc_per_node 2 examples/accelerate_fashion_mnist.py

Without the files of Fashion-MNIST in the folder --data it trains on scikit-learn's digits.
"""

import argparse
from pathlib import Path

import fashion_mnist
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

import bigbatch as bb
from bigbatch.integrations.accelerate import adaptive_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default="data/fashion-mnist")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    accelerator = Accelerator(cpu=True)

    torch.manual_seed(0)
    data, test = fashion_mnist.load(options.data)
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
        with torch.no_grad():
            x, y = test.tensors
            accuracy = (model(x).argmax(1) == y).float().mean()
        progress = f"{record.step} steps, batch {record.batch_size}, loss {record.loss:.3f}"
        accelerator.print(f"epoch {epoch}: {progress}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
