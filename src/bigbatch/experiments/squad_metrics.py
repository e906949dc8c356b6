"""What a model answers to SQuAD's questions, and its official scores."""

import numpy
import torch
from numpy.typing import NDArray
from torch import nn

from bigbatch.experiments.datasets.in_memory import InMemoryDataset
from bigbatch.experiments.datasets.squad_features import SquadFeatures, best_spans
from bigbatch.experiments.datasets.squad_questions import Question, exact_match, f1
from bigbatch.experiments.distributed_eval import collected, share_of
from bigbatch.experiments.settings import Settings


def scores_of(
    model: nn.Module,
    windows: SquadFeatures,
    questions: list[Question],
    settings: Settings,
    where: str,
) -> dict[str, float]:
    """Of the likeliest span in any of a question's windows. Collective.

    Args:
        model: as it is.
        windows: of the questions.
        questions: with their golden answers.
        settings: of the training.
        where: what the names of the scores say of the questions.
    """
    numbers = torch.arange(len(windows.question))
    inside = torch.from_numpy(windows.texts[:, :, 0] >= 0)
    shared = InMemoryDataset(
        numbers, torch.from_numpy(windows.begins), inside, *windows.rows.tensors[:3]
    )
    found = []
    for number, begins, within, *rows in share_of(shared, settings):
        first, last = model(*rows)
        found.append(torch.cat([number[:, None], best_spans(first, last, begins, within)], 1))
    spans = collected(torch.cat(found)).double().numpy()
    answers = _answers(spans, windows, questions)
    golden = [question.answers for question in questions]
    return {
        f"F1, % {where}": 100 * float(numpy.mean(list(map(f1, answers, golden)))),
        f"exact match, % {where}": 100 * float(numpy.mean(list(map(exact_match, answers, golden)))),
    }


def _answers(
    spans: NDArray[numpy.float64], windows: SquadFeatures, questions: list[Question]
) -> list[str]:
    """The text that each question's likeliest span stands for; spans are (row, logit, ends)."""
    best: dict[int, tuple[float, str]] = {}
    for row, logit, *ends in spans.tolist():
        first, last = map(int, ends)
        number = int(windows.question[int(row)])
        if number not in best or logit > best[number][0]:
            place = windows.texts[int(row)]
            text = questions[number].context[place[first, 0] : place[last, 1]] if last else ""
            best[number] = (logit, text)
    return [best[number][1] for number in range(len(questions))]
