"""The API reference shows what a user may pass and the defaults, without the names of our types."""

import re
from html import unescape
from pathlib import Path

import pytest
import torch

from bigbatch.optim import VRLAMB, VRLARS, VRSGD, VRAdam

pytest.importorskip("mkdocstrings")
from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.thorough  # every test process builds the pages, for six seconds


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The text of each page of the built reference, with single spaces."""
    site = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        only_api = {"exclude_docs": "/*\n!/api/", "strict": False}
        build(load_config("mkdocs.yml", site_dir=str(site), **only_api))
    texts = {path.stem: path.read_text() for path in (site / "api").glob("*.html")}
    plain = {name: unescape(re.sub("<[^>]+>", "", text)) for name, text in texts.items()}
    return {name: " ".join(text.split()) for name, text in plain.items()}


def test_no_page_shows_what_only_the_source_needs(pages):
    assert 8 == len(pages)
    internals = (
        r"Annotated\[|CHECKED_ELSEWHERE|Unpack\[|LoopOptions|= \.\.\.|default: \.\.\.|\d\)\) \|"
    )
    for name, text in pages.items():
        assert [] == re.findall(internals, text), name


@pytest.mark.parametrize(
    ("page", "signature"),
    [
        ("policies", "SimiGrad( target: float in (-1, 1) = 0.2,"),
        ("policies", "grow: float > 1 = 1.1, shrink: float in (0, 1) = 0.9, )"),
        ("policies", 'max_change: float > 1 | Literal["auto"] | None = "auto",'),
        ("loop", "optimizer: Optimizer, loader: Iterable[Batch]"),
        ("loop", 'None = "sqrt", transport: bool = False, groups: int >= 2 | None = None,'),
        ("loop", "repeats: int >= 2 = 6,"),  # a constant of the module
        ("loop", "margin: 0 <= float < 1 = 0.1,"),
        ("loop", "batch_size (int >= 1 | None, default: None )"),
        ("measuring", "confidence: float in (0, 1) | None = None,"),
        ("optimizers", "lr: float >= 0 | Tensor = 0.001, momentum: 0 <= float < 1 = 0.0,"),
        ("advice", "optimizer: Optimizer, *, steps: int >= 1 | None = None,"),
    ],
)
def test_signatures_have_values_and_defaults(pages, page, signature):
    assert signature in pages[page]


@pytest.mark.parametrize("optimizer", [VRSGD, VRAdam, VRLARS, VRLAMB])
def test_defaults_of_options_are_those_that_an_optimizer_has(pages, optimizer):
    (group,) = optimizer([torch.nn.Parameter(torch.ones(2))]).param_groups
    signature = pages["optimizers"].split(f" {optimizer.__name__}( params: ")[1]
    for name in ("gamma", "r_max", "beta3"):
        assert str(group[name]) == re.search(rf"\b{name}: [^,]* = ([^,]+),", signature)[1]
