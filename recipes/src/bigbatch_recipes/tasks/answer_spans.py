"""BERT that points to the answer of a question, and SQuAD's scores."""

from functools import partial
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
from bigbatch_recipes.recipe import Data, LossOf
from bigbatch_recipes.settings import Settings

model = partial(bert.network, head="SpanFinder")
outline = partial(bert.outline, head="SpanFinder")


def loss(_: Settings) -> LossOf:
    """The mean over both ends of the span."""
    return _loss_of


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


def _loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    *rows, first, last = batch
    first_logits, last_logits = model(*rows)
    first_loss = functional.cross_entropy(first_logits, first)
    return (first_loss + functional.cross_entropy(last_logits, last)) / 2


def data(settings: Settings) -> Data:
    """Training data, and what scores a model."""
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


def example(settings: Settings, samples: int) -> tuple[Tensor, ...]:
    """A batch on the meta device."""
    settings.count("stride")  # must be at least 1
    end = torch.empty(samples, dtype=torch.long, device="meta")
    return (*bert.example_rows(settings, samples), end, end)
