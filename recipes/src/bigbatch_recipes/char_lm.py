"""A small causal transformer over characters: Shakespeare, or Python's own documentation.

A demonstration that needs no download, not a benchmark; the full settings are nanoGPT's, where
they apply. A sample is a window of the text; the windows of an epoch do
not overlap. The last tenth of the text is held out.

Source of the settings: A. Karpathy, nanoGPT, config/train_shakespeare_char.py and train.py.
"""

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
from bigbatch_recipes.datasets.files import DatasetLocation, text_of
from bigbatch_recipes.datasets.text import stdlib_text
from bigbatch_recipes.distributed_eval import all_reduce_sum, device_of, local_batches
from bigbatch_recipes.models.char_transformer import CharTransformer
from bigbatch_recipes.recipe import OURS, Data, LossOf, Recipe, Sweep, sourced
from bigbatch_recipes.settings import Settings
from bigbatch_recipes.vrgd_paper import CLIPS

NANOGPT = "nanoGPT's shakespeare_char"
_TRAIN_SHARE = 0.9  # of the characters


def _model(settings: Settings) -> nn.Module:
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


def _loss(settings: Settings) -> LossOf:
    return lambda model, batch: _cross_entropy(model, batch[0], "mean")


def _data(settings: Settings) -> Data:
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


def _example(settings: Settings, samples: int) -> tuple[Tensor]:
    return (torch.empty(samples, settings.count("length") + 1, dtype=torch.uint8, device="meta"),)


CHAR_LM = Recipe(
    name="char-lm",
    summary="small causal transformer over characters: Shakespeare, or Python's own texts",
    paper="a demonstration, of no paper",
    paper_scale={
        **sourced(NANOGPT, length=256, depth=6, heads=6, width=384, dropout=0.2),
        "epochs": (82, NANOGPT),  # 5,000 steps of 64 windows
        **sourced(NANOGPT, batch_size=64, base_batch=64, optimizer="adam", lr=1e-3),
        "lr_schedule": ("warm-up 6400 samples; cosine", NANOGPT),  # there to a tenth, here to 0
        **sourced(NANOGPT, weight_decay=0.1, decay_all=False, clip=1.0),
        **CLIPS,
        "device": ("cuda", OURS),
        "precision": ("bfloat16", NANOGPT),
        **sourced(OURS, target=0.3, min_batch=32, max_batch=1024, micro_batch=64),
        **sourced(OURS, virtual_ranks=2),
    },
    small={
        "length": 64,
        "depth": 2,
        "heads": 4,
        "width": 64,
        "dropout": 0.0,
        "epochs": 3,
        "lr": 3e-3,
        "lr_schedule": "warm-up 1000 samples; cosine",
        "max_batch": 512,
        "samples": 15_000,
    },
    paper_samples=3_921,
    minutes=1.4,
    origin=DatasetLocation(
        "tiny Shakespeare",
        folders=("tinyshakespeare",),
        files=("input.txt",),
        source="github.com/karpathy/char-rnn, data/tinyshakespeare",
        size="1,115,394 characters",
        otherwise="the documentation inside Python's standard library",
    ),
    arms={
        "fixed": {"policy": "fixed"},
        "simigrad": {"policy": "simigrad"},
        "simigrad-vr": {"policy": "simigrad", "optimizer": "vr-adam"},
    },
    sweep=Sweep(({"arm": ("fixed", "simigrad"), "lr": (1e-3, 3e-3, 1e-2)},), tuned=("lr",)),
    paper_sweep=Sweep(
        ({"arm": ("fixed", "simigrad", "simigrad-vr"), "lr": (5e-4, 1e-3, 2e-3)},), tuned=("lr",)
    ),
    higher_is_better=False,
    model=_model,
    loss=_loss,
    data=_data,
    example=_example,
)
