"""DLRM, click logs (Criteo's, or a generated one), and the scores of predicted clicks."""

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from bigbatch.errors import SettingError
from bigbatch_recipes.datasets import click_log
from bigbatch_recipes.datasets.click_log import CATEGORIES, NUMBERS, Batch, Clicks
from bigbatch_recipes.distributed_eval import all_gather_rows, local_batches
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


def loss(_: Settings) -> LossOf:
    """The mean loss of a micro-batch."""
    return _click_loss


def _click_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean binary cross-entropy of the logits."""
    numbers, rows, labels = batch
    return binary_cross_entropy_with_logits(model(numbers, rows), labels)


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
