"""Loss and scores of models that predict clicks."""

import math
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from bigbatch_recipes.datasets.click_log import Batch, Clicks
from bigbatch_recipes.distributed_eval import all_gather_rows, local_batches
from bigbatch_recipes.settings import Settings


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
