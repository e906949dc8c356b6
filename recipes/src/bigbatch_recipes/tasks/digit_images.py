"""The network of the digits, and scikit-learn's images."""

from importlib import import_module
from typing import Any

import torch
from torch import nn

from bigbatch_recipes import image_classification
from bigbatch_recipes.datasets.in_memory import InMemoryDataset
from bigbatch_recipes.image_classification import ImageBatch
from bigbatch_recipes.recipe import Data, LossOf
from bigbatch_recipes.settings import Settings

_TEST_SHARE = 0.25
_SPLIT_SEED = 0  # one split for every seed and arm


def network(dropout: float = 0.25) -> nn.Module:
    """Two convolutions and one hidden layer, 72 thousand parameters; no BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(128, 10),
    )


def _dtype(settings: Settings) -> torch.dtype:
    return torch.float64 if settings.task["double"] else torch.float32


def model(settings: Settings) -> nn.Module:
    """The network of the settings."""
    return network(float(settings.task["dropout"])).to(_dtype(settings))


def data(settings: Settings) -> Data:
    """Training data, and what scores a model."""
    datasets: Any = import_module("sklearn.datasets")  # two seconds
    model_selection: Any = import_module("sklearn.model_selection")
    images, labels = datasets.load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=_dtype(settings)).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    train, test = (
        InMemoryDataset(x[indices], y[indices])
        for indices in model_selection.train_test_split(
            range(len(y)), test_size=_TEST_SHARE, stratify=labels, random_state=_SPLIT_SEED
        )
    )
    return image_classification.data_of(train, test, settings)


def loss(_: Settings) -> LossOf:
    """The mean cross-entropy of a micro-batch."""
    return image_classification.class_loss()


def example(settings: Settings, samples: int) -> ImageBatch:
    """A batch on the meta device."""
    x = torch.empty(samples, 1, 8, 8, dtype=_dtype(settings), device="meta")
    return x, torch.empty(samples, dtype=torch.long, device="meta")
