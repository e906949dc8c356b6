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
from bigbatch_recipes.datasets.files import DatasetLocation, text_of

_TRAIN = "train-v1.1.json"
_SUBSET = "train-subset-tokenized.json"  # 5 % of the questions, tokenised
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
    """One question about one paragraph."""

    text: str  # the question
    context: str  # the paragraph
    answers: tuple[str, ...]  # the golden answers, one or more
    begin: int  # index of the first answer's first character in the paragraph


def train_file(folder: Path) -> tuple[Path, str]:
    """The official training questions, or the subset of them; and a note for the scores' names."""
    if _path_of(folder, _SUBSET) and not _path_of(folder, _TRAIN):
        return _require_file(folder, _SUBSET), "; trained on a tokenised 5 % of the questions"
    return _require_file(folder, _TRAIN), ""


def dev_file(folder: Path) -> Path:
    """The official development questions."""
    return _require_file(folder, _DEV)


def _require_file(folder: Path, name: str) -> Path:
    path = _path_of(folder, name)
    if path is None:
        raise ORIGIN.missing_file(folder / name)
    return path


def _path_of(folder: Path, name: str) -> Path | None:
    """The file, compressed or not; None if it does not exist."""
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)


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
