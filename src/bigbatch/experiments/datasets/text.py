"""Documents of plain text: WikiText, a folder in BERT's layout, or Python's documentation."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bigbatch.errors import RunError
from bigbatch.experiments.datasets.files import opened
from bigbatch.experiments.datasets.location import DatasetLocation
from bigbatch.experiments.datasets.stdlib_text import stdlib_text

_TITLE = re.compile(r" = [^=].* = ")  # of an article; its parts have " = = ... = = "
_JOINT = re.compile(r" @([-,.])@ ")  # WikiText's way to part "1 @,@ 000"
_HELD_OUT_EVERY = 50  # documents of a corpus that has no split of its own
VOCAB = "vocab.txt"  # may lie in the folder of the text
_WIKITEXT = ("train", "valid")

ORIGIN = DatasetLocation(
    "plain text",
    folders=("wikitext-2", "wikitext-103", "text"),
    files=("*.txt", "*.txt.gz", "wiki.train.tokens"),
    source="any corpus, blank lines between documents; or of WikiText, with its valid file",
    size="any amount",
    otherwise="the documentation of Python's standard library",
)


@dataclass(frozen=True)
class Corpus:
    """Documents to train on, and others to judge by.

    Args:
        name: as the names of scores say it.
        train, held_out: give all documents on each call, one at a time.
        rule: which documents are held out.
    """

    name: str
    train: Callable[[], Iterable[str]]
    held_out: Callable[[], Iterable[str]]
    rule: str


def corpus_of(folder: Path | None) -> Corpus:
    """What is in a folder, or Python's documentation where none is given.

    WikiText has a file each to train and to judge by; of any other text each 50th document is held
    out.

    Raises:
        RunError: the folder holds no text, or a file of it is missing or damaged.
    """
    if folder is None:
        return _split("Python's documentation", stdlib_text)
    if wikitext := _wikitext(folder):
        train, valid = wikitext
        name = folder.name
        return Corpus(name, lambda: _articles(train), lambda: _articles(valid), "its valid file")
    either = [*folder.glob("*.txt.gz"), *folder.glob("*.txt")]  # packed, or the same unpacked
    once = {path.name.removesuffix(".gz"): path for path in either}
    files = [path for name, path in sorted(once.items()) if name != VOCAB]
    if not files:
        raise RunError(f"there is no {ORIGIN.needed} in {folder}; put it there")
    return _split(folder.name, lambda: (one for file in files for one in _blocks(file)))


def _wikitext(folder: Path) -> list[Path]:
    """WikiText's files to train and to judge by, packed or not; none where it is other text.

    Raises:
        RunError: one is there without the other.
    """
    files = [file for part in _WIKITEXT if (file := _named(folder, part))]
    if len(files) == 1:
        name = files[0].name
        part, other = _WIKITEXT if _WIKITEXT[0] in name else _WIKITEXT[::-1]
        raise RunError(
            f"{files[0]} is WikiText's by its name, and {name.replace(part, other)} is not in "
            "its folder; put it there, or give other text another name"
        )
    return files


def _named(folder: Path, part: str) -> Path | None:
    places = (folder / f"{part}.txt.gz", folder / f"{part}.txt", folder / f"wiki.{part}.tokens")
    return next((place for place in places if place.exists()), None)


def _split(name: str, documents: Callable[[], Iterable[str]]) -> Corpus:
    def of(held_out: bool) -> Iterator[str]:
        for number, document in enumerate(documents()):
            if held_out == (number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1):
                yield document

    rule = f"each {_HELD_OUT_EVERY}th document, so that two take {2 * _HELD_OUT_EVERY}"
    return Corpus(name, lambda: of(False), lambda: of(True), rule)


def _lines(file: Path) -> Iterator[str]:
    """Without their ends."""
    with opened(file) as text:
        for line in text:
            yield line.rstrip("\n")


def _blocks(file: Path) -> Iterator[str]:
    """Documents with a blank line between them."""
    lines: list[str] = []
    for line in _lines(file):
        if line.strip():
            lines.append(line)
        elif lines:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def _articles(file: Path) -> Iterator[str]:
    """Articles of WikiText, one paragraph a line, from one title to the next."""
    lines: list[str] = []
    for line in _lines(file):
        if _TITLE.fullmatch(line) and lines:
            yield "\n".join(lines)
            lines = []
        if line.strip():
            lines.append(_JOINT.sub(r"\1", line.strip()).replace("<unk>", "[UNK]"))
    if lines:
        yield "\n".join(lines)
