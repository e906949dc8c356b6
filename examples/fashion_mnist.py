"""Fashion-MNIST, for the examples that train on it; without its files, scikit-learn's digits.

The four files are those of https://github.com/zalandoresearch/fashion-mnist. Nothing is downloaded.
"""

import gzip
import os
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset


def load(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """The images for training and for testing, as rows of pixels from -0.5 to 0.5, with classes."""
    if (folder / "train-images-idx3-ubyte.gz").exists():
        return _read(folder, "train"), _read(folder, "t10k")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"No Fashion-MNIST in {folder}: training on scikit-learn's digits")
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float() / 16 - 0.5
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def _read(folder: Path, part: str) -> TensorDataset:
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
        images = torch.tensor(np.frombuffer(file.read(), np.uint8, offset=16))
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = torch.tensor(np.frombuffer(file.read(), np.uint8, offset=8))
    return TensorDataset(images.view(-1, 784) / 255 - 0.5, labels.long())
