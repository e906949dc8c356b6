"""What BERT predicts in pre-training, hidden tokens and what follows: its loss and its scores."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from bigbatch.experiments.datasets.masking import IGNORED
from bigbatch.experiments.datasets.sentence_pairs import Pairs
from bigbatch.experiments.distributed_eval import device_of, share_of, summed
from bigbatch.experiments.models.bert import example_rows
from bigbatch.experiments.settings import Settings
from bigbatch.setting_types import Count, check_setting


def loss_of(model: nn.Module, batch: Pairs) -> Tensor:
    """Mean over rows of: the mean over the row's hidden tokens, and the loss of the pair.

    A mean over samples, so the gradient of a step does not depend on how its batch was cut. Where
    all rows hide as many tokens, as all full ones do, it is the mean over tokens of BERT's own.
    """
    loss, _, loss_of_pairs, _ = _predictions(model, batch)
    hidden = (batch[-2] != IGNORED).sum(1).clamp(min=1)
    return (loss.sum(1) / hidden + loss_of_pairs).mean()


def scores_of(
    model: nn.Module, held_out: Dataset[Pairs], settings: Settings, where: str
) -> dict[str, float]:
    """Shares of hidden tokens and of pairs that are predicted right, each counted once. Collective.

    Args:
        model: as it is.
        held_out: rows with what is hidden in them.
        settings: of the training.
        where: what the names of the scores say of the rows.
    """
    sums = torch.zeros(5, dtype=torch.float64, device=device_of(settings))
    for batch in share_of(held_out, settings):
        loss, right, _, right_pairs = _predictions(model, batch)
        hidden = (batch[-2] != IGNORED).sum()
        rows = hidden.new_tensor(len(loss))
        sums += torch.stack([loss.double().sum(), right.sum(), hidden, right_pairs.sum(), rows])
    total, right_sum, hidden_sum, pairs_right, pairs = summed(sums).tolist()
    return {
        f"masked tokens right, % {where}": 100 * right_sum / hidden_sum,
        f"loss of masked tokens {where}": total / hidden_sum,
        f"next sentences right, % {where}": 100 * pairs_right / pairs,
    }


def example(settings: Settings, samples: int) -> Pairs:
    """So many rows on the meta device."""
    predictions = int(settings.task["predictions"])
    check_setting("predictions", predictions, Count)
    shape = (samples, predictions)
    number = torch.empty(shape, dtype=torch.int32, device="meta")
    random = torch.empty(samples, dtype=torch.long, device="meta")
    return (*example_rows(settings, samples), number, number, random)


def _predictions(model: nn.Module, batch: Pairs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses and hits of each place (none where nothing is hidden), and those of each pair."""
    *rows, places, labels, random = batch
    of_tokens, of_pairs = model(*rows, places)
    wanted = labels.long()
    loss = functional.cross_entropy(
        of_tokens.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="none"
    ).view_as(wanted)
    loss_of_pairs = functional.cross_entropy(of_pairs, random, reduction="none")
    return loss, of_tokens.argmax(-1) == wanted, loss_of_pairs, of_pairs.argmax(-1) == random
