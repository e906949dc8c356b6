"""DLRM on Criteo's click logs: one epoch of SGD and VR-SGD with batches of 32 to 512 thousand.

The model, the batches, one epoch, warm-up and polynomial decay are the paper's. All other settings
are those of DLRM's published code for the terabyte log, or ours.
"""

import math
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from bigbatch.errors import SettingError
from bigbatch_recipes.datasets.click_log import (
    CATEGORIES,
    CRITEO,
    NUMBERS,
    Batch,
    Clicks,
    click_log,
    read_criteo,
    split,
)
from bigbatch_recipes.distributed_eval import all_gather_rows, local_batches
from bigbatch_recipes.recipe import OURS, Arms, Data, Grid, Recipe, Sweep, sourced
from bigbatch_recipes.settings import Settings
from bigbatch_recipes.vrgd_paper import CLIPS, REPEATS, TO_TEN, VRGD


class DLRM(nn.Module):
    """Logit of a click.

        x = bottom(numbers)
        e_j = table_j[row_j]
        logit = top([x, all a . b of two different a, b among x, e_1, e_2, ...])

    The gradients of the tables are dense.

    Args:
        numbers: number of numeric features of a row.
        tables: number of categories, each with an embedding table.
        table_rows: rows of each table.
        bottom: widths of the layers, each with a ReLU; the last is the embedding's.
        top: widths of the layers, with a ReLU between them; the last is 1.
    """

    def __init__(
        self, numbers: int, tables: int, table_rows: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        width, vectors = bottom[-1], tables + 1
        self.bottom = _layers((numbers, *bottom), last_relu=True)
        self.tables = nn.ModuleList(_table(table_rows, width) for _ in range(tables))
        self.top = _layers((width + vectors * (vectors - 1) // 2, *top), last_relu=False)
        pairs = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", pairs[0] * vectors + pairs[1], persistent=False)

    pairs: Tensor

    def forward(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """Logits (n,) of numbers (n, numbers) and rows of the tables (n, tables)."""
        x = self.bottom(numbers)
        embeddings = [table(row) for table, row in zip(self.tables, rows.unbind(1), strict=True)]
        vectors = torch.stack([x, *embeddings], 1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1)[:, self.pairs]
        logits: Tensor = self.top(torch.cat([x, products], 1)).squeeze(1)
        return logits


def _table(rows: int, width: int) -> nn.Embedding:
    table = nn.Embedding(rows, width)
    nn.init.uniform_(table.weight, -(rows**-0.5), rows**-0.5)
    return table


def _layers(widths: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for in_features, out_features in pairwise(widths):
        layer = nn.Linear(in_features, out_features)
        nn.init.normal_(layer.weight, std=(2 / (in_features + out_features)) ** 0.5)
        nn.init.normal_(layer.bias, std=out_features**-0.5)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


def click_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean binary cross-entropy of the logits."""
    numbers, rows, labels = batch
    return binary_cross_entropy_with_logits(model(numbers, rows), labels)


def click_scores(
    model: nn.Module, test: Clicks, settings: Settings, dataset: str
) -> dict[str, float]:
    """Area under the ROC curve and mean loss over the rows of all ranks. Collective.

    The area is nan if a logit is not finite, for example after divergence.
    """
    metrics: Any = import_module("sklearn.metrics")  # its import takes two seconds
    rank_rows = [
        torch.stack([model(numbers, rows).float(), labels], 1)
        for numbers, rows, labels in local_batches(test, settings)
    ]
    logits, labels = all_gather_rows(torch.cat(rank_rows)).double().unbind(1)
    finite = bool(logits.isfinite().all())
    return {
        f"test AUC ({dataset})": float(metrics.roc_auc_score(labels, logits))
        if finite
        else math.nan,
        f"test loss ({dataset})": float(binary_cross_entropy_with_logits(logits, labels)),
    }


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
        train, test = read_criteo(Path(settings.data), table_rows)
        dataset = f"of {len(train) + len(test):,} Criteo rows"
        return Data(train, lambda model: click_scores(model, test, settings, dataset))
    metrics: Any = import_module("sklearn.metrics")  # its import takes two seconds
    log = click_log(settings.count("log_rows"))
    train_rows, test_rows = split(len(log.rows))
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
    origin=CRITEO,
    arms=_ARMS,
    sweep=Sweep(({**_ALL, "batch_size": (256, 1_024, 4_096), "lr": (0.5, 1.0, 2.0)},), ("lr",)),
    paper_sweep=Sweep(({**_ALL, "batch_size": _BATCHES, "lr": (0.2, 0.4, 0.8)},), ("lr",)),
    model=_model,
    loss=lambda _: click_loss,
    data=_data,
    example=_example,
    without_vr=_without_vr,
)
