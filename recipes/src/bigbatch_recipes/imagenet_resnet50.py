"""ResNet-50 on ImageNet: SimiGrad's batches held at a similarity, VRGD's LARS up to 96k samples.

Source: Qin et al., SimiGrad, NeurIPS 2021, and its code, github.com/HeyangQin/SimiGrad, of NVIDIA's
ResNet50 v1.5; Jiang et al., VRGD, arXiv 2309.13681, whose rates and warm-ups are not public.
"""

from bigbatch_recipes.datasets import locations
from bigbatch_recipes.recipe import OURS, Arm, Grid, Recipe, Result, Sweep, sourced, task
from bigbatch_recipes.vrgd_paper import CLIPS, REPEATS, TO_TEN, VRGD

_SIMIGRAD, _JABAS = "SimiGrad's code", "JABAS's example of SimiGrad"
_SIMIGRAD_GRID: Grid = {"policy": ("simigrad",)}
_FIXED_GRID: Grid = {"policy": ("fixed",)}
_TABLE: Arm = {"policy": ("fixed", VRGD), "momentum": (0.9, VRGD)}
_VR_LARS: Arm = {"optimizer": ("vr-lars", VRGD), **_TABLE, "lr": 8.0}
_TABLE_2 = {"momentum": 0.8, "lamb": 0.01, "lars": 8.0, "vr-lars": 8.0, "vr-lars-10": 8.0}  # lr
_BATCHES = tuple(1024 * thousands for thousands in (2, 4, 8, 16, 32, 64, 96))
_GRIDS: list[Grid] = [
    {"arm": (arm,), "batch_size": _BATCHES, "lr": (lr / 2, lr, 2 * lr)}
    for arm, lr in _TABLE_2.items()
]


IMAGENET_RESNET50 = Recipe(
    name="imagenet-resnet50",
    summary="ResNet-50 on ImageNet: batches held at a similarity; LARS with variance reduction",
    paper="SimiGrad and VRGD",
    paper_scale={
        "epochs": (90, _SIMIGRAD),
        "target": (0.1, _JABAS),
        "min_batch": (2048, _SIMIGRAD),
        "max_batch": (32768, _JABAS),
        **sourced(_SIMIGRAD, batch_size=2048, base_batch=2048, micro_batch=64),
        "virtual_ranks": (16, "SimiGrad's code: 2048 samples are 16 ranks with 128"),
        **sourced(_SIMIGRAD, optimizer="momentum", lr=2.048, momentum=0.875),
        **sourced(_SIMIGRAD, weight_decay=2**-15, decay_all=False),
        **CLIPS,
        "lr_scaling": ("sqrt", "both papers"),
        **sourced(_SIMIGRAD, lr_schedule="warm-up 8 epochs; cosine", label_smoothing=0.1),
        **sourced(_SIMIGRAD, classes=1000, size=224, resize=256),
        "smallest_part": (0.08, "Szegedy et al. 2014, as SimiGrad's code"),
        **sourced(_SIMIGRAD, depth=50, width=64),
        "device": ("cuda", OURS),
        "precision": ("bfloat16", OURS),  # SimiGrad's scripts: float32
        "workers": (12, OURS),
    },
    small={
        "samples": 10_000,
        "epochs": 5,
        "min_batch": 64,
        "max_batch": 1024,
        "batch_size": 128,  # of the base of 2048, with the root of its rate
        "virtual_ranks": 2,
        "lr_schedule": "warm-up 1 epoch; cosine",
        "classes": 20,
        "size": 64,
        "resize": 64,
        "smallest_part": 0.35,
        "depth": 14,
        "width": 12,
    },
    paper_seeds=REPEATS,
    results={"table-2": Result(arms=tuple(_TABLE_2))},
    paper_samples=1_281_167,
    paper_ranks=16,
    parameters=(293_888, 25_557_032),
    minutes=1.3,
    origin=locations.IMAGENET,
    arms={
        "fixed": {"policy": "fixed"},
        "simigrad": {"policy": "simigrad"},
        "momentum": {"optimizer": ("momentum", f"{VRGD}, table 2"), **_TABLE, "lr": 0.8},
        "lamb": {"optimizer": ("lamb", f"{VRGD}, table 2"), **_TABLE, "lr": 0.01},
        "lars": {"optimizer": ("lars", VRGD), **_TABLE, "lr": 8.0},
        "vr-lars": {"r_max": CLIPS["r_max"], **_VR_LARS},
        "vr-lars-10": {"r_max": TO_TEN, **_VR_LARS},
    },
    small_sweep=Sweep(
        ({**_SIMIGRAD_GRID, "target": (0.05, 0.1, 0.2)}, {**_FIXED_GRID, "batch_size": (128, 512)})
    ),
    paper_sweep=Sweep(
        (  # SimiGrad's scripts take target and bounds as arguments; these, and the rates, are ours
            {**_SIMIGRAD_GRID, "target": (0.05, 0.1, 0.2, 0.4), "max_batch": (8192, 32768)},
            *_GRIDS,
        ),
        tuned=("lr",),
    ),
    **task("imagenet_images"),
)
