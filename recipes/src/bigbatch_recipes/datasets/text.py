"""Documents of plain text: WikiText, a folder in BERT's layout, or Python's documentation."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

from bigbatch.errors import RunError
from bigbatch_recipes.datasets.files import open_text
from bigbatch_recipes.datasets.location import DatasetLocation
from bigbatch_recipes.datasets.stdlib_text import stdlib_text

_TITLE = re.compile(r" = [^=].* = ")  # of an article; its sections have " = = ... = = "
_JOINT = re.compile(r" @([-,.])@ ")  # as in WikiText's "1 @,@ 000"
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
    """Documents to train on, and documents to evaluate on."""

    name: str  # name of the corpus in the names of scores
    # train, held_out: return all documents on each call, one at a time
    train: Callable[[], Iterable[str]]
    held_out: Callable[[], Iterable[str]]
    rule: str  # rule that selects the documents held out, for messages


def corpus_of(folder: Path | None) -> Corpus:
    """The corpus of a folder, or Python's documentation without one.

    WikiText has a file each for training and evaluation; of any other text each 50th document is
    held out.

    Raises:
        RunError: the folder has no text, or a file of it is missing or damaged.
    """
    if folder is None:
        return _split("Python's documentation", stdlib_text)
    if wikitext := _wikitext(folder):
        train, valid = (partial(_articles, file) for file in wikitext)
        return Corpus(folder.name, train, valid, "its valid file")
    paths = [*folder.glob("*.txt.gz"), *folder.glob("*.txt")]
    by_name = {path.name.removesuffix(".gz"): path for path in paths}  # plain files before .gz
    files = [path for name, path in sorted(by_name.items()) if name != VOCAB]
    if not files:
        raise RunError(f"there is no {ORIGIN.needed} in {folder}; put it there")
    return _split(folder.name, lambda: (text for file in files for text in _blocks(file)))


def _wikitext(folder: Path) -> list[Path]:
    """WikiText's files for training and evaluation, compressed or not; none for other text.

    Raises:
        RunError: one exists without the other.
    """
    files = []
    for split in _WIKITEXT:
        names = (f"{split}.txt.gz", f"{split}.txt", f"wiki.{split}.tokens")
        files += [folder / name for name in names if (folder / name).exists()][:1]
    if len(files) == 1:
        name = files[0].name
        split, other = _WIKITEXT if _WIKITEXT[0] in name else _WIKITEXT[::-1]
        raise RunError(
            f"{files[0]} is WikiText's by its name, and {name.replace(split, other)} is not in "
            "its folder; put it there, or give other text another name"
        )
    return files


def _split(name: str, documents: Callable[[], Iterable[str]]) -> Corpus:
    def select(held_out: bool) -> Iterator[str]:
        for number, document in enumerate(documents()):
            if held_out == (number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1):
                yield document

    rule = f"each {_HELD_OUT_EVERY}th document, so that two take {2 * _HELD_OUT_EVERY}"
    return Corpus(name, lambda: select(False), lambda: select(True), rule)


def _blocks(file: Path) -> Iterator[str]:
    """Documents with a blank line between them."""
    with open_text(file) as lines:
        for has_text, block in groupby(lines, key=lambda line: bool(line.strip())):
            if has_text:
                yield "".join(block).removesuffix("\n")


def _articles(file: Path) -> Iterator[str]:
    """Articles of WikiText, one paragraph a line, from one title to the next."""
    paragraphs: list[str] = []
    with open_text(file) as lines:
        for line in lines:
            if _TITLE.fullmatch(line.rstrip("\n")) and paragraphs:
                yield "\n".join(paragraphs)
                paragraphs = []
            if line.strip():
                paragraphs.append(_JOINT.sub(r"\1", line.strip()).replace("<unk>", "[UNK]"))
    if paragraphs:
        yield "\n".join(paragraphs)
