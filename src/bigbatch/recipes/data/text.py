"""Documents of plain text: WikiText, a folder in BERT's layout, or Python's documentation."""

import gzip
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bigbatch.errors import RunError
from bigbatch.recipes.data.origin import Origin
from bigbatch.recipes.data.stdlib_text import stdlib_text

ORIGIN = Origin(
    "plain text",
    folders=("wikitext-2", "wikitext-103", "text"),
    files=("*.txt", "*.txt.gz", "wiki.train.tokens"),
    source="any corpus, blank lines between documents, such as Wikipedia and BooksCorpus",
    size="any amount",
    otherwise="the documentation of Python's standard library",
)
_TITLE = re.compile(r" = [^=].* = ")  # of an article; its parts have " = = ... = = "
_JOINT = re.compile(r" @([-,.])@ ")  # WikiText's way to part "1 @,@ 000"
_HELD_OUT_EVERY = 50  # documents of a corpus that has no split of its own
VOCAB = "vocab.txt"  # may lie beside the text
_WIKITEXT = ("train", "valid")


@dataclass(frozen=True)
class Corpus:
    """Documents to train on, and others to judge by.

    Args:
        name: as the names of scores say it.
        train, held_out: give the documents anew on each call, one at a time.
    """

    name: str
    train: Callable[[], Iterable[str]]
    held_out: Callable[[], Iterable[str]]


def corpus_of(folder: Path | None) -> Corpus:
    """What is in a folder, or Python's documentation where none is given.

    WikiText has a file each to train and to judge by; of any other text each 50th document is held
    out.

    Raises:
        RunError: the folder holds no text.
    """
    if folder is None:
        return _split("Python's documentation", stdlib_text)
    wikitext = [_named(folder, name) for name in _WIKITEXT]
    if all(wikitext):
        train, valid = (file for file in wikitext if file)
        return Corpus(folder.name, lambda: _articles(train), lambda: _articles(valid))
    either = [*folder.glob("*.txt.gz"), *folder.glob("*.txt")]  # packed, or the same unpacked
    once = {path.name.removesuffix(".gz"): path for path in either}
    files = [path for name, path in sorted(once.items()) if name != VOCAB]
    if not files:
        raise RunError(f"there is no *.txt or *.txt.gz in {folder}; put the text there")
    return _split(folder.name, lambda: (one for file in files for one in _blocks(file)))


def _named(folder: Path, name: str) -> Path | None:
    """WikiText's file of this part, packed or not."""
    places = (folder / f"{name}.txt.gz", folder / f"{name}.txt", folder / f"wiki.{name}.tokens")
    return next((place for place in places if place.exists()), None)


def _split(name: str, documents: Callable[[], Iterable[str]]) -> Corpus:
    def of(held_out: bool) -> Iterator[str]:
        for number, document in enumerate(documents()):
            if held_out == (number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1):
                yield document

    return Corpus(name, lambda: of(False), lambda: of(True))


def _lines(file: Path) -> Iterator[str]:
    """Without their ends.

    Raises:
        RunError: the file is damaged, or no UTF-8.
    """
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rt", encoding="utf-8") as text:
            for line in text:
                yield line.rstrip("\n")
    except (EOFError, OSError, UnicodeDecodeError) as error:
        raise RunError(f"{file} cannot be read ({error}); fetch it again") from error


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
