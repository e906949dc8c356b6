"""Small trainings that judge an advised batch size: their data, networks and targets.

No network has BatchNorm or dropout, every learning rate is constant, and samples are drawn with
replacement, so each step is one of independent samples. docs/decisions/0020 has the rule.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from bigbatch_recipes.datasets.characters import CHARACTERS, split_codes
from bigbatch_recipes.datasets.criteo_tsv import CATEGORIES, NUMBERS
from bigbatch_recipes.datasets.stdlib_text import stdlib_text
from bigbatch_recipes.datasets.synthetic_clicks import click_log
from bigbatch_recipes.models.char_transformer import CharTransformer

Samples = tuple[Tensor, ...]
"""Tensors whose dimension 0 is that of the samples."""

SIZES = 15  # of a sweep, each a factor of sqrt(2) from the next
_RATE_BATCH = 64  # batch size of a workload's first learning rate
_DATA_SEED = 0  # one data set for every seed of a training
_DIGITS_HELD_OUT, _COPIES, _PIXEL_NOISE = 450, 20, 0.25
_WINDOW = 16  # predicted characters of a sample
_CLICKS, _TABLE_ROWS, _FACTORS = 60_000, 200, 4
_TEACHER_SAMPLES, _TEACHER_INPUTS, _LABEL_NOISE = 60_000, 16, 0.5


@dataclass(frozen=True)
class Workload:
    """A training with a target of its held-out loss.

    Args:
        name: its name on the command line and in the table.
        data: training samples and held-out samples, the same in every call.
        network: a new network; its weights are drawn from torch's generator.
        optimizer: takes the parameters and the learning rate.
        loss: mean loss of a batch.
        present: the batch size at which the advice is measured.
        smallest: the smallest batch size of the sweep.
        rate: where the search for the learning rate of 64 samples a step starts; that of another
            size starts at a rate that grows as the square root of the size.
        target: held-out loss at which a training has ended.
        max_steps: steps after which a training has failed.
        max_samples: samples after which a training has failed.
    """

    name: str
    data: Callable[[], tuple[Samples, Samples]]
    network: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer]
    loss: Callable[[nn.Module, Samples], Tensor]
    present: int
    smallest: int
    rate: float
    target: float
    max_steps: int
    max_samples: int

    def sizes(self) -> list[int]:
        """The batch sizes of the sweep, each a factor of sqrt(2) from the next."""
        return [round(self.smallest * 2 ** (n / 2)) for n in range(SIZES)]

    def first_rate(self, batch_size: int) -> float:
        """The learning rate at which the search of a batch size starts."""
        return self.rate * math.sqrt(batch_size / _RATE_BATCH)

    def step_limit(self, batch_size: int) -> int:
        """Steps after which a training of this batch size has failed."""
        return min(self.max_steps, self.max_samples // batch_size)


@cache
def _noisy_digits() -> tuple[Samples, Samples]:
    """Copies of each image, each with other noise, so that no network learns them by heart."""
    datasets: Any = import_module("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(_DATA_SEED)
    order = torch.randperm(len(labels), generator=generator)
    x = torch.tensor(images, dtype=torch.float32)[order].reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)[order]

    def copies(images: Tensor, labels: Tensor, count: int) -> Samples:
        many = images.repeat(count, 1, 1, 1)
        noise = torch.randn(many.shape, generator=generator)
        return many + _PIXEL_NOISE * noise, labels.repeat(count)

    held_out, training = slice(_DIGITS_HELD_OUT), slice(_DIGITS_HELD_OUT, None)
    return copies(x[training], y[training], _COPIES), copies(x[held_out], y[held_out], 1)


@cache
def _characters() -> tuple[Samples, Samples]:
    training, rest = split_codes(stdlib_text(), 0.95)
    held_out = rest.unfold(0, _WINDOW + 1, _WINDOW)
    generator = torch.Generator().manual_seed(_DATA_SEED)
    chosen = torch.randperm(len(held_out), generator=generator)[:128]
    return (training.unfold(0, _WINDOW + 1, 1),), (held_out[chosen],)


@cache
def _clicks() -> tuple[Samples, Samples]:
    rows = click_log(_CLICKS).rows
    numbers = torch.from_numpy(rows["numbers"].copy())
    codes = torch.from_numpy(rows["codes"].astype("int64")) % _TABLE_ROWS
    codes += torch.arange(CATEGORIES) * _TABLE_ROWS  # all tables are one
    labels = torch.from_numpy(rows["label"].astype("float32"))
    columns = (numbers, codes, labels)
    return tuple(c[4_000:] for c in columns), tuple(c[:4_000] for c in columns)


@cache
def _teacher() -> tuple[Samples, Samples]:
    generator = torch.Generator().manual_seed(_DATA_SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = normal(_TEACHER_SAMPLES, _TEACHER_INPUTS)
    hidden = torch.tanh(x @ normal(_TEACHER_INPUTS, 8) / _TEACHER_INPUTS**0.5 * 1.5)
    clean = hidden @ normal(8, 1)
    y = clean + _LABEL_NOISE * normal(*clean.shape)
    return (x[2_000:], y[2_000:]), (x[:2_000], clean[:2_000])


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _deep_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10)
    )


def _softmax() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.GroupNorm(2, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def _transformer() -> nn.Module:
    return CharTransformer(CHARACTERS, _WINDOW, width=32, depth=1, heads=2)


class _WindowNetwork(nn.Module):
    """Each character from the four before it, through one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(CHARACTERS, 16)
        self.hidden = nn.Linear(4 * 16, 96)
        self.out = nn.Linear(96, CHARACTERS)

    def forward(self, codes: Tensor) -> Tensor:
        """Logits of the next character, (samples, positions, characters)."""
        windows = self.codes(functional.pad(codes, (3, 0))).unfold(1, 4, 1)
        logits: Tensor = self.out(torch.tanh(self.hidden(windows.flatten(2))))
        return logits


def _deep_student() -> nn.Module:
    return nn.Sequential(
        nn.Linear(_TEACHER_INPUTS, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1)
    )


def _student() -> nn.Module:
    return nn.Sequential(nn.Linear(_TEACHER_INPUTS, 64), nn.Tanh(), nn.Linear(64, 1))


class _ClickNetwork(nn.Module):
    """Embeddings of the categories and the numbers, through one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.Embedding(CATEGORIES * _TABLE_ROWS, _FACTORS)
        nn.init.normal_(self.tables.weight, std=0.1)
        self.hidden = nn.Linear(NUMBERS + CATEGORIES * _FACTORS, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Logits of a click, (samples,)."""
        x = torch.cat([numbers, self.tables(codes).flatten(1)], 1)
        logits: Tensor = self.out(functional.relu(self.hidden(x)))
        return logits.squeeze(1)


def _class_loss(model: nn.Module, batch: Samples) -> Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y)


def _next_character_loss(model: nn.Module, batch: Samples) -> Tensor:
    codes = batch[0].long()
    logits: Tensor = model(codes[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), codes[:, 1:].flatten())


def _click_loss(model: nn.Module, batch: Samples) -> Tensor:
    numbers, codes, labels = batch
    return functional.binary_cross_entropy_with_logits(model(numbers, codes), labels)


def _squared_loss(model: nn.Module, batch: Samples) -> Tensor:
    x, y = batch
    return functional.mse_loss(model(x), y)


_FIRST = (
    Workload(
        name="digits-mlp",
        data=_noisy_digits,
        network=_mlp,
        optimizer=lambda parameters, rate: SGD(parameters, rate, momentum=0.9),
        loss=_class_loss,
        present=16,
        smallest=8,
        rate=0.1,
        target=0.25,
        max_steps=15_000,
        max_samples=1_500_000,
    ),
    Workload(
        name="digits-cnn",
        data=_noisy_digits,
        network=_cnn,
        optimizer=lambda parameters, rate: Adam(parameters, rate),
        loss=_class_loss,
        present=512,
        smallest=4,
        rate=0.007,
        target=0.3,
        max_steps=2_000,
        max_samples=200_000,
    ),
    Workload(
        name="characters",
        data=_characters,
        network=_transformer,
        optimizer=lambda parameters, rate: AdamW(parameters, rate, weight_decay=0.01),
        loss=_next_character_loss,
        present=64,
        smallest=4,
        rate=0.007,
        target=2.45,
        max_steps=2_000,
        max_samples=100_000,
    ),
    Workload(
        name="clicks",
        data=_clicks,
        network=_ClickNetwork,
        optimizer=lambda parameters, rate: Adagrad(parameters, rate),
        loss=_click_loss,
        present=2048,
        smallest=16,
        rate=0.025,
        target=0.488,
        max_steps=8_000,
        max_samples=2_000_000,
    ),
    Workload(
        name="teacher",
        data=_teacher,
        network=_student,
        optimizer=lambda parameters, rate: RMSprop(parameters, rate),
        loss=_squared_loss,
        present=64,
        smallest=16,
        rate=0.0028,
        target=0.012,
        max_steps=20_000,
        max_samples=4_000_000,
    ),
)
_SECOND = (
    Workload(
        name="digits-deep",
        data=_noisy_digits,
        network=_deep_mlp,
        optimizer=lambda parameters, rate: Adam(parameters, rate),
        loss=_class_loss,
        present=32,
        smallest=8,
        rate=0.004,
        target=0.25,
        max_steps=4_000,
        max_samples=400_000,
    ),
    Workload(
        name="digits-softmax",
        data=_noisy_digits,
        network=_softmax,
        optimizer=lambda parameters, rate: SGD(parameters, rate),
        loss=_class_loss,
        present=256,
        smallest=4,
        rate=3.0,
        target=0.3,
        max_steps=10_000,
        max_samples=400_000,
    ),
    Workload(
        name="characters-window",
        data=_characters,
        network=_WindowNetwork,
        optimizer=lambda parameters, rate: SGD(parameters, rate, momentum=0.9),
        loss=_next_character_loss,
        present=16,
        smallest=4,
        rate=0.7,
        target=2.35,
        max_steps=4_000,
        max_samples=150_000,
    ),
    Workload(
        name="clicks-adam",
        data=_clicks,
        network=_ClickNetwork,
        optimizer=lambda parameters, rate: Adam(parameters, rate),
        loss=_click_loss,
        present=64,
        smallest=16,
        rate=0.0015,
        target=0.488,
        max_steps=4_000,
        max_samples=1_000_000,
    ),
    Workload(
        name="clicks-adam-again",
        data=_clicks,
        network=_ClickNetwork,
        optimizer=lambda parameters, rate: Adam(parameters, rate),
        loss=_click_loss,
        present=64,
        smallest=16,
        rate=0.001,
        target=0.495,
        max_steps=4_000,
        max_samples=1_000_000,
    ),
    Workload(
        name="teacher-deep",
        data=_teacher,
        network=_deep_student,
        optimizer=lambda parameters, rate: AdamW(parameters, rate, weight_decay=0.01),
        loss=_squared_loss,
        present=1024,
        smallest=16,
        rate=0.002,
        target=0.06,
        max_steps=8_000,
        max_samples=2_000_000,
    ),
)
FIRST, SECOND = ([workload.name for workload in chosen] for chosen in (_FIRST, _SECOND))
WORKLOADS = {workload.name: workload for workload in (*_FIRST, *_SECOND)}
