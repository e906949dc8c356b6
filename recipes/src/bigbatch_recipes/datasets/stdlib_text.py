"""Text of every Python installation: the documentation in its standard library."""

import ast
import inspect
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from bigbatch.errors import RunError

_TOPICS = "pydoc_data/topics.py"  # a dict of chapters of the language reference
_WITHOUT_PROSE = {"ensurepip", "idlelib", "lib2to3", "test", "tests", "turtledemo"}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def stdlib_text() -> list[str]:
    """The standard library's documentation in English, one document a module or chapter.

    A document is the docstrings of one module in the order of its source, or one topic of `help`;
    empty lines separate its paragraphs. Nothing is imported. The documents are in the order of
    their names; another release of Python has other documents.

    Raises:
        RunError: the library's sources are not installed.
    Example:
        >>> any(document.startswith("Heap queue algorithm") for document in stdlib_text())
        True
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
