"""Questions with windows of their paragraphs: rows that fit BERT, and spans of text out of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigbatch.errors import SettingError
from bigbatch.experiments.datasets.in_memory import InMemoryDataset
from bigbatch.experiments.datasets.sequence_pair import SequencePair
from bigbatch.experiments.datasets.squad_questions import Question
from bigbatch.setting_types import Count, check_setting

Numbers = NDArray[numpy.int32]
Located = tuple[Numbers, Numbers]  # tokens, and where each begins and ends in the text (tokens, 2)

_LONGEST_QUESTION = 64  # tokens
_LONGEST_ANSWER = 30  # tokens
_PER_TOKEN = 0.01  # of a window, in the context of a token


@dataclass(frozen=True)
class SquadFeatures:
    """Rows [CLS] question [SEP] window [SEP], one or more a question.

    Args:
        rows: columns (tokens, segments, real, first, last); first and last are the answer's places,
            0 where it is not in the window.
        question: of each row.
        texts: where in the paragraph each place of a row begins and ends, (rows, length, 2); -1
            outside the window.
        begins: where a row's answer may begin, (rows, length): at the tokens of the paragraph that
            have most context in this window.
    """

    rows: InMemoryDataset
    question: NDArray[numpy.int64]
    texts: Numbers
    begins: NDArray[numpy.bool_]


def windows_of(
    questions: Sequence[Question],
    asked: Iterator[Located],
    contexts: Iterator[Located],
    frame: SequencePair,
    stride: int,
) -> SquadFeatures:
    """Windows of all questions; each begins `stride` tokens after the one before it.

    Args:
        questions: in order.
        asked: their tokens, in the same order.
        contexts: those of their paragraphs.
        frame: of a row.
        stride: tokens.
    Raises:
        SettingError: a stride of none, or a question that fills a row.
    """
    check_setting("stride", stride, Count)
    rows, owners = [], []
    for number, (question, (words, _), (tokens, places)) in enumerate(
        zip(questions, asked, contexts, strict=True)
    ):
        words = words[:_LONGEST_QUESTION]
        room = frame.length - len(words) - 3
        if room < 1:
            raise SettingError(
                f"length={frame.length} has no room for a window with a question of {len(words)} "
                f"tokens; set length={_LONGEST_QUESTION + stride} or more"
            )
        answer = _answer(question, places)
        spans = _spans(len(tokens), room, stride)
        for (begin, end), most in zip(spans, most_context(spans), strict=True):
            window_slice = slice(begin, end)
            window = tokens[window_slice], places[window_slice], most[window_slice]
            rows.append(_row(words, window, answer, begin, frame))
            owners.append(number)
    *columns, texts, begins = (numpy.stack(column) for column in zip(*rows, strict=True))
    return SquadFeatures(
        InMemoryDataset(*map(torch.from_numpy, columns)), numpy.array(owners), texts, begins
    )


def _spans(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Where each window begins and ends; the last one is the first that reaches the end."""
    begins = range(0, max(tokens - room, 0) + min(stride, room), min(stride, room))
    return [(begin, min(begin + room, tokens)) for begin in begins]


def most_context(spans: Sequence[tuple[int, int]]) -> NDArray[numpy.bool_]:
    """Which tokens have most context in each window: (windows, tokens), one window a token.

    The context of a token is the less of what lies before it and after it in the window, and a
    hundredth of the window's length; of equal ones the first window has it.

    Args:
        spans: where each window begins and ends.
    Source:
        `token_is_max_context` of BERT's run_squad.py.
    Example:
        >>> most_context([(0, 5), (3, 8)]).astype(int).tolist()
        [[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]]
    """
    begin, end = numpy.array(spans).T[:, :, None]
    token = numpy.arange(end.max())
    least = numpy.minimum(token - begin, end - 1 - token)
    context = numpy.where(least >= 0, least + _PER_TOKEN * (end - begin), -1.0)
    most: NDArray[numpy.bool_] = context.argmax(0) == numpy.arange(len(spans))[:, None]
    return most


def _answer(question: Question, places: Numbers) -> tuple[int, int]:
    """First and last token of the first golden answer; (-1, -1) where none is in the text."""
    begin, end = question.begin, question.begin + len(question.answers[0])
    inside = numpy.flatnonzero((places[:, 0] < end) & (places[:, 1] > begin))
    return (int(inside[0]), int(inside[-1])) if len(inside) else (-1, -1)


def _row(
    words: Numbers,
    window: tuple[Numbers, Numbers, NDArray[numpy.bool_]],
    answer: tuple[int, int],
    begin: int,
    frame: SequencePair,
) -> tuple[NDArray[numpy.generic], ...]:
    """Of a window's tokens, their places in the text, and which have most context in it."""
    tokens, places, most = window
    before = len(words) + 2  # [CLS], the question, [SEP]
    first, last = (before + token - begin for token in answer)
    if not (begin <= answer[0] and answer[1] < begin + len(tokens)):
        first = last = 0
    texts = numpy.full((frame.length, 2), -1, dtype=numpy.int32)
    begins = numpy.zeros(frame.length, dtype=bool)
    inside = slice(before, before + len(tokens))
    texts[inside], begins[inside] = places, most
    return (
        *frame.around(words, tokens),
        numpy.array(first, dtype=numpy.int64),
        numpy.array(last, dtype=numpy.int64),
        texts,
        begins,
    )


def best_spans(first: Tensor, last: Tensor, begins: Tensor, inside: Tensor) -> Tensor:
    """The likeliest span of each row: its logit, its first place, its last place, (rows, 3).

    Where no logit is a number, as of a model that diverged, the logit is -inf and the span (0, 0).
    Of all spans of at most 30 tokens that lie inside the window, not only among the 20 likeliest
    ends, as in BERT's own script.

    Args:
        first: logits of each place to be the first, (rows, length).
        last: and the last.
        begins: places where the span may begin, all of them inside.
        inside: places of the window.
    Example:
        >>> first = torch.tensor([[9.0, 1.0, 2.0]])
        >>> last = torch.tensor([[9.0, 3.0, 0.0]])
        >>> inside = torch.tensor([[False, True, True]])
        >>> best_spans(first, last, inside, inside).tolist()
        [[4.0, 1.0, 1.0]]
    """
    first = first.float().masked_fill(~begins, float("-inf"))
    last = last.float().masked_fill(~inside, float("-inf"))
    length = first.shape[1]
    best = torch.tensor([[float("-inf"), 0.0, 0.0]], device=first.device).repeat(len(first), 1)
    for more in range(min(_LONGEST_ANSWER, length)):
        value, at = (first[:, : length - more] + last[:, more:]).max(1)
        found = torch.stack([value, at.float(), at.float() + more], 1)
        best = torch.where((value > best[:, 0])[:, None], found, best)
    return best
