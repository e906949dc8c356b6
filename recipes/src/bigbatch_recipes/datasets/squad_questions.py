"""SQuAD 1.1: questions, their rows for BERT, the best spans of logits, the official measure."""

import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigbatch.errors import RunError, SettingError
from bigbatch.setting_types import Count, check_setting
from bigbatch_recipes.datasets.files import text_of
from bigbatch_recipes.datasets.in_memory import InMemoryDataset
from bigbatch_recipes.datasets.locations import SQUAD, SQUAD_DEV, SQUAD_TRAIN
from bigbatch_recipes.datasets.sequence_pair import Numbers, SequencePair

if TYPE_CHECKING:
    from bigbatch_recipes.models.hf_bert.wordpiece import WordPieceTokenizer

_SUBSET = "train-subset-tokenized.json"  # 5 % of the questions, tokenised

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Question:
    """One question about one paragraph."""

    text: str  # the question
    context: str  # the paragraph
    answers: tuple[str, ...]  # the golden answers, one or more
    begin: int  # index of the first answer's first character in the paragraph


def train_file(folder: Path) -> tuple[Path, str]:
    """The official training questions, or the subset of them; and a note for the scores' names."""
    if any(folder.glob(f"{_SUBSET}*")) and not any(folder.glob(f"{SQUAD_TRAIN}*")):
        return SQUAD.file_in(folder, _SUBSET), "; trained on a tokenised 5 % of the questions"
    return SQUAD.file_in(folder, SQUAD_TRAIN), ""


def dev_file(folder: Path) -> Path:
    """The official development questions."""
    return SQUAD.file_in(folder, SQUAD_DEV)


def read_questions(file: Path) -> list[Question]:
    """All questions, in the file's order.

    Raises:
        RunError: the file is damaged, or of another format.
    """
    text = text_of(file)
    try:
        return [
            _question(entry, paragraph["context"])
            for article in json.loads(text)["data"]
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
        ]
    except (ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"{file} is no SQuAD 1.1 JSON ({type(error).__name__}: {error}); fetch it again"
        ) from error


def _question(entry: dict[str, Any], context: str) -> Question:
    answers = entry["answers"]
    texts = tuple(answer["text"] for answer in answers)
    return Question(entry["question"], context, texts, int(answers[0]["answer_start"]))


def exact_match(answer: str, golden: Sequence[str]) -> float:
    """1 if the normalized answer equals a normalized golden answer, else 0."""
    return float(max(normalize(answer) == normalize(text) for text in golden))


def f1(answer: str, golden: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over words, for the best golden answer.

    Source:
        P. Rajpurkar et al., SQuAD, 2016, and its evaluate-v1.1.
    Example:
        >>> round(f1("the red house", ["red houses", "a house, red"]), 3)
        1.0
    """
    return max(_f1(normalize(answer).split(), normalize(text).split()) for text in golden)


def _f1(answer: Sequence[str], golden: Sequence[str]) -> float:
    common = sum((Counter(answer) & Counter(golden)).values())
    return 2 * common / (len(answer) + len(golden)) if common else 0.0


def normalize(answer: str) -> str:
    """In lower case, without punctuation and articles, single spaces between words."""
    words = answer.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", words).split())


Offsets = Numbers  # where each token begins and ends in the text, (tokens, 2)

_MAX_QUESTION_TOKENS = 64
_MAX_ANSWER_TOKENS = 30
_CONTEXT_PER_TOKEN = 0.01  # of the window's length, in the context of a token


@dataclass(frozen=True)
class SquadFeatures:
    """Rows [CLS] question [SEP] window [SEP], one or more a question."""

    # columns (tokens, segments, is_token, first, last); first and last are the positions of the
    # answer, 0 if it is not in the window
    rows: InMemoryDataset
    question: NDArray[numpy.int64]  # index of each row's question
    # where in the paragraph each position of a row begins and ends, (rows, length, 2); -1 outside
    # the window
    offsets: Offsets
    # whether an answer may begin at a position, (rows, length): at the tokens of the paragraph that
    # have most context in this window
    may_begin: NDArray[numpy.bool_]


def windows_of(
    questions: Sequence[Question], tokenizer: "WordPieceTokenizer", frame: SequencePair, stride: int
) -> SquadFeatures:
    """Windows of all questions; each begins `stride` tokens after the one before it.

    Raises:
        SettingError: the stride is less than 1, or a question fills a row.
    """
    check_setting("stride", stride, Count)
    rows, row_questions = [], []
    texts = tokenizer.encode(question.text for question in questions)
    contexts = tokenizer.encode_with_offsets(question.context for question in questions)
    zipped = zip(questions, texts, contexts, strict=True)
    for number, (question, text, (tokens, offsets)) in enumerate(zipped):
        text = text[:_MAX_QUESTION_TOKENS]
        room = frame.length - len(text) - 3
        if room < 1:
            raise SettingError(
                f"length={frame.length} has no room for a window with a question of {len(text)} "
                f"tokens; set length={_MAX_QUESTION_TOKENS + stride} or more"
            )
        answer = _answer_tokens(question, offsets)
        spans = _spans(len(tokens), room, stride)
        for span, may_begin in zip(spans, most_context(spans), strict=True):
            rows.append(_row(text, tokens, offsets, may_begin, span, answer, frame))
            row_questions.append(number)
    *columns, row_offsets, row_begins = map(numpy.stack, zip(*rows, strict=True))
    dataset = InMemoryDataset(*map(torch.from_numpy, columns))
    return SquadFeatures(dataset, numpy.array(row_questions), row_offsets, row_begins)


def _spans(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    begins = range(0, max(tokens - room, 0) + min(stride, room), min(stride, room))
    return [(begin, min(begin + room, tokens)) for begin in begins]


def most_context(spans: Sequence[tuple[int, int]]) -> NDArray[numpy.bool_]:
    """Whether each token has most context in each window: (windows, tokens), one window a token.

    The context of a token is the smaller number of tokens before and after it in the window, plus a
    hundredth of the window's length; the first window wins a tie.

    Source:
        `token_is_max_context` of BERT's run_squad.py.
    Example:
        >>> most_context([(0, 5), (3, 8)]).astype(int).tolist()
        [[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]]
    """
    begin, end = numpy.array(spans).T[:, :, None]
    token = numpy.arange(end.max())
    context = numpy.minimum(token - begin, end - 1 - token)
    context = numpy.where(context >= 0, context + _CONTEXT_PER_TOKEN * (end - begin), -1.0)
    has_most: NDArray[numpy.bool_] = context.argmax(0) == numpy.arange(len(spans))[:, None]
    return has_most


def _answer_tokens(question: Question, offsets: Offsets) -> tuple[int, int]:
    begin, end = question.begin, question.begin + len(question.answers[0])
    inside = numpy.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > begin))
    return (int(inside[0]), int(inside[-1])) if len(inside) else (-1, -1)


def _row(
    text: Numbers,
    tokens: Numbers,
    offsets: Offsets,
    may_begin: NDArray[numpy.bool_],
    span: tuple[int, int],
    answer: tuple[int, int],
    frame: SequencePair,
) -> tuple[NDArray[numpy.generic], ...]:
    """The row of a question and a window, and the row's offsets and possible begins."""
    begin, end = span
    prefix = len(text) + 2  # [CLS], the question, [SEP]
    first, last = (prefix + token - begin for token in answer)
    if not (begin <= answer[0] and answer[1] < end):
        first = last = 0
    row_offsets = numpy.full((frame.length, 2), -1, dtype=numpy.int32)
    row_begins = numpy.zeros(frame.length, dtype=bool)
    window, positions = slice(begin, end), slice(prefix, prefix + end - begin)
    row_offsets[positions], row_begins[positions] = offsets[window], may_begin[window]
    ends = (numpy.array(position, dtype=numpy.int64) for position in (first, last))
    return (*frame.encode(text, tokens[window]), *ends, row_offsets, row_begins)


def best_spans(first: Tensor, last: Tensor, may_begin: Tensor, in_window: Tensor) -> Tensor:
    """The likeliest span of each row: its logit, its first and its last position, (rows, 3).

    If no logit is a number, as after divergence, the logit is -inf and the span (0, 0). All spans
    of at most 30 tokens inside the window are compared; BERT's own script compares only those
    between the 20 likeliest ends.

    Args:
        first: logits of each position to be the first, (rows, length).
        last: logits of each position to be the last, (rows, length).
        may_begin: positions where the span may begin, all of them in the window.
        in_window: positions of the window.
    Example:
        >>> first = torch.tensor([[9.0, 1.0, 2.0]])
        >>> last = torch.tensor([[9.0, 3.0, 0.0]])
        >>> inside = torch.tensor([[False, True, True]])
        >>> best_spans(first, last, inside, inside).tolist()
        [[4.0, 1.0, 1.0]]
    """
    first = first.float().masked_fill(~may_begin, float("-inf"))
    last = last.float().masked_fill(~in_window, float("-inf"))
    length = first.shape[1]
    best = torch.tensor([[float("-inf"), 0.0, 0.0]], device=first.device).repeat(len(first), 1)
    for distance in range(min(_MAX_ANSWER_TOKENS, length)):
        logit, begin = (first[:, : length - distance] + last[:, distance:]).max(1)
        span = torch.stack([logit, begin.float(), begin.float() + distance], 1)
        best = torch.where((logit > best[:, 0])[:, None], span, best)
    return best
