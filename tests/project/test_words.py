"""Names and text use the terms of the field: docs/decisions/0015."""

import ast
import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src/bigbatch", "tests", "examples", "docs")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
HISTORY = {"LOG.md", "0015-the-fields-words.md", Path(__file__).name}  # they show replaced words

# text of any kind
WORDS = (
    r"anew|besides?|whence|thereof|go(?:es|ing)?\s+on|gone\s+on|went\s+on|told|the\s+house|the\s+door|"
    r"fold(?:s|ed|ing)?|pieces?|pictures?|guess(?:es|ed|ing)?|laws?|twins?|tail|dealt|deals?\s+to|"
    r"borrow(?:s|ed|ing)?|is\s+no\s+(?:float|int|number)"
)
SENTENCES = (
    r"what\s+joins\s+(?:the|its)\s+ranks|how\s+well\s+its\s+gradient\s+is\s+known|"
    r"all\s+but\s+model\s+and\s+optimizer\s+is\s+in|makes\s+the\s+groups\s+that\s+are\s+compared|"
    r"was\s+not\s+finished:\s+call|has\s+no\s+trust\s+ratio\s+here"
)
OPTIONS = r"--(?:surely|largest-step|warm-up|begin-from|lr-from|full|runs)(?![\w-])"
PUBLIC = (
    r"GradientNoise|SampleLedger|RankStates|Announced|Advise|Step\.counted|Step\.updating|"
    r"record\.(?:noise|target|factors|scores|seconds)|next_target"
)
TEXT = re.compile(
    rf"(?<![A-Za-z])(?i:{WORDS}|{SENTENCES})(?![A-Za-z])|{OPTIONS}|(?<!\w)(?:{PUBLIC})(?!\w)"
)
OF_OTHERS = re.compile(r"overflow.*\"fold\"|\"fold\", 8")

# classes, functions, arguments, variables and attributes that Python code defines
CLASSES = (
    "Common Reading Cutting Caution Attachment Averages BorrowedSums How Pieces Guesses Pictures "
    "Part Before Driven PatientHandler FOLDED GradientNoise SampleLedger RankStates Announced "
    "Advise Progress"
)
VARIABLES = "anew beside told mine here there everywhere held of_sum surely largest_step warm_up"
IDENTIFIERS = {*CLASSES.split(), *VARIABLES.split()}

# base names of files
MODULES = (
    "act announced before cut ledger stream advice samples loader progress memory agreement decide "
    "caution cutting named schedule measure door plain find shards mesh sums totals health "
    "devices halves interval smoothing sketch moments connect attach borrowed exchange fold local "
    "average passes ranks reduction layerwise anew dealt driven packages layout params "
    "supported whole state events layers live overview page recipes answers guesses clicks "
    "pictures begin mean_factor unused trainable jobs launch footprint scores columns drawn part "
    "frame windows sentences click_log origin readable peers twins populations sent wire kinds"
)


def files_of(folder: str) -> list[Path]:
    """Files that people read: Python, Markdown, HTML, C."""
    endings = {".py", ".md", ".html", ".c"}
    files = (file for file in (ROOT / folder).rglob("*") if file.suffix in endings)
    return sorted(file for file in files if file.name not in HISTORY)


def replaced_in_text(text):
    """Line and text of each replaced term; a phrase may end on the next line."""
    text = OF_OTHERS.sub("", text)
    return [(text.count("\n", 0, match.start()) + 1, match[0]) for match in TEXT.finditer(text)]


def defined_in(code):
    """Line and name of everything that Python code defines or assigns to."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def replaced_names_in(code):
    return [(line, name) for line, name in defined_in(code) if name.strip("_") in IDENTIFIERS]


@pytest.mark.parametrize("place", [*FOLDERS, *PAGES])
def test_text_and_names_are_the_terms_of_the_field(place):
    files = [ROOT / place] if place in PAGES else files_of(place)
    assert files
    found = []
    for file in files:
        text = file.read_text()
        names = replaced_names_in(text) if file.suffix == ".py" else []
        for line, term in chain(replaced_in_text(text), names):
            found.append(f"{file.relative_to(ROOT)}:{line}: {term}")
    assert not found, "\n".join(found)


def test_no_module_has_a_name_that_was_replaced():
    source = ROOT / "src/bigbatch"
    names = {path.stem for path in source.rglob("*") if path.suffix == ".py" or path.is_dir()}
    assert not names & set(MODULES.split())


def test_a_replaced_term_is_found():
    assert [(1, "goes on")] == replaced_in_text("the run goes on")
    assert [(1, "goes\n    on")] == replaced_in_text("a training that goes\n    on")
    assert [(2, "fold")] == replaced_in_text("\n_fold(how)")
    assert [(1, "--begin-from")] == replaced_in_text("bigbatch train --begin-from RUN")
    assert [] == replaced_in_text("unfolded lawn --full-precision")
    code = "for here in x:\n    self._told = 1\ndef f(mine): ..."
    assert {(1, "here"), (2, "_told"), (3, "mine")} == set(replaced_names_in(code))
