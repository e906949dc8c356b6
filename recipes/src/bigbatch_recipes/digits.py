"""Handwritten digits that come with scikit-learn: 1,797 real images of 8 x 8, no download.

A demonstration on two cores, not a benchmark: every arm trains the same small network over the
same samples, with one learning rate for the base batch and the square root for any other.

Source of the data: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, 1998.
"""

from importlib import import_module
from typing import Any

import torch
from torch import nn

from bigbatch_recipes import image_classification
from bigbatch_recipes.datasets.files import DatasetLocation
from bigbatch_recipes.datasets.in_memory import InMemoryDataset
from bigbatch_recipes.image_classification import ImageBatch
from bigbatch_recipes.recipe import OURS, Data, Recipe, Sweep, sourced
from bigbatch_recipes.settings import Settings
from bigbatch_recipes.vrgd_paper import CLIPS

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


def _model(settings: Settings) -> nn.Module:
    return network(float(settings.task["dropout"])).to(_dtype(settings))


def _data(settings: Settings) -> Data:
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


def _example(settings: Settings, samples: int) -> ImageBatch:
    x = torch.empty(samples, 1, 8, 8, dtype=_dtype(settings), device="meta")
    return x, torch.empty(samples, dtype=torch.long, device="meta")


DIGITS = Recipe(
    name="digits",
    summary="small CNN on scikit-learn's handwritten digits: fixed, scheduled, measured batches",
    paper="a demonstration, of no paper",
    paper_scale={
        **sourced(OURS, epochs=25, target=0.3, min_batch=16, max_batch=512, batch_size=32),
        **sourced(OURS, base_batch=32, micro_batch=128, virtual_ranks=4, every=2, lr=0.02),
        **CLIPS,
        "dropout": (0.0, OURS),
        "double": (True, OURS),  # so that the curves are the same on 1, 2 and 4 ranks
    },
    small={},
    paper_samples=1_347,
    minutes=0.2,
    origin=DatasetLocation(
        "scikit-learn's digits", size="1,797 images of 8 x 8", otherwise="itself"
    ),
    arms={
        "fixed-32": {"policy": "fixed", "every": 8},  # does not decide by what it measures
        "fixed-512": {"policy": "fixed", "batch_size": 512, "every": 8},
        "schedule": {"policy": "schedule", "batch_schedule": "32, x2 every 5 epochs", "every": 8},
        "noise-scale": {
            "policy": "noise-scale",
            "smoothing": "4K samples",
            "warmup": "4K samples",
            "dead_band": 0.1,
        },
        "simigrad": {"policy": "simigrad"},
        "simigrad-vr": {"policy": "simigrad", "optimizer": "vr-momentum"},
    },
    sweep=Sweep(
        (
            {"policy": ("fixed",), "batch_size": (32, 128, 512), "lr": (0.01, 0.02, 0.04)},
            {"policy": ("simigrad",), "target": (0.1, 0.3, 0.5), "lr": (0.01, 0.02, 0.04)},
        ),
        tuned=("lr",),
    ),
    model=_model,
    loss=lambda _: image_classification.class_loss(),
    data=_data,
    example=_example,
)
