"""DLRM on Criteo's click logs: one epoch of SGD and VR-SGD with batches of 32 to 512 thousand.

The model, the batches, one epoch, warm-up and polynomial decay are the paper's. All other settings
are those of DLRM's published code for the terabyte log, or ours.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigbatch.errors import SettingError
from bigbatch_recipes.ctr_metrics import click_loss, click_scores
from bigbatch_recipes.datasets import click_log
from bigbatch_recipes.datasets.click_log import CATEGORIES, NUMBERS, Batch, Clicks
from bigbatch_recipes.models.dlrm_network import DLRM
from bigbatch_recipes.recipe import OURS, Arms, Data, Grid, Recipe, Sweep, sourced
from bigbatch_recipes.settings import Settings
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


def _model(settings: Settings) -> nn.Module:
    bottom, top = _widths(settings, "bottom"), _widths(settings, "top")
    if top[-1] != 1:
        raise SettingError(f"top={settings.task['top']!r} must end in 1, the logit")
    return DLRM(NUMBERS, CATEGORIES, settings.count("table_rows"), bottom, top)


def _widths(settings: Settings, name: str) -> list[int]:
    text = str(settings.task[name])
    widths = text.split("-")
    if not all(width.isdecimal() and int(width) for width in widths):
        raise SettingError(f"{name}={text!r} must be widths of layers, such as 512-256-64")
    return [int(width) for width in widths]


def _data(settings: Settings) -> Data:
    table_rows = settings.count("table_rows")
    if settings.data:
        train, test = click_log.read_criteo(Path(settings.data), table_rows)
        dataset = f"of {len(train) + len(test):,} Criteo rows"
        return Data(train, lambda model: click_scores(model, test, settings, dataset))
    metrics: Any = import_module("sklearn.metrics")  # its import takes two seconds
    log = click_log.generate(settings.count("log_rows"))
    train_rows, test_rows = click_log.split(len(log.rows))
    test = Clicks([log.rows], table_rows, test_rows)
    best = float(metrics.roc_auc_score(log.rows["label"][test_rows], log.truth[test_rows]))

    def scores(model: nn.Module) -> dict[str, float]:
        model_scores = click_scores(model, test, settings, "generated log")
        return {**model_scores, "best reachable AUC (generated log)": best}

    return Data(Clicks([log.rows], table_rows, train_rows), scores)


def _example(settings: Settings, samples: int) -> Batch:
    numbers = torch.empty(samples, NUMBERS, device="meta")
    rows = torch.empty(samples, CATEGORIES, dtype=torch.long, device="meta")
    return numbers, rows, torch.empty(samples, device="meta")


def _without_vr(settings: Settings, model: nn.Module) -> frozenset[str]:
    """The tables, unless `vr_tables` is set: few groups see a rare row, which distorts its GSNR."""
    if settings.task["vr_tables"]:
        return frozenset()
    return frozenset(name for name, _ in model.named_parameters() if name.startswith("tables."))


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
    minutes=0.3,
    origin=click_log.CRITEO,
    arms=_ARMS,
    sweep=Sweep(({**_ALL, "batch_size": (256, 1_024, 4_096), "lr": (0.5, 1.0, 2.0)},), ("lr",)),
    paper_sweep=Sweep(({**_ALL, "batch_size": _BATCHES, "lr": (0.2, 0.4, 0.8)},), ("lr",)),
    model=_model,
    loss=lambda _: click_loss,
    data=_data,
    example=_example,
    without_vr=_without_vr,
)
