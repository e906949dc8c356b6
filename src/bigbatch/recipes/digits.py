"""Handwritten digits that come with scikit-learn: 1,797 real images of 8 x 8, no download.

A demonstration on two cores, not a benchmark: every arm trains the same small network over the
same samples, with one learning rate for the base batch and the square root for any other.

Source of the data: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, 1998.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from bigbatch.act.ledger import SampleLedger
from bigbatch.recipes.recipe import Recipe, Settings, Task

_TEST_SHARE = 0.25
_SPLIT_SEED = 0  # one split for every seed and arm


def build(settings: Settings, *, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Task:
    """The network, its batches and its test; draws from the generators as they stand."""
    x_train, x_test, y_train, y_test = _split(dtype)
    model = network(dropout).to(dtype)
    data = TensorDataset(x_train, y_train)
    loader = DataLoader(data, settings.base_batch, sampler=SampleLedger(data, seed=settings.seed))

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return functional.cross_entropy(model(x), y)

    def accuracy() -> float:
        model.eval()
        with torch.no_grad():
            right = (model(x_test).argmax(1) == y_test).double().mean()
        model.train()
        return float(right)

    return Task(model, loader, loss_of, accuracy)


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


def _split(dtype: torch.dtype) -> list[Tensor]:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=dtype).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    train, test = train_test_split(
        range(len(y)), test_size=_TEST_SHARE, stratify=labels, random_state=_SPLIT_SEED
    )
    return [x[train], x[test], y[train], y[test]]


DIGITS = Recipe(
    name="digits",
    summary="small CNN on scikit-learn's handwritten digits: fixed, scheduled, measured batches",
    settings=Settings(
        recipe="digits",
        epochs=25,
        target=0.3,
        min_batch=16,
        max_batch=512,
        batch_size=32,
        base_batch=32,
        micro_batch=128,
        virtual_ranks=4,
        lr=0.02,
        threads=1,  # so small a network gains nothing from more, and on a busy machine loses much
    ),
    arms={
        "fixed-32": {"policy": "fixed"},
        "fixed-512": {"policy": "fixed", "batch_size": 512},
        "schedule": {"policy": "schedule: 32, x2 every 5 epochs"},
        "noise-scale": {
            "policy": "noise-scale",
            "smoothing": 4000.0,
            "warm_up": 4000.0,
            "dead_band": 0.1,
        },
        "simigrad": {"policy": "simigrad"},
        "simigrad-vr": {"policy": "simigrad", "optimizer": "vr-momentum"},
    },
    build=build,
)
