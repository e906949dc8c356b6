"""BERT that predicts masked tokens and next sentences: its sentence pairs, loss and scores."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from bigbatch_recipes.datasets.sentence_pairs import (
    IGNORED,
    Book,
    Masking,
    Pairs,
    SentencePairs,
    spread,
)
from bigbatch_recipes.datasets.text import corpus_of
from bigbatch_recipes.distributed_eval import all_reduce_sum, device_of, local_batches
from bigbatch_recipes.models import bert
from bigbatch_recipes.recipe import Data, LossOf
from bigbatch_recipes.settings import Settings

model = partial(bert.network, head="Pretraining")
outline = partial(bert.outline, head="Pretraining")


def loss(_: Settings) -> LossOf:
    """The sum of both tasks' losses."""
    return loss_of


def data(settings: Settings) -> Data:
    """Training data, and what scores a model."""
    corpus = corpus_of(Path(settings.data) if settings.data else None)
    (tokenizer, frame), task = bert.load_tokenizer(settings, corpus.train), settings.task
    masking = Masking(tokenizer.mask, tokenizer.ordinary, int(task["predictions"]))

    def pairs(documents: Iterable[str], name: str, draws: int, seed: int) -> SentencePairs:
        book = Book.of(tokenizer.encode(documents), name)
        return SentencePairs(book, frame, masking, tokenizer.special, draws=draws, seed=seed)

    train = pairs(corpus.train(), "the text to train on", int(task["draws"]), settings.seed)
    held_out = pairs(corpus.held_out(), f"the text held out ({corpus.rule})", draws=1, seed=0)
    evaluated = spread(held_out, int(task["judged"]))
    suffix = f"(held out of {corpus.name})"
    scores = partial(scores_of, held_out=evaluated, settings=settings, suffix=suffix)
    return Data(train, scores, run_files=bert.vocabulary_file(tokenizer))


def loss_of(model: nn.Module, batch: Pairs) -> Tensor:
    """Mean over rows of: the mean loss of the row's masked tokens, plus the loss of the pair.

    A mean over samples, so the gradient of a step does not depend on its micro-batches. If all rows
    have as many masked tokens, as full rows do, it equals BERT's own mean over tokens.
    """
    token_loss, _, pair_loss, _ = _predictions(model, batch)
    masked = (batch[-2] != IGNORED).sum(1).clamp(min=1)
    return (token_loss.sum(1) / masked + pair_loss).mean()


def scores_of(
    model: nn.Module, held_out: Dataset[Pairs], settings: Settings, suffix: str
) -> dict[str, float]:
    """Accuracy on masked tokens and on pairs, and the loss of masked tokens. Collective."""
    sums = torch.zeros(5, dtype=torch.float64, device=device_of(settings))
    for batch in local_batches(held_out, settings):
        loss, right, _, right_pairs = _predictions(model, batch)
        masked = (batch[-2] != IGNORED).sum()
        rows = masked.new_tensor(len(loss))
        sums += torch.stack([loss.double().sum(), right.sum(), masked, right_pairs.sum(), rows])
    loss_sum, tokens_right, tokens, pairs_right, pairs = all_reduce_sum(sums).tolist()
    return {
        f"masked tokens right, % {suffix}": 100 * tokens_right / tokens,
        f"loss of masked tokens {suffix}": loss_sum / tokens,
        f"next sentences right, % {suffix}": 100 * pairs_right / pairs,
    }


def example(settings: Settings, samples: int) -> Pairs:
    """So many rows on the meta device."""
    shape = (samples, settings.count("predictions"))
    numbers = torch.empty(shape, dtype=torch.int32, device="meta")
    is_random = torch.empty(samples, dtype=torch.long, device="meta")
    return (*bert.example_rows(settings, samples), numbers, numbers, is_random)


def _predictions(model: nn.Module, batch: Pairs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses and hits of each masked token (0 at padding), and of each pair."""
    *rows, positions, labels, is_random = batch
    token_logits, pair_logits = model(*rows, positions)
    labels = labels.long()
    token_loss = functional.cross_entropy(
        token_logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    ).view_as(labels)
    pair_loss = functional.cross_entropy(pair_logits, is_random, reduction="none")
    token_hits, pair_hits = token_logits.argmax(-1) == labels, pair_logits.argmax(-1) == is_random
    return token_loss, token_hits, pair_loss, pair_hits
