"""What models of clicks share: the loss, and the scores of a test."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from bigbatch.experiments.datasets.click_rows import Batch, Clicks
from bigbatch.experiments.distributed_eval import collected, share_of
from bigbatch.experiments.settings import Settings
from bigbatch.optional_packages import import_optional


def click_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean binary cross-entropy of the logits."""
    numbers, rows, labels = batch
    return binary_cross_entropy_with_logits(model(numbers, rows), labels)


def click_scores(model: nn.Module, test: Clicks, settings: Settings, of: str) -> dict[str, float]:
    """Area under the ROC curve, and mean loss, over all ranks' rows. Collective.

    Of a model whose logits are not all numbers, as of one that diverged, the area is nan.

    Args:
        model: gives logits.
        test: rows.
        settings: how many at once, and where.
        of: which data, for the names of the scores.
    """
    metrics = import_optional("sklearn.metrics", "experiments")  # two seconds
    local = [
        torch.stack([model(numbers, rows).float(), labels], 1)
        for numbers, rows, labels in share_of(test, settings)
    ]
    logits, labels = collected(torch.cat(local)).double().unbind(1)
    ranked = bool(logits.isfinite().all())
    return {
        f"test AUC ({of})": float(metrics.roc_auc_score(labels, logits)) if ranked else math.nan,
        f"test loss ({of})": float(binary_cross_entropy_with_logits(logits, labels)),
    }
