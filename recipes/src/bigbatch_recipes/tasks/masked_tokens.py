"""BERT that predicts masked tokens and next sentences, and its sentence pairs."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from torch import nn

from bigbatch_recipes.datasets.sentence_pairs import Book, Masking, SentencePairs, spread
from bigbatch_recipes.datasets.text import corpus_of
from bigbatch_recipes.models import bert
from bigbatch_recipes.pretraining_loss import example as example
from bigbatch_recipes.pretraining_loss import loss_of, scores_of
from bigbatch_recipes.recipe import Data, LossOf
from bigbatch_recipes.settings import Settings


def model(settings: Settings) -> nn.Module:
    """The network, with both heads."""
    return bert.network(settings, "Pretraining")


def outline(settings: Settings) -> nn.Module:
    """Layers of torch with as many weights."""
    return bert.outline(settings, "Pretraining")


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
