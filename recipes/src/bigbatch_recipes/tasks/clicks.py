"""DLRM, and click logs: Criteo's, or a generated one."""

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
from bigbatch_recipes.recipe import Data, LossOf
from bigbatch_recipes.settings import Settings


def model(settings: Settings) -> nn.Module:
    """The network of the settings."""
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


def data(settings: Settings) -> Data:
    """Training data, and what scores a model."""
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


def loss(_: Settings) -> LossOf:
    """The mean loss of a micro-batch."""
    return click_loss


def example(settings: Settings, samples: int) -> Batch:
    """A batch on the meta device."""
    numbers = torch.empty(samples, NUMBERS, device="meta")
    rows = torch.empty(samples, CATEGORIES, dtype=torch.long, device="meta")
    return numbers, rows, torch.empty(samples, device="meta")


def without_vr(settings: Settings, model: nn.Module) -> frozenset[str]:
    """The tables, unless `vr_tables` is set: few groups see a rare row, which distorts its GSNR."""
    if settings.task["vr_tables"]:
        return frozenset()
    return frozenset(name for name, _ in model.named_parameters() if name.startswith("tables."))
