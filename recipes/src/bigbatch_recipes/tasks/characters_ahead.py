"""A causal transformer that predicts characters, and its bits per character."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from bigbatch_recipes.datasets.characters import CHARACTERS, split_codes, windows_of
from bigbatch_recipes.datasets.files import text_of
from bigbatch_recipes.datasets.text import stdlib_text
from bigbatch_recipes.distributed_eval import all_reduce_sum, device_of, local_batches
from bigbatch_recipes.models.char_transformer import CharTransformer
from bigbatch_recipes.recipe import Data, LossOf
from bigbatch_recipes.settings import Settings

_TRAIN_SHARE = 0.9  # of the characters


def model(settings: Settings) -> nn.Module:
    """The network of the settings."""
    names = ("length", "width", "depth", "heads")
    length, width, depth, heads = (int(settings.task[name]) for name in names)
    dropout = float(settings.task["dropout"])
    return CharTransformer(
        CHARACTERS, length, width=width, depth=depth, heads=heads, dropout=dropout
    )


def _cross_entropy(model: nn.Module, windows: Tensor, reduction: str) -> Tensor:
    logits = model(windows[:, :-1].long())
    return functional.cross_entropy(
        logits.flatten(0, 1), windows[:, 1:].long().flatten(), reduction=reduction
    )


def loss(settings: Settings) -> LossOf:
    """The mean loss of a micro-batch."""
    return lambda model, batch: _cross_entropy(model, batch[0], "mean")


def data(settings: Settings) -> Data:
    """Training data, and what scores a model."""
    documents = [text_of(Path(settings.data) / "input.txt")] if settings.data else stdlib_text()
    length = int(settings.task["length"])
    train, test = (windows_of(codes, length) for codes in split_codes(documents, _TRAIN_SHARE))
    text = "Shakespeare" if settings.data else "Python's texts"
    scores_on = partial(_scores_on, settings=settings)
    return Data(
        train,
        scores_on(test, name=f"bits per character ({text})"),
        partial(scores_on, name="held-out bits per character"),
    )


def _scores_on(
    windows: Dataset[Any], *, name: str, settings: Settings
) -> Callable[[nn.Module], dict[str, float]]:
    return lambda model: {name: _bits(model, windows, settings)}


def _bits(model: nn.Module, test: Dataset[Any], settings: Settings) -> float:
    """Bits per character, each predicted from those before it in its window. Collective."""
    total = torch.zeros(2, dtype=torch.float64)
    for (windows,) in local_batches(test, settings):
        nats = _cross_entropy(model, windows, "sum")
        total += torch.tensor([nats.item(), windows[:, 1:].numel()], dtype=torch.float64)
    nats_sum, characters = all_reduce_sum(total.to(device_of(settings))).tolist()
    return float(nats_sum) / float(characters) / math.log(2)


def example(settings: Settings, samples: int) -> tuple[Tensor]:
    """A batch on the meta device."""
    return (torch.empty(samples, settings.count("length") + 1, dtype=torch.uint8, device="meta"),)
