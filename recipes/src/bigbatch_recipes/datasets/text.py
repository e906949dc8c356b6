"""Documents of plain text: WikiText, a folder in BERT's layout, or Python's documentation."""

import ast
import inspect
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from pathlib import Path

from bigbatch.errors import RunError
from bigbatch_recipes.datasets.files import open_text
from bigbatch_recipes.datasets.locations import PLAIN_TEXT, VOCAB

_TOPICS = "pydoc_data/topics.py"  # a dict of chapters of the language reference
_WITHOUT_PROSE = {"ensurepip", "idlelib", "lib2to3", "test", "tests", "turtledemo"}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def stdlib_text() -> list[str]:
    """The standard library's documentation in English, one document a module or chapter.

    A document is the docstrings of one module in the order of its source, or one topic of `help`;
    empty lines separate its paragraphs. Nothing is imported. The documents are in the order of
    their names; another release of Python has other documents.
    """
    return list(_documents(Path(sysconfig.get_path("stdlib"))))


@cache
def _documents(library: Path) -> tuple[str, ...]:
    documents = tuple(
        document for file in _sources(library) for document in _documents_of(file) if document
    )
    if not documents:
        raise RunError(
            f"no documentation in {library}, where Python's standard library should be; install "
            "its sources, or name a folder of text by --data"
        )
    return documents


def _sources(library: Path) -> Iterator[Path]:
    """The standard library's modules, in the order of their names, without installed packages."""
    paths = sorted(path for path in library.iterdir() if path.stem in sys.stdlib_module_names)
    for path in paths:
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            if not _WITHOUT_PROSE & set(file.relative_to(library).parts):
                yield file


def _documents_of(file: Path) -> list[str]:
    with warnings.catch_warnings(action="ignore"):  # invalid escape sequences
        tree = ast.parse(file.read_bytes())
    if file.as_posix().endswith(_TOPICS):
        return _topics(tree)
    nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))  # the module itself has no line
    texts = (ast.get_docstring(node) for node in nodes)
    return ["\n\n".join(text for text in texts if text)]


def _topics(tree: ast.Module) -> list[str]:
    """The chapters of `topics = {name: text, ...}`."""
    (chapters,) = (node.value for node in tree.body if isinstance(node, ast.Assign))
    read: dict[str, str] = ast.literal_eval(chapters)
    return [inspect.cleandoc(text) for _, text in sorted(read.items())]


_TITLE = re.compile(r" = [^=].* = ")  # of an article; its sections have " = = ... = = "
_JOINT = re.compile(r" @([-,.])@ ")  # as in WikiText's "1 @,@ 000"
_HELD_OUT_EVERY = 50  # documents of a corpus that has no split of its own
_WIKITEXT = ("train", "valid")


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
        raise RunError(f"there is no {PLAIN_TEXT.needed} in {folder}; put it there")
    return _split(folder.name, lambda: (text for file in files for text in _blocks(file)))


def _wikitext(folder: Path) -> list[Path]:
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
