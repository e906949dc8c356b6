"""SQuAD 1.1: BERT learns to point to the answer of a question in a paragraph.

Both papers evaluate their pre-training with it. It begins from a run of `bert-pretrain`, with that
run's vocabulary; without one from random weights, which is only a test of the code.

Source of the task: P. Rajpurkar et al., SQuAD, 2016.
"""

from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from bigbatch_recipes.datasets import squad_questions
from bigbatch_recipes.datasets.in_memory import InMemoryDataset
from bigbatch_recipes.datasets.squad_questions import Question, SquadFeatures
from bigbatch_recipes.distributed_eval import all_gather_rows, local_batches
from bigbatch_recipes.models import bert
from bigbatch_recipes.recipe import OURS, Arms, Data, Recipe, Sweep, sourced
from bigbatch_recipes.settings import Settings
from bigbatch_recipes.vrgd_paper import CLIPS, MEDIAN


def scores_of(
    model: nn.Module,
    windows: SquadFeatures,
    questions: list[Question],
    settings: Settings,
    suffix: str,
) -> dict[str, float]:
    """Scores of the likeliest span in all windows of each question. Collective."""
    row_numbers = torch.arange(len(windows.question))
    in_window = torch.from_numpy(windows.offsets[:, :, 0] >= 0)
    may_begin = torch.from_numpy(windows.may_begin)
    dataset = InMemoryDataset(row_numbers, may_begin, in_window, *windows.rows.tensors[:3])
    rank_spans = []
    for number, may_begin, in_window, *rows in local_batches(dataset, settings):
        first, last = model(*rows)
        best = squad_questions.best_spans(first, last, may_begin, in_window)
        rank_spans.append(torch.cat([number[:, None], best], 1))
    spans = all_gather_rows(torch.cat(rank_spans)).double().numpy()
    answers = _answers(spans, windows, questions)
    golden = [question.answers for question in questions]
    measures = {"F1, %": squad_questions.f1, "exact match, %": squad_questions.exact_match}
    return {
        f"{name} {suffix}": 100 * float(numpy.mean(list(map(measure, answers, golden))))
        for name, measure in measures.items()
    }


def _answers(
    spans: NDArray[numpy.float64], windows: SquadFeatures, questions: list[Question]
) -> list[str]:
    """The text of each question's likeliest span; spans are (row, logit, first, last)."""
    best: dict[int, tuple[float, str]] = {}
    for row, logit, *ends in spans.tolist():
        first, last = map(int, ends)
        number = int(windows.question[int(row)])
        if number not in best or logit > best[number][0]:
            offsets = windows.offsets[int(row)]
            text = questions[number].context[offsets[first, 0] : offsets[last, 1]] if last else ""
            best[number] = (logit, text)
    return [best[number][1] for number in range(len(questions))]


SIMIGRAD = "SimiGrad's code, SQuAD"
_ARMS: Arms = {"adam": {}, "vr-adam": {"optimizer": "vr-adam"}}


def _loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    *rows, first, last = batch
    first_logits, last_logits = model(*rows)
    first_loss = functional.cross_entropy(first_logits, first)
    return (first_loss + functional.cross_entropy(last_logits, last)) / 2


def _data(settings: Settings) -> Data:
    folder = Path(settings.data)
    file, note = squad_questions.train_file(folder)
    train, dev = map(squad_questions.read_questions, (file, squad_questions.dev_file(folder)))
    limit = int(settings.task["judged"])
    if 0 < limit < len(dev):
        dev = dev[:: len(dev) // limit][:limit]
    texts = [f"{question.text}\n{question.context}" for question in train]
    tokenizer, frame = bert.load_tokenizer(settings, lambda: texts)
    train_windows, dev_windows = (
        squad_questions.windows_of(questions, tokenizer, frame, int(settings.task["stride"]))
        for questions in (train, dev)
    )
    suffix = f"({len(dev):,} dev questions{note})"
    return Data(
        train_windows.rows,
        lambda model: scores_of(model, dev_windows, dev, settings, suffix),
        run_files=bert.vocabulary_file(tokenizer),
    )


def _example(settings: Settings, samples: int) -> tuple[Tensor, ...]:
    settings.count("stride")  # must be at least 1
    end = torch.empty(samples, dtype=torch.long, device="meta")
    return (*bert.example_rows(settings, samples), end, end)


SQUAD = Recipe(
    name="squad",
    summary="SQuAD 1.1 answered by a BERT of bert-pretrain: Adam against VR-Adam",
    paper="SimiGrad and VRGD",
    paper_scale={
        **sourced(SIMIGRAD, epochs=2, policy="fixed", min_batch=24, max_batch=24),
        **sourced(SIMIGRAD, batch_size=24, base_batch=24),
        "micro_batch": (3, OURS),  # eight groups, which variance reduction needs
        **sourced(SIMIGRAD, optimizer="adam", lr=3e-5),
        "lr_schedule": ("warm-up 0.2 epochs; polynomial 1", OURS),
        "clip": (1.0, SIMIGRAD),
        **CLIPS,
        "device": ("cuda", OURS),
        **sourced(SIMIGRAD, precision="float16", size="large"),
        **sourced(OURS, vocabulary=30_522, vocab="", dropout=0.1),
        **sourced(SIMIGRAD, length=384, stride=128),
        "judged": (0, OURS),
    },
    small={
        "epochs": 2,
        "samples": 2_400,
        "lr": 1e-3,
        **bert.TINY,
        "dropout": 0.0,
        "length": 256,
        "stride": 128,
        "judged": 300,
    },
    paper_seeds=MEDIAN,
    paper_samples=87_599,  # questions; of the longest there are several windows, about 1 % more
    minutes=1.8,
    origin=squad_questions.ORIGIN,
    arms=_ARMS,
    sweep=Sweep(({"arm": tuple(_ARMS), "lr": (5e-4, 1e-3, 2e-3)},), tuned=("lr",)),
    paper_sweep=Sweep(({"arm": tuple(_ARMS), "lr": (2e-5, 3e-5, 5e-5)},), ("lr",)),
    model=lambda settings: bert.network(settings, "SpanFinder"),
    outline=lambda settings: bert.outline(settings, "SpanFinder"),
    packages=bert.PACKAGES,
    loss=lambda _: _loss,
    data=_data,
    example=_example,
    saved_as=bert.SAVED_AS,
)
