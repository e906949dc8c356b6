"""SQuAD 1.1: its questions, and its official measure of answers."""

import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.errors import RunError
from bigbatch.experiments.datasets.files import text_of
from bigbatch.experiments.datasets.location import DatasetLocation

_TRAIN = "train-v1.1.json"
_PART = "train-subset-tokenized.json"  # 5 % of the questions, cut into words
_DEV = "dev-v1.1.json"
ORIGIN = DatasetLocation(
    "SQuAD 1.1",
    folders=("squad-v1.1", "squad"),
    files=(_DEV, f"{_DEV}.gz"),
    other_files=(f"{_TRAIN} or {_TRAIN}.gz",),
    source="rajpurkar.github.io/SQuAD-explorer",
    size="87,599 and 10,570 questions",
)

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Question:
    """One question about one paragraph.

    Args:
        text: of the question.
        context: the paragraph.
        answers: that people gave, one or more.
        begin: where in the paragraph the first of them begins.
    """

    text: str
    context: str
    answers: tuple[str, ...]
    begin: int


def train_file(folder: Path) -> tuple[Path, str]:
    """The official training questions, or the part of them; and what a score has to say of it.

    Raises:
        RunError: neither exists.
    """
    whole = _packed_or_not(folder, _TRAIN)
    if whole is not None:
        return whole, ""
    part = _packed_or_not(folder, _PART)
    if part is not None:
        return part, "; trained on a tokenised 5 % of the questions"
    raise ORIGIN.missing_file(folder / _TRAIN)


def dev_file(folder: Path) -> Path:
    """The official development questions.

    Raises:
        RunError: they do not exist.
    """
    found = _packed_or_not(folder, _DEV)
    if found is None:
        raise ORIGIN.missing_file(folder / _DEV)
    return found


def _packed_or_not(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)


def read_questions(file: Path) -> list[Question]:
    """All questions, in the file's order.

    Raises:
        RunError: the file is damaged, or of another format.
    """
    text = text_of(file)
    try:
        found = [
            _question(asked, paragraph["context"])
            for article in json.loads(text)["data"]
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
        ]
    except (ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"{file} is no SQuAD 1.1 JSON ({type(error).__name__}: {error}); fetch it again"
        ) from error
    return found


def _question(asked: dict[str, Any], context: str) -> Question:
    answers = asked["answers"]
    texts = tuple(answer["text"] for answer in answers)
    return Question(asked["question"], context, texts, int(answers[0]["answer_start"]))


def exact_match(answer: str, golden: Sequence[str]) -> float:
    """1 where the answer, plainly written, is one of the golden ones, else 0."""
    return float(max(plain(answer) == plain(one) for one in golden))


def f1(answer: str, golden: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over words, for the golden answer that suits best.

    Source:
        P. Rajpurkar et al., SQuAD, 2016, and its evaluate-v1.1.
    Example:
        >>> round(f1("the red house", ["red houses", "a house, red"]), 3)
        1.0
    """
    return max(_f1(plain(answer).split(), plain(one).split()) for one in golden)


def _f1(answer: Sequence[str], golden: Sequence[str]) -> float:
    common = sum((Counter(answer) & Counter(golden)).values())
    return 2 * common / (len(answer) + len(golden)) if common else 0.0


def plain(answer: str) -> str:
    """In lower case, without punctuation and articles, single spaces between words."""
    without = answer.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", without).split())
