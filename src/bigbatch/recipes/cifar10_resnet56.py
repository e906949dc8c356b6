"""ResNet-56 on CIFAR-10 with four optimizers and their variance-reduced twins: VRGD's table 5.

Source: Jiang et al., arXiv 2309.13681. Its table of rates, warm-ups and k is not public.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from bigbatch.recipes.data import cifar10
from bigbatch.recipes.data.columns import Columns, as_it_is
from bigbatch.recipes.data.drawn import some_drawn
from bigbatch.recipes.models.resnet import resnet_of_three_stages
from bigbatch.recipes.pictures import OfBytes, accuracies, class_loss, examples, shifted_and_flipped
from bigbatch.recipes.recipe import OURS, Data, Grid, LossOf, Recipe, Sweep
from bigbatch.recipes.settings import Settings, Value

_VRGD = "VRGD"
_TABLE = "VRGD, table 5"
_TENSORFLOW = "TensorFlow's official ResNet"
_STEPS = "warm-up 5 epochs; x0.1 at 91 and 136 epochs"
_COSINE = "warm-up 5 epochs; cosine"

_RATES = (0.25, 0.5, 1.0, 2.0, 4.0)  # times those of the bases

# each base with its rate for the base batch and its weight decay, all ours; a twin has the same
_BASES = {
    "momentum": {"lr": 0.1, "weight_decay": 2e-4},
    "adam": {"lr": 0.001, "weight_decay": 0.01},
    "lars": {"lr": 4.0, "weight_decay": 2e-4},
    "lamb": {"lr": 0.004, "weight_decay": 0.01},
}


def _arms() -> dict[str, dict[str, Value]]:
    """Each base, its twin with both upper clips, and momentum at the mean rates of its twins.

    Momentum at the same rate and momentum at the mean rate are the two controls for a twin whose
    factors shorten its steps; the other three bases do not see a factor that all weights share.
    """
    arms: dict[str, dict[str, Value]] = {}
    for base, own in _BASES.items():
        arms[base] = {"optimizer": base, **own}
        arms[f"vr-{base}"] = {"optimizer": f"vr-{base}", "r_max": 1.0, **own}
        arms[f"vr-{base}-10"] = {"optimizer": f"vr-{base}", "r_max": 10.0, **own}
    for twin in ("vr-momentum", "vr-momentum-10"):
        arms[f"momentum-like-{twin}"] = {**arms["momentum"], "lr_from": twin}
    return arms


def _grids(
    bases: Sequence[str], rates: Sequence[float], **others: tuple[Value, ...]
) -> tuple[Grid, ...]:
    """For each base its rates, without r and with it under both upper clips."""
    grids: list[Grid] = []
    for base in bases:
        lr, decay = _BASES[base]["lr"], _BASES[base]["weight_decay"]
        own = {"lr": tuple(lr * rate for rate in rates), "weight_decay": (decay,), **others}
        grids.append({"optimizer": (base,), **own})
        grids.append({"optimizer": (f"vr-{base}",), "r_max": (1.0, 10.0), **own})
    return tuple(grids)


def _model(settings: Settings) -> nn.Module:
    depth, width = int(settings.task["depth"]), int(settings.task["width"])
    network = resnet_of_three_stages(depth, width, cifar10.CLASSES)
    return OfBytes(network, cifar10.MEAN, cifar10.STD)


def _loss(settings: Settings) -> LossOf:
    return class_loss(float(settings.task["label_smoothing"]), shifted_and_flipped)


def _data(settings: Settings) -> Data:
    train, test = cifar10.read(Path(settings.data))
    seen = some_drawn(len(train), settings.samples, len(test))
    return Data(train, accuracies(test, settings, Columns(*train.__getitems__(seen))), as_it_is)


CIFAR10_RESNET56 = Recipe(
    name="cifar10-resnet56",
    summary="ResNet-56 on CIFAR-10: four optimizers, with and without variance reduction",
    paper="VRGD",
    full={
        "epochs": (182, _TENSORFLOW),
        "policy": ("fixed", _VRGD),
        "min_batch": (256, _TABLE),
        "max_batch": (8192, _TABLE),
        "batch_size": (8192, _TABLE),
        "base_batch": (128, _TENSORFLOW),
        "micro_batch": (1024, "VRGD: at least 8 devices"),
        "virtual_ranks": (8, "VRGD: at least 8 devices"),
        "optimizer": ("momentum", _TABLE),
        "lr": (0.1, OURS),
        "momentum": (0.9, _VRGD),
        "weight_decay": (2e-4, _TENSORFLOW),
        "decay_all": (True, _TENSORFLOW),
        "gamma": (0.1, _VRGD),
        "r_max": (1.0, "VRGD, equation 9"),
        "lr_scaling": ("sqrt", _VRGD),
        "lr_schedule": (_STEPS, "VRGD; the warm-up's length is ours"),
        "precision": ("float32", OURS),
        "device": ("cuda", OURS),
        "label_smoothing": (0.1, "VRGD; the amount is ours"),
        "depth": (56, _VRGD),
        "width": (16, "He et al. 2015"),
    },
    small={
        "samples": 5_000,
        "epochs": 12,
        "batch_size": 512,
        "lr_schedule": "warm-up 1 epoch; x0.1 at 8 and 11 epochs",
        "device": "cpu",
        "depth": 8,
        "width": 8,
    },
    full_samples=50_000,
    full_ranks=8,
    minutes=1.6,
    origin=cifar10.ORIGIN,
    arms=_arms(),
    sweep=Sweep(_grids(("momentum", "lamb"), _RATES[1:4:2], batch_size=(128, 1024)), ("lr",)),
    full_sweep=Sweep(
        _grids(
            tuple(_BASES),
            _RATES,
            batch_size=(256, 512, 1024, 2048, 4096, 8192),
            lr_schedule=(_STEPS, _COSINE),
        ),
        ("lr",),
    ),
    model=_model,
    loss=_loss,
    data=_data,
    example=examples(3, 32),
)
