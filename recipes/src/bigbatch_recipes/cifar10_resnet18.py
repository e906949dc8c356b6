"""ResNet-18 on CIFAR-10 with batches held at a gradient similarity: SimiGrad's first experiment.

Source: Qin et al., SimiGrad, NeurIPS 2021, and its code, github.com/HeyangQin/SimiGrad.
"""

from bigbatch_recipes.datasets import locations
from bigbatch_recipes.recipe import OURS, Grid, Recipe, Sweep, sourced, task
from bigbatch_recipes.vrgd_paper import CLIPS

_SIMIGRAD = "SimiGrad's code"
_GRID = "SimiGrad's grid"
_STEPS = "x0.1 at 80 and 120 epochs"

_TARGETS = tuple(hundredths / 100 for hundredths in range(21))
_MIN_BATCHES = (32, 64, 128, 256, 512, 1024)
_RATES = (0.025, 0.05, 0.1, 0.2, 0.4)
_SIMIGRAD_GRID: Grid = {"policy": ("simigrad",)}


CIFAR10_RESNET18 = Recipe(
    name="cifar10-resnet18",
    summary="ResNet-18 on CIFAR-10: batches held at a similarity, and fixed ones",
    paper="SimiGrad",
    paper_scale={
        "epochs": (200, _SIMIGRAD),
        **sourced(_GRID, target=0.2, min_batch=128, max_batch=4096),
        **sourced(_SIMIGRAD, batch_size=128, base_batch=128, micro_batch=512),
        "virtual_ranks": (4, "SimiGrad's code: 128 samples are 4 ranks with 32"),
        **sourced(_SIMIGRAD, optimizer="momentum", lr=0.1, momentum=0.9, weight_decay=5e-4),
        **sourced(_SIMIGRAD, decay_all=True),
        **CLIPS,
        **sourced(_SIMIGRAD, lr_scaling="sqrt", lr_schedule=_STEPS, precision="float32"),
        "device": ("cuda", OURS),
        **sourced(_SIMIGRAD, depth=18, width=64),
    },
    small={
        "samples": 5_000,
        "epochs": 10,
        "max_batch": 1024,
        "lr_schedule": "x0.1 at 6 and 9 epochs",
        "depth": 10,
        "width": 8,
    },
    paper_samples=50_000,
    paper_ranks=4,
    parameters=(78_002, 11_173_962),
    minutes=1.5,
    origin=locations.CIFAR10,
    arms={
        "fixed-128": {"policy": "fixed"},
        "fixed-1024-linear": {"policy": "fixed", "batch_size": 1024, "lr_scaling": "linear"},
        "fixed-1024-sqrt": {"policy": "fixed", "batch_size": 1024},
        "simigrad": {"policy": "simigrad"},
        "simigrad-vr": {"policy": "simigrad", "optimizer": "vr-momentum"},
    },
    small_sweep=Sweep(
        (
            {**_SIMIGRAD_GRID, "target": (0.1, 0.4), "min_batch": (64, 256), "lr": _RATES[1::2]},
            {
                "policy": ("fixed",),
                "batch_size": (128, 256, 512, 1024),
                "lr_scaling": ("sqrt", "linear"),
                "lr": _RATES[1::2],
            },
        ),
        tuned=("lr",),
    ),
    paper_sweep=Sweep(
        (  # 609 points of SimiGrad, then fixed batches; these with rates that are ours
            {
                **_SIMIGRAD_GRID,
                "target": _TARGETS,
                "max_batch": (1024,),
                "min_batch": _MIN_BATCHES[:-1],
            },
            {
                **_SIMIGRAD_GRID,
                "target": _TARGETS,
                "max_batch": (2048, 4096, 8192, 16384),
                "min_batch": _MIN_BATCHES,
            },
            {
                "policy": ("fixed",),
                "batch_size": tuple(128 << power for power in range(9)),
                "lr_scaling": ("linear", "sqrt"),
                "lr_schedule": (f"warm-up 11 epochs; {_STEPS}",),
                "lr": _RATES,
            },
        ),
        tuned=("lr",),
    ),
    **task("cifar10_images", model="basic_blocks"),
)
