"""BERT pre-training: masked pieces and next sentences, short rows first, then long ones.

SimiGrad chooses the batches of the short phase. LAMB and VR-LAMB train at one batch each phase, as
the VRGD paper does: 64k, then 32k. A long arm begins with the weights of the short one before it.

Source of the task: J. Devlin et al., BERT, 2018.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset

from bigbatch.recipes.data.columns import as_it_is
from bigbatch.recipes.data.masking import IGNORED, Masking
from bigbatch.recipes.data.origin import Origin
from bigbatch.recipes.data.sentences import Book, Pairs, SentencePairs
from bigbatch.recipes.data.text import VOCAB, corpus_of
from bigbatch.recipes.models.bert import bert, example_rows, frame_of, pieces_of
from bigbatch.recipes.recipe import OURS, Data, LossOf, Recipe
from bigbatch.recipes.scores import device_of, share_of, summed
from bigbatch.recipes.settings import Settings

SIMIGRAD = "SimiGrad's code, BERT-Large, rows of 128"

_LONG = {"length": 512, "predictions": 80, "micro_batch": 16, "epochs": 2, "draws": 3}
_LAMB = {"policy": "fixed", "base_batch": 32_768, "lr": 0.005}  # ours; the paper's is not known
_DECAY = {"lr_schedule": "warm-up 0.2 epochs; polynomial 0.5"}  # shape as the VRGD paper's base
_VR = {"optimizer": "vr-lamb"}
_4K8 = "4915200 samples"  # 150 steps of 32,768


def _guessed(model: nn.Module, batch: Pairs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses and hits of each place (zeros where nothing is hidden), and those of each pair."""
    *rows, places, labels, random = batch
    of_pieces, of_pairs = model(*rows, places)
    wanted = labels.long()
    loss = functional.cross_entropy(
        of_pieces.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="none"
    ).view_as(wanted)
    loss_of_pairs = functional.cross_entropy(of_pairs, random, reduction="none")
    return loss, of_pieces.argmax(-1) == wanted, loss_of_pairs, of_pairs.argmax(-1) == random


def _loss(settings: Settings) -> LossOf:
    def loss_of(model: nn.Module, batch: Pairs) -> Tensor:
        loss, _, loss_of_pairs, _ = _guessed(model, batch)
        hidden = (batch[-2] != IGNORED).sum(1).clamp(min=1)
        return (loss.sum(1) / hidden + loss_of_pairs).mean()

    return loss_of


def _data(settings: Settings) -> Data:
    corpus = corpus_of(Path(settings.data) if settings.data else None)
    pieces, task = pieces_of(settings, corpus.train), settings.task
    frame = frame_of(pieces, settings)
    special = [pieces.pad, pieces.unknown, pieces.begin, pieces.end, pieces.mask]
    ordinary = [number for number in range(len(pieces)) if number not in special]
    masking = Masking(
        pieces.mask, torch.tensor(ordinary, dtype=torch.int32).numpy(), int(task["predictions"])
    )
    train = SentencePairs(
        Book.of(pieces.numbers(corpus.train())),
        frame,
        masking,
        special,
        draws=int(task["draws"]),
        seed=settings.seed,
    )
    held_out: Dataset[Pairs] = SentencePairs(
        Book.of(pieces.numbers(corpus.held_out())), frame, masking, special, draws=1, seed=0
    )
    rows, limit = len(held_out), int(task["judged"])  # type: ignore[arg-type]
    if 0 < limit < rows:
        rows, held_out = limit, Subset(held_out, range(0, rows - rows % limit, rows // limit))
    where = f"({rows:,} rows held out of {corpus.name})"
    return Data(
        train,
        lambda model: _scores(model, held_out, settings, where),
        as_it_is,
        keeps={VOCAB: "\n".join(pieces.vocabulary) + "\n"},
    )


def _scores(
    model: nn.Module, held_out: Dataset[Pairs], settings: Settings, where: str
) -> dict[str, float]:
    """Hidden pieces and pairs are counted one by one."""
    sums = torch.zeros(5, dtype=torch.float64, device=device_of(settings))
    for batch in share_of(held_out, settings):
        loss, hits, _, hits_of_pairs = _guessed(model, batch)
        hidden = (batch[-2] != IGNORED).sum()
        sums += torch.stack(
            [
                loss.double().sum(),
                hits.sum(),
                hidden,
                hits_of_pairs.sum(),
                hidden.new_tensor(len(loss)),
            ]
        )
    loss_sum, right, hidden_sum, right_pairs, pairs = summed(sums).tolist()
    return {
        f"masked pieces right, % {where}": 100 * right / hidden_sum,
        f"loss of masked pieces {where}": loss_sum / hidden_sum,
        f"next sentences right, % {where}": 100 * right_pairs / pairs,
    }


def _example(settings: Settings, samples: int) -> Pairs:
    shape = (samples, int(settings.task["predictions"]))
    number = torch.empty(shape, dtype=torch.int32, device="meta")
    random = torch.empty(samples, dtype=torch.long, device="meta")
    return (*example_rows(settings, samples), number, number, random)


BERT_PRETRAIN = Recipe(
    name="bert-pretrain",
    summary="BERT pre-training in two phases: SimiGrad's batches, and LAMB against VR-LAMB",
    paper="SimiGrad and VRGD",
    full={
        "epochs": (3, OURS),
        "policy": ("simigrad", SIMIGRAD),
        "target": (0.8, SIMIGRAD),
        "min_batch": (128, OURS),
        "max_batch": (262_144, SIMIGRAD),
        "batch_size": (128, SIMIGRAD),
        "base_batch": (128, SIMIGRAD),
        "micro_batch": (64, OURS),
        "optimizer": ("lamb", SIMIGRAD),
        "lr": (0.0006, SIMIGRAD),
        "lr_schedule": ("polynomial 1 over 400M samples", SIMIGRAD),
        "lr_scaling": ("sqrt", SIMIGRAD),
        "weight_decay": (0.01, SIMIGRAD),
        "decay_all": (False, SIMIGRAD),
        "clip": (1.0, SIMIGRAD),
        "seed": (42, SIMIGRAD),
        "device": ("cuda", OURS),
        "precision": ("float16", SIMIGRAD),
        "workers": (4, OURS),
        "size": ("large", SIMIGRAD),
        "vocabulary": (30_522, OURS),
        "vocab": ("", OURS),
        "dropout": (0.1, SIMIGRAD),
        "length": (128, SIMIGRAD),
        "predictions": (20, OURS),
        "draws": (4, OURS),
        "judged": (0, OURS),
    },
    small={
        "epochs": 1,
        "target": 0.2,
        "min_batch": 32,
        "max_batch": 256,
        "batch_size": 64,
        "base_batch": 64,
        "lr": 0.01,
        "lr_schedule": "warm-up 0.1 epochs; polynomial 1",
        "seed": 0,
        "samples": 16_000,
        "device": "cpu",
        "precision": "float32",
        "workers": 0,
        "size": "tiny",
        "vocabulary": 2_000,
        "dropout": 0.0,
        "length": 64,
        "predictions": 10,
        "draws": 1,
        "judged": 500,
    },
    full_samples=400_000_000,
    minutes=1.5,
    origin=Origin(
        "plain text",
        ("wikitext-2", "wikitext-103", "text"),
        ("*.txt", "*.txt.gz"),
        "any corpus, blank lines between documents, such as Wikipedia and BooksCorpus",
        "in the paper 3.3 billion words",
        otherwise="the documentation of Python's standard library",
    ),
    arms={
        "simigrad-short": {},
        "simigrad-long": {"begin_from": "simigrad-short"},
    },
    full_arms={},
    model=lambda settings: bert(settings, "Pretraining"),
    loss=_loss,
    data=_data,
    example=_example,
)
