"""DLRM on Criteo's click logs: one epoch of SGD and VR-SGD with batches of 32 to 512 thousand.

The model, the batches, one epoch, warm-up and polynomial decay are the paper's. All other settings
are those of DLRM's published code for the terabyte log, or ours.
"""

from bigbatch_recipes.datasets import locations
from bigbatch_recipes.recipe import OURS, Arms, Grid, Recipe, Sweep, sourced, task
from bigbatch_recipes.vrgd_paper import CLIPS, REPEATS, TO_TEN, VRGD

CODE = "DLRM's code, dlrm_s_criteo_terabyte.sh"
_ARMS: Arms = {
    "sgd": {},
    "vr-sgd": {"optimizer": ("vr-sgd", VRGD)},
    "vr-sgd-10": {"optimizer": ("vr-sgd", VRGD), "r_max": TO_TEN},
    "vr-sgd-tables": {"optimizer": ("vr-sgd", VRGD), "vr_tables": True},
    "sgd-like-vr-sgd": {"lr_control_from": "vr-sgd"},
    "sgd-like-vr-sgd-10": {"lr_control_from": "vr-sgd-10"},
}
_ALL: Grid = {"arm": tuple(_ARMS)}
_BATCHES = (32_768, 65_536, 131_072, 262_144, 524_288)


DLRM_CRITEO = Recipe(
    name="dlrm",
    summary="DLRM on Criteo's click logs: SGD and VR-SGD, with VR in the tables and without",
    paper="VRGD",
    paper_scale={
        **sourced(VRGD, epochs=1, policy="fixed", batch_size=32_768, min_batch=32_768),
        **sourced(VRGD, max_batch=524_288, base_batch=32_768),
        "micro_batch": (4_096, OURS),  # 8 groups of the smallest batch, 128 of the largest
        "virtual_ranks": (8, OURS),
        "optimizer": ("sgd", VRGD),
        **CLIPS,
        "lr": (0.4, f"{CODE}: 0.1 at 2,048, by the square root"),
        "lr_scaling": ("sqrt", VRGD),
        "lr_schedule": ("warm-up 0.043 epochs; polynomial 2", "VRGD's shape; its numbers ours"),
        **sourced(CODE, bottom="512-256-64", top="512-512-256-1"),
        "table_rows": (100_000, OURS),  # the code has at most 10M, by sparse gradients
        **sourced(OURS, vr_tables=False, log_rows=2_000_000, device="cuda", workers=8),
        **sourced(OURS, checkpoint_every="1000 steps"),
    },
    small={
        "samples": 90_000,
        "batch_size": 256,
        "min_batch": 256,
        "max_batch": 4_096,
        "base_batch": 256,
        "micro_batch": 32,
        "virtual_ranks": 2,
        "lr": 1.0,
        "lr_schedule": "warm-up 10K samples; polynomial 2",
        "bottom": "64-32-8",
        "top": "64-32-1",
        "table_rows": 2_000,
        "log_rows": 100_000,
        "checkpoint_every": "100 steps",
    },
    paper_seeds=REPEATS,
    paper_samples=4_195_197_692,
    paper_ranks=8,
    parameters=(444_393, 167_162_177),
    minutes=0.3,
    origin=locations.CRITEO,
    arms=_ARMS,
    small_sweep=Sweep(
        ({**_ALL, "batch_size": (256, 1_024, 4_096), "lr": (0.5, 1.0, 2.0)},), ("lr",)
    ),
    paper_sweep=Sweep(({**_ALL, "batch_size": _BATCHES, "lr": (0.2, 0.4, 0.8)},), ("lr",)),
    **task("clicks", "without_vr"),
)
