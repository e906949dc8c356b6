"""docs/published-numbers.md: its counts, commands and numbers are those of recipes and pages."""

import inspect
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from bigbatch.optim import VRLAMB, VRAdam
from bigbatch_recipes import linear_regression as experiment
from bigbatch_recipes.recipe_registry import EXPERIMENTS, RECIPES
from bigbatch_recipes.vrgd_paper import COLUMNS

PAGE = Path(__file__).parents[2] / "docs/published-numbers.md"
TEXT = PAGE.read_text()
WORDS = " ".join(TEXT.split())
VERDICTS = (
    "reproduced",
    "in part: ",
    "contradicted: ",
    "not tested",
    "This scale cannot test it: ",
)
UNKNOWN = ("value not at hand", "not copied")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
COMMANDS = sorted({" ".join(one.split()) for one in re.findall(r"`(bigbatch [^`]+)`", TEXT)})
ESTIMATES = re.findall(r"(?m)^    ([TS]\d+) +(bigbatch .+)$", TEXT)
SETTINGS = ("cifar10-resnet18", "cifar10-resnet56", "imagenet-resnet50", "bert-pretrain")
SETTINGS += ("squad", "dlrm")
OUTCOMES = re.findall(
    r"(?s)- \*\*(R\d+)\*\* (?:`[^`]+`(?: of commit \w+)?|commit \w+),"
    r"\s+\[\S+\]\((\S+?)\): (.+?)(?=\n-|\n\n)",
    TEXT,
)


def tables(text):
    """Tables as lists of rows by column name."""
    for block in re.findall(r"(?m)(?:^\|.*\n)+", text):
        header, _, *rows = (line.strip("|\n ").split(" | ") for line in block.splitlines())
        yield [dict(zip(header, row, strict=True)) for row in rows]


def section(title):
    return re.search(rf"(?ms)^###? {re.escape(title)}\n(.*?)(?=^##|\Z)", TEXT)[1]


RESULTS = [row for table in tables(TEXT) for row in table if "published" in row]
FIRST_COLUMN = {
    title: next(tables(section(title))) for title in re.findall(r"### (Table .+)", TEXT)
}

SETTINGS_TITLE = "Settings of the papers that the recipes have"
ROWS = {
    row.get("training") or row["sweep"]: row
    for table in tables(section("What a test takes"))
    for row in table
}


def verdict_of(row):
    (found,) = (one for one in VERDICTS if row["verdict"].startswith(one))
    return found.rstrip(": ")


def test_the_summary_counts_the_numbers_of_the_tables():
    counts = Counter()
    for row in RESULTS:
        counts[verdict_of(row)] += len(row["published"].split(";"))
    (summary,) = tables(section("Summary"))
    expected = {**counts, "all": sum(counts.values())}
    assert expected == {row["verdict"]: int(row["numbers"]) for row in summary}
    absent, uncopied = (sum(row["published"] == one for row in RESULTS) for one in UNKNOWN)
    assert f"Of these, {absent} are results whose value is not at hand, and {uncopied}" in WORDS


def test_every_run_that_is_named_is_described_and_every_description_is_used():
    named = {name for row in RESULTS for name in re.findall(r"R\d+", row["run"])}
    assert named == {name for name, _, _ in OUTCOMES}
    others = {row["run"] for row in RESULTS if not re.search(r"R\d+", row["run"])}
    assert {"no", "arithmetic"} == others
    assert not [row for row in RESULTS if "reproduced" == row["verdict"] and row["run"][0] != "R"]


@pytest.mark.parametrize(("name", "link", "outcome"), OUTCOMES, ids=[one[0] for one in OUTCOMES])
def test_the_figures_of_an_outcome_are_those_of_the_page_that_it_links(name, link, outcome):
    page = (PAGE.parent / link).read_text()
    assert set() == set(NUMBER.findall(outcome)) - set(NUMBER.findall(page)), name


def test_every_link_exists():
    for target in re.findall(r"\]\((?!#)([^)]+)\)", TEXT):
        assert (PAGE.parent / target).exists(), target


@pytest.mark.parametrize("command", [*COMMANDS, *(one for _, one in ESTIMATES)])
def test_a_command_has_options_and_names_that_exist(bigbatch, command):
    _, verb, *rest = command.split()
    status, _, err = bigbatch(verb, *rest, "--help")  # refuses options that it does not have
    assert (0, "") == (status, err)
    if verb not in ("train", "sweep"):
        return
    given = dict(re.findall(r"--(arm|result) (\S+)", command))
    if rest[0] in EXPERIMENTS:
        assert not given
        return
    recipe = RECIPES[rest[0]].at_scale(paper="--paper-scale" in command)
    assert given.get("arm") in {None, *recipe.arm_changes}
    assert given.get("result") in {None, *recipe.results}


def test_tables_of_the_paper_have_the_batches_and_steps_of_the_recipes():
    columns = [(name.replace("-", "/"), f"{steps:,}") for name, (_, _, steps) in COLUMNS.items()]
    found = [(row["column"], row["steps"]) for row in FIRST_COLUMN["Table 1: BERT"]]
    assert columns == found
    for title, name, arm in (
        ("Table 2: ImageNet", "imagenet-resnet50", ("vr-lars",)),
        ("Table 4: DLRM", "dlrm", ("vr-sgd",)),
    ):
        batches = {
            size
            for grid in RECIPES[name].paper_sweep.grids
            if {*arm} & {*grid.get("arm", ())}
            for size in grid["batch_size"]
        }
        thousands = [int(row["batch"].rstrip("k")) for row in FIRST_COLUMN[title]]
        assert sorted(batches) == [1024 * one for one in thousands]
        assert ", ".join(map(str, thousands)) in section(SETTINGS_TITLE)
    optimizers = [row["optimizer"].lower() for row in FIRST_COLUMN["Table 5: CIFAR-10"]]
    assert {*optimizers} <= RECIPES["cifar10-resnet56"].arm_names
    batches = RECIPES["cifar10-resnet56"].paper_sweep.grids[0]["batch_size"]
    assert ", ".join(map(str, batches)) in section(SETTINGS_TITLE)


def test_the_recipe_page_of_dlrm_has_the_same_published_scores():
    rows = FIRST_COLUMN["Table 4: DLRM"]
    vr, base = zip(*(row["published"].split("; ") for row in rows), strict=True)
    dlrm = " ".join((PAGE.parent / "recipes/dlrm.md").read_text().split())
    assert f"VR-SGD {' '.join(vr)}, SGD {' '.join(base)}." in dlrm


def settings_of_the_papers(name):
    """Lines of the list: a recipe or an arm, the source, settings."""
    recipe = RECIPES[name]
    parts = {"": recipe.paper_scale}
    if name == "bert-pretrain":
        parts[", arm simigrad-long"] = recipe.at_scale(paper=True).arm_tables["simigrad-long"]
    for part, rows in parts.items():
        by_source = defaultdict(list)
        for key, (value, source) in rows.items():
            of_paper = source.startswith(("SimiGrad", "VRGD", "both papers"))
            if of_paper and "ours" not in source and key not in ("gamma", "r_max"):
                by_source[source].append(f"`{key}={value}`")
        for source, pairs in by_source.items():
            yield f"- {name}{part}, {source}: {', '.join(pairs)}"


def test_the_settings_are_those_of_the_recipes_and_none_is_missing():
    listed = section(SETTINGS_TITLE).split("\n\n")[1]
    expected = [line for name in SETTINGS for line in settings_of_the_papers(name)]
    assert expected == [" ".join(("- " + one).split()) for one in listed[2:].split("\n- ")]
    for recipe in RECIPES.values():
        assert (0.1, 1.0) == (recipe.paper_scale["gamma"][0], recipe.paper_scale["r_max"][0])
    for optimizer in (VRAdam, VRLAMB):
        assert (0.9, 0.999) == inspect.signature(optimizer).parameters["betas"].default
    assert (100, 2048, 0.1) == (experiment.STEPS, experiment.BATCH, experiment.GAMMA)
    swept = [g for g in RECIPES["cifar10-resnet18"].paper_sweep.grids if "target" in g]
    assert (0.0, 0.2) == (swept[0]["target"][0], swept[0]["target"][-1])


@pytest.mark.parametrize(
    ("claim", "value"),
    [
        ("6,137 / 4,301 = 1.43", round(6137 / 4301, 2)),
        ("80.00 - 76.81 is 3.19", round(80.00 - 76.81, 2)),
        ("is 3.19, which is -45.9", -round(100 * (1 - 3.19 / (3.12 / (1 - 0.471))), 1)),
        ("78.90 - (74.82 - 0.52) = 4.60", round(78.90 - (74.82 - 0.52), 2)),
        ("76.28 - 74.82 = 1.46", round(76.28 - 74.82, 2)),
        ("The numbers for ImageNet at 96k give 68.3", round(100 * (1 - 1.46 / 4.60), 1)),
        ("training accuracy falls by 2.62", round(78.90 - 76.28, 2)),
        ("91.86 - 12.21 = 79.65", round(91.86 - 12.21, 2)),
        ("up to 2.8", round(100 / 36, 1)),
        ("1 / r_l^2 is 100", 1 / 0.1**2),
    ],
)
def test_arithmetic_on_published_numbers_is_right(claim, value):
    assert claim in WORDS
    assert pytest.approx(value) == float(claim.split()[-1])


def fact_of(output, name):
    """A fact that a dry run prints, up to a comma in words; None without it."""
    found = re.search(rf"(?m)^{re.escape(name)} +(.*?)(?:, \D.*| +)?$", output)
    return found and found[1]


@pytest.mark.release
@pytest.mark.parametrize(("name", "command"), [one for one in ESTIMATES if one[0][0] == "T"])
def test_what_a_training_takes_is_what_its_dry_run_prints(bigbatch, name, command):
    row = ROWS[name]
    _, output, _ = bigbatch(*command.split()[1:])
    samples = fact_of(output, "samples in all")
    for key, fact in (("ranks", "ranks"), ("parameters", "parameters")):
        assert fact_of(output, fact) == row[key]
    assert samples == row["samples"]
    steps = [fact_of(output, f"{moment}: steps") for moment in ("start", "largest")]
    assert "; ".join(filter(None, (one and one.split(", ")[0] for one in steps))) == row["steps"]
    assert pytest.approx(float(row["operations"]) / 3.6e17, rel=0.06) == float(row["GPU hours"])


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "command"), [one for one in ESTIMATES if one[0][0] == "S"])
def test_a_sweep_has_so_many_trainings(bigbatch, name, command):
    row = ROWS[name]
    _, output, _ = bigbatch(*command.split()[1:])
    trainings = row["trainings"].replace(",", "")
    assert f" {trainings} trainings" in " ".join(output.split())
    expected = int(trainings) * float(ROWS[row["each as"]]["GPU hours"])
    assert pytest.approx(expected, rel=0.06) == float(row["GPU hours"].replace(",", ""))
