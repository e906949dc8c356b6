"""Answers of a model to SQuAD's questions, and the official scores."""

import numpy
import torch
from numpy.typing import NDArray
from torch import nn

from bigbatch_recipes.datasets.in_memory import InMemoryDataset
from bigbatch_recipes.datasets.squad_features import SquadFeatures, best_spans
from bigbatch_recipes.datasets.squad_questions import Question, exact_match, f1
from bigbatch_recipes.distributed_eval import all_gather_rows, local_batches
from bigbatch_recipes.settings import Settings


def scores_of(
    model: nn.Module,
    windows: SquadFeatures,
    questions: list[Question],
    settings: Settings,
    suffix: str,
) -> dict[str, float]:
    """Scores of the likeliest span in all windows of each question. Collective.

    Args:
        model: the model to evaluate.
        windows: windows of the questions.
        questions: the questions with their golden answers.
        settings: settings of the training.
        suffix: end of the scores' names.
    """
    row_numbers = torch.arange(len(windows.question))
    in_window = torch.from_numpy(windows.offsets[:, :, 0] >= 0)
    may_begin = torch.from_numpy(windows.may_begin)
    dataset = InMemoryDataset(row_numbers, may_begin, in_window, *windows.rows.tensors[:3])
    rank_spans = []
    for number, may_begin, in_window, *rows in local_batches(dataset, settings):
        first, last = model(*rows)
        best = best_spans(first, last, may_begin, in_window)
        rank_spans.append(torch.cat([number[:, None], best], 1))
    spans = all_gather_rows(torch.cat(rank_spans)).double().numpy()
    answers = _answers(spans, windows, questions)
    golden = [question.answers for question in questions]
    return {
        f"F1, % {suffix}": 100 * float(numpy.mean(list(map(f1, answers, golden)))),
        f"exact match, % {suffix}": 100
        * float(numpy.mean(list(map(exact_match, answers, golden)))),
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
