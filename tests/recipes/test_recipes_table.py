"""What `bigbatch list` says, and what every recipe file keeps to."""

import ast
import re
from itertools import combinations
from pathlib import Path

import pytest

import bigbatch_recipes
from bigbatch_recipes.recipe_registry import EXPERIMENTS, RECIPES
from bigbatch_recipes.validate import count_parameters

FOLDER = Path(bigbatch_recipes.__file__).parent
FILES = [path for path in sorted(FOLDER.glob("*.py")) if " = Recipe(" in path.read_text()]
LONGEST = 140  # lines, without imports
REPEATED = 6  # lines one after another that two recipes may not share


def test_every_recipe_and_experiment_stands_in_the_table(bigbatch, tmp_path):
    status, out, err = bigbatch("list", "--data", tmp_path)
    assert (0, "") == (status, err)
    assert max(len(line) for line in out.splitlines() if line.startswith(" ")) <= 80
    first = {line.split()[0].rstrip(":") for line in out.splitlines() if line.strip()}
    assert set(RECIPES) | set(EXPERIMENTS) <= first


@pytest.mark.late
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_its_arms_data_and_commands(bigbatch, name):
    recipe = RECIPES[name]
    status, out, _ = bigbatch("list", name)
    said = " ".join(out.split())
    assert 0 == status
    assert " ".join(f"{name}: {recipe.summary}".split()) in said
    for arm, changes in recipe.arm_changes.items():
        listed = ", ".join(f"{key}={value}" for key, value in changes.items())
        assert f"{arm}: {listed}" in said
    assert f"bigbatch train {name} --dry-run" in said
    assert f"minutes {recipe.minutes:g}" in said
    for pattern in recipe.origin.files:
        assert pattern in said


@pytest.mark.thorough
def test_data_that_is_found_is_said_and_where(bigbatch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for recipe in RECIPES.values():
        if not recipe.origin.files:
            continue
        folder = tmp_path / recipe.name
        folder.mkdir()
        _, out, _ = bigbatch("list", recipe.name, "--data", folder)
        assert f"notin{folder}" in "".join(out.split())  # lines end anywhere
        file = folder / recipe.origin.files[0].replace("*", "x")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        _, out, _ = bigbatch("list", recipe.name, "--data", folder)
        assert f"in{folder}" in "".join(out.split())
        assert f"notin{folder}" not in "".join(out.split())


def test_an_unknown_recipe_is_refused(bigbatch):
    status, _, err = bigbatch("list", "alexnet")
    assert 2 == status
    assert "recipe 'alexnet' is unknown; choose one of: " in err


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_number_of_the_paper_has_a_source(recipe):
    tables = [recipe.paper_scale, *recipe.arm_tables.values()]
    tables += recipe.at_scale(paper=True).arm_tables.values()
    assert [] == [one for table in tables for one in table.items() if not one[1][1].strip()]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recipe_with_variance_reduction_has_the_clips_of_the_paper(recipe):
    scales = recipe, recipe.at_scale(paper=True)
    arms = [arm for one in scales for arm in one.arm_changes.values()]
    assert any(str(arm.get("optimizer")).startswith("vr-") for arm in arms)
    clips = {"gamma": (0.1, "VRGD"), "r_max": (1.0, "VRGD, equation 9")}
    assert clips == {name: recipe.paper_scale.get(name) for name in clips}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_virtual_ranks_of_the_paper_can_be_assigned_to_its_ranks(recipe):
    assert 0 == recipe.at_scale(paper=True).settings().virtual_ranks % recipe.paper_ranks


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_number_of_weights_is_that_of_the_network(recipe):
    scales = [recipe.at_scale(paper=scale).settings() for scale in (False, True)]
    assert tuple(count_parameters(recipe, settings) for settings in scales) == recipe.parameters


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_one_short_file(file):
    assert len(without_imports(file)) < LONGEST


def test_every_recipe_has_a_file_of_its_own():
    assert len(RECIPES) == sum(path.read_text().count(" = Recipe(") for path in FILES)


def test_no_two_recipes_repeat_each_other():
    blocks = {file.stem: set(blocks_of(file)) for file in FILES}
    for one, other in combinations(blocks, 2):
        repeated = blocks[one] & blocks[other]
        assert not repeated, f"{one} and {other} both have\n" + "\n".join(min(repeated))


def without_imports(file):
    lines = file.read_text().splitlines()
    imports = [
        n for n in ast.parse(file.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)
    ]
    left_out = {at for node in imports for at in range(node.lineno - 1, node.end_lineno)}
    return [line for at, line in enumerate(lines) if at not in left_out]


def blocks_of(file):
    """Every run of so many lines, without imports, blank lines and indentation.

    Nor do lines count which say no more than that a recipe's own function is meant.
    """
    lines = [line.strip() for line in without_imports(file)]
    names_only = re.compile(r"(\w+)=_\1,|[()\[\]{},]*")
    kept = [line for line in lines if not names_only.fullmatch(line)]
    return zip(*(kept[start:] for start in range(REPEATED)), strict=False)


def test_a_block_that_two_files_share_is_found(tmp_path):
    text = "\n".join(f"x = {number}" for number in range(9))
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.py").write_text("import os\ny = 0\n" + text.replace("x = 6", "x = 66"))
    first, second = (set(blocks_of(tmp_path / name)) for name in ("a.py", "b.py"))
    assert {tuple(f"x = {number}" for number in range(6))} == first & second
