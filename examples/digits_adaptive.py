"""digits.py, with a batch that follows the gradient noise.

python examples/digits_adaptive.py FOLDER  # the folder gets a log
bigbatch report FOLDER
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb

EPOCHS, BATCH_SIZE, LR = 10, 8, 0.05


def main(log: str | None = None) -> None:
    torch.set_num_threads(1)  # so small a network gains nothing from more
    torch.manual_seed(0)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float() / 16
    train, test = slice(0, 1500), slice(1500, None)
    loader = DataLoader(
        TensorDataset(images[train], labels[train]), batch_size=BATCH_SIZE, shuffle=True
    )
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    training = bb.AdaptiveBatch(model, optimizer, loader, policy=bb.SimiGrad(0.2), log=log)
    for epoch in training.epochs(EPOCHS):
        for step in training:
            for x, y in step:
                step.backward(cross_entropy(model(x), y))
            record = step.update()
        with torch.no_grad():
            accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
        if epoch % 2 == 1:
            print(
                f"epoch {epoch + 1}: batch {record.batch_size}, {record.step} steps, "
                f"test accuracy {accuracy:.3f}"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
