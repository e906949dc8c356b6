"""A small causal transformer over characters: Shakespeare, or what Python says of itself.

A demonstration that needs no download, not a benchmark; the full settings are those of a model that
many know, as far as they carry over. A sample is a window of the text; the windows of an epoch do
not overlap. The last tenth of the text is held out.

Source of the settings: A. Karpathy, nanoGPT, config/train_shakespeare_char.py and train.py.
"""

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from bigbatch.experiments.datasets.characters import CHARACTERS, first_and_rest, windows_of
from bigbatch.experiments.datasets.files import text_of
from bigbatch.experiments.datasets.in_memory import InMemoryDataset
from bigbatch.experiments.datasets.location import DatasetLocation
from bigbatch.experiments.datasets.stdlib_text import stdlib_text
from bigbatch.experiments.distributed_eval import device_of, share_of, summed
from bigbatch.experiments.models.char_transformer import CharTransformer
from bigbatch.experiments.recipe import OURS, Data, LossOf, Recipe, Sweep
from bigbatch.experiments.settings import Settings
from bigbatch.experiments.vrgd_paper import CLIPS
from bigbatch.setting_types import Count, check_setting

NANOGPT = "nanoGPT's shakespeare_char"
_TRAINED = 0.9  # of the characters


def _model(settings: Settings) -> nn.Module:
    task = settings.task
    return CharTransformer(
        CHARACTERS,
        int(task["length"]),
        width=int(task["width"]),
        depth=int(task["depth"]),
        heads=int(task["heads"]),
        dropout=float(task["dropout"]),
    )


def _surprise(model: nn.Module, windows: Tensor, reduction: str) -> Tensor:
    """Of each next character, in nats."""
    logits = model(windows[:, :-1].long())
    return functional.cross_entropy(
        logits.flatten(0, 1), windows[:, 1:].long().flatten(), reduction=reduction
    )


def _loss(settings: Settings) -> LossOf:
    return lambda model, batch: _surprise(model, batch[0], "mean")


def _data(settings: Settings) -> Data:
    documents = [text_of(Path(settings.data) / "input.txt")] if settings.data else stdlib_text()
    length = int(settings.task["length"])
    train, test = (windows_of(codes, length) for codes in first_and_rest(documents, _TRAINED))
    text = "Shakespeare" if settings.data else "Python's texts"
    name = f"bits per character ({text})"  # held out
    return Data(train, lambda model: {name: _bits(model, test, settings)})


def _bits(model: nn.Module, test: InMemoryDataset, settings: Settings) -> float:
    """Per character, each predicted from those before it in its window. Collective."""
    total = torch.zeros(2, dtype=torch.float64)
    for (windows,) in share_of(test, settings):
        nats = _surprise(model, windows, "sum")
        total += torch.tensor([nats.item(), windows[:, 1:].numel()], dtype=torch.float64)
    nats_of_all, characters = summed(total.to(device_of(settings))).tolist()
    return float(nats_of_all) / float(characters) / math.log(2)


def _example(settings: Settings, samples: int) -> tuple[Tensor]:
    length = int(settings.task["length"])
    check_setting("length", length, Count)
    return (torch.empty(samples, length + 1, dtype=torch.uint8, device="meta"),)


CHAR_LM = Recipe(
    name="char-lm",
    summary="small causal transformer over characters: Shakespeare, or Python's own texts",
    paper="a demonstration, of no paper",
    paper_scale={
        "length": (256, NANOGPT),
        "depth": (6, NANOGPT),
        "heads": (6, NANOGPT),
        "width": (384, NANOGPT),
        "dropout": (0.2, NANOGPT),
        "epochs": (82, NANOGPT),  # 5,000 steps of 64 windows
        "batch_size": (64, NANOGPT),
        "base_batch": (64, NANOGPT),
        "optimizer": ("adam", NANOGPT),
        "lr": (1e-3, NANOGPT),
        "lr_schedule": ("warm-up 6400 samples; cosine", NANOGPT),  # there to a tenth, here to 0
        "weight_decay": (0.1, NANOGPT),
        "decay_all": (False, NANOGPT),
        "clip": (1.0, NANOGPT),
        **CLIPS,
        "device": ("cuda", OURS),
        "precision": ("bfloat16", NANOGPT),
        "target": (0.3, OURS),
        "min_batch": (32, OURS),
        "max_batch": (1024, OURS),
        "micro_batch": (64, OURS),
        "virtual_ranks": (2, OURS),
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
        "device": "cpu",
        "precision": "float32",
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
