"""ResNet-56 on CIFAR-10 with four optimizers and their variance-reduced versions.

VRGD's table 5 (warm-up, label smoothing, cosine) and figure 2 (x0.1 twice, without either).

Source: Jiang et al., arXiv 2309.13681. Its table of rates, warm-ups and k is not public.
"""

from collections.abc import Iterable

from bigbatch_recipes.datasets import locations
from bigbatch_recipes.recipe import (
    OURS,
    Arm,
    Arms,
    Grid,
    Recipe,
    Result,
    Rows,
    Sweep,
    sourced,
    task,
)
from bigbatch_recipes.settings import Value
from bigbatch_recipes.vrgd_paper import CLIPS, REPEATS, TO_TEN, VRGD

_TABLE = f"{VRGD}, table 5"
_TENSORFLOW = "TensorFlow's official ResNet"
_FIGURE = f"{VRGD}, figure 2"

_RATES = (0.25, 0.5, 1.0, 2.0, 4.0)  # times those of the bases

# of each base for the base batch, ours, and of its VR version too
_LR = {"momentum": 0.1, "adam": 0.001, "lars": 4.0, "lamb": 0.004}
_DECAY: Rows = {
    "momentum": (2e-4, _TENSORFLOW),
    "adam": (0.01, OURS),
    "lars": (2e-4, _TENSORFLOW),
    "lamb": (0.01, OURS),
}


def _arms(base: str) -> Arms:
    """A base, its VR version with both upper clips, and momentum at their mean rates.

    Momentum at the same rate and momentum at the mean rate are the two controls for a VR version,
    whose factors shorten its steps; the other three bases are invariant to a common factor.
    """
    base_settings: Arm = {"lr": _LR[base], "weight_decay": _DECAY[base]}
    plain: Arm = {"optimizer": (base, _TABLE), **base_settings}
    vr: Arm = {"optimizer": (f"vr-{base}", _TABLE), **base_settings}
    vr_arms: Arms = {
        f"vr-{base}": {**vr, "r_max": CLIPS["r_max"]},
        f"vr-{base}-10": {**vr, "r_max": TO_TEN},
    }
    controlled = vr_arms if base == "momentum" else ()
    controls: Arms = {
        f"{base}-like-{name}": {**plain, "lr_control_from": name} for name in controlled
    }
    return {base: plain, **vr_arms, **controls}


def _grids(
    bases: Iterable[str], rates: Iterable[float], **fixed: tuple[Value, ...]
) -> tuple[Grid, ...]:
    return tuple(
        {"arm": tuple(_arms(base)), "lr": tuple(_LR[base] * rate for rate in rates), **fixed}
        for base in bases
    )


CIFAR10_RESNET56 = Recipe(
    name="cifar10-resnet56",
    summary="ResNet-56 on CIFAR-10: four optimizers, with and without variance reduction",
    paper="VRGD",
    paper_scale={
        "epochs": (182, _TENSORFLOW),
        "policy": ("fixed", VRGD),
        **sourced(_TABLE, min_batch=256, max_batch=8192, batch_size=8192),
        "base_batch": (128, _TENSORFLOW),
        "micro_batch": (1024, "VRGD: at least 8 devices"),
        "virtual_ranks": (8, "VRGD: at least 8 devices"),
        "optimizer": ("momentum", _TABLE),
        "lr": (0.1, OURS),
        "momentum": (0.9, VRGD),
        **sourced(_TENSORFLOW, weight_decay=2e-4, decay_all=True),
        **CLIPS,
        "lr_scaling": ("sqrt", VRGD),
        "lr_schedule": ("warm-up 5 epochs; cosine", f"{_TABLE}; the warm-up's length is ours"),
        **sourced(OURS, precision="float32", device="cuda"),
        "label_smoothing": (0.1, f"{_TABLE}; the amount is ours"),
        "depth": (56, VRGD),
        "width": (16, "He et al. 2015"),
    },
    small={
        "samples": 5_000,
        "epochs": 12,
        "batch_size": 512,
        "lr_schedule": "warm-up 1 epoch; x0.1 at 8 and 11 epochs",
        "depth": 8,
        "width": 8,
    },
    paper_seeds=REPEATS,
    results={
        "table-5": Result(),
        "figure-2": Result(
            {
                "lr_schedule": ("x0.1 at 91 and 136 epochs", _FIGURE),
                "label_smoothing": (0.0, _FIGURE),
            }
        ),
    },
    paper_samples=50_000,
    paper_ranks=8,
    parameters=(19_218, 853_018),
    minutes=1.6,
    origin=locations.CIFAR10,
    arms={name: arm for base in _LR for name, arm in _arms(base).items()},
    small_sweep=Sweep(_grids(("momentum", "lamb"), _RATES[1:4:2], batch_size=(128, 1024)), ("lr",)),
    paper_sweep=Sweep(_grids(_LR, _RATES, batch_size=(256, 512, 1024, 2048, 4096, 8192)), ("lr",)),
    **task("cifar10_images", model="three_stages", data="data_with_gap"),
)
