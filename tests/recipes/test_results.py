"""Tables and figures of the papers that can be asked for: their settings, arms and repeats."""

import math

import pytest

from bigbatch_recipes.dry_run import sources
from bigbatch_recipes.recipe_registry import RECIPES
from bigbatch_recipes.study import trainings_of
from bigbatch_recipes.sweep import points_of, sweep_of
from bigbatch_recipes.vrgd_paper import COLUMNS

RESNET56, RESNET50 = RECIPES["cifar10-resnet56"], RECIPES["imagenet-resnet50"]
BERT = RECIPES["bert-pretrain"].at_scale(paper=True)
TABLE_5 = ("warm-up 5 epochs; cosine", 0.1)
FIGURE_2 = ("x0.1 at 91 and 136 epochs", 0.0)


@pytest.mark.parametrize(
    ("result", "expected"), [(None, TABLE_5), ("table-5", TABLE_5), ("figure-2", FIGURE_2)]
)
def test_table_5_warms_up_smooths_and_has_a_cosine_figure_2_has_steps_and_neither(result, expected):
    recipe = (RESNET56.for_result(result) if result else RESNET56).at_scale(paper=True)
    asked = recipe.settings()
    assert expected == (asked.lr_schedule, asked.task["label_smoothing"])
    named = sources(recipe, asked)
    where = "figure 2" if result == "figure-2" else "table 5"
    assert all(where in named[name][1] for name in ("lr_schedule", "label_smoothing"))
    swept = points_of(recipe, recipe.sweep, asked)
    assert {expected} == {
        (point.settings.lr_schedule, point.settings.task["label_smoothing"]) for point in swept
    }


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.results])
def test_every_result_is_of_arms_that_there_are_and_says_its_sources(name):
    whole = RECIPES[name].at_scale(paper=True)
    for result, one in whole.results.items():
        recipe = whole.for_result(result)
        arms = recipe.arm_changes
        assert list(one.arms or whole.arm_changes) == list(arms)
        for arm in arms:  # what a phase begins from is among them
            asked = recipe.arm(arm, recipe.settings())
            assert set(asked.required_runs.values()) <= set(arms)
        assert all(source for _, source in one.settings.values())


def test_table_1_has_the_steps_of_every_column_of_the_paper():
    """To 0.2 %: the samples of a phase are round numbers."""
    settings, found = BERT.settings(), {}
    for optimizer in ("lamb", "vr-lamb"):
        for arm in (name for name in BERT.paper_arms if name.startswith(optimizer)):
            long = BERT.arm(arm, settings)
            if not long.init_from:
                continue
            short = BERT.arm(long.init_from, settings)
            assert optimizer == short.optimizer == long.optimizer
            assert (128, 512) == (short.task["length"], long.task["length"])
            steps = sum(math.ceil(one.samples / one.batch_size) for one in (short, long))
            found[optimizer, short.batch_size // 1024, long.batch_size // 1024] = steps
    expected = {
        (optimizer, short, long): pytest.approx(steps, rel=2e-3)
        for optimizer in ("lamb", "vr-lamb")
        for short, long, steps in COLUMNS.values()
    }
    assert expected == found


def test_a_long_phase_of_table_1_begins_from_its_own_short_one_in_a_sweep():
    settings, grid = BERT.settings(), ["arm=lamb-16k-short,lamb-16k-long"]
    points = points_of(BERT, sweep_of(BERT, settings, grid, ()), settings)
    short, long = trainings_of(BERT, points, 1)
    assert short == trainings_of(BERT, points, 1)[long].init_from


def test_a_long_phase_of_table_1_alone_says_how_to_name_its_short_one(bigbatch, tmp_path):
    options = ("--paper-scale", "--result=table-1", "--arm=lamb-16k-long", "--data", tmp_path)
    (tmp_path / "text.txt").write_text("one")
    status, _, err = bigbatch("train", "bert-pretrain", *options)
    assert (2, True) == (status, "init_from of arm lamb-16k-long is arm lamb-16k-short" in err)


def test_the_sweep_of_bert_at_scale_has_simigrad_and_every_batch_of_a_short_phase():
    swept = points_of(BERT, BERT.sweep, BERT.settings())
    adaptive = [point.settings for point in swept if point.settings.policy == "simigrad"]
    assert {(0.75, 0.0004), (0.75, 0.0006), (0.8, 0.0004), (0.8, 0.0006)} == {
        (one.target, one.lr) for one in adaptive
    }
    fixed = {
        (point.settings.optimizer, point.settings.batch_size // 1024)
        for point in swept
        if point.settings.policy == "fixed"
    }
    assert {(base, size) for base in ("lamb", "vr-lamb") for size in (16, 32, 64, 96, 128)} == fixed


def test_table_2_has_momentum_and_lamb_next_to_lars_at_every_batch():
    recipe = RESNET50.for_result("table-2").at_scale(paper=True)
    swept = points_of(recipe, recipe.sweep, recipe.settings())
    found = {(point.settings.arm, point.settings.batch_size // 1024) for point in swept}
    arms = {"momentum", "lamb", "lars", "vr-lars", "vr-lars-10"}
    assert {(arm, size) for arm in arms for size in (2, 4, 8, 16, 32, 64, 96)} == found


@pytest.mark.parametrize("paper_scale", [False, True])
def test_a_study_in_full_has_the_repeats_of_the_paper(paper_scale):
    found = {name: recipe.at_scale(paper=paper_scale).seeds for name, recipe in RECIPES.items()}
    of_the_paper = {"cifar10-resnet56": 5, "imagenet-resnet50": 5, "dlrm": 5}
    assert {name: of_the_paper.get(name, 3) if paper_scale else 3 for name in RECIPES} == found


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_result_is_asked_for_by_its_name_and_in_full(bigbatch, command):
    for arguments, message in (
        (("digits", "--result=x"), "recipe 'digits' has no --result x"),
        (
            ("cifar10-resnet56", "--result=table-5"),
            "--result table-5 is of the paper's scale; give",
        ),
        (("cifar10-resnet56", "--paper-scale", "--result=x"), "choose one of: table-5, figure-2"),
    ):
        status, _, err = bigbatch(command, *arguments, "--dry-run")
        assert (2, True) == (status, message in err)


@pytest.mark.thorough
def test_the_commands_show_a_result(bigbatch):
    _, out, _ = bigbatch(
        "sweep", "imagenet-resnet50", "--paper-scale", "--result=table-2", "--dry-run"
    )
    assert "105 points, of which each shows the best lr; 525 trainings over 5 seeds each" in out
    options = ("--paper-scale", "--result=figure-2", "--dry-run")
    _, out, _ = bigbatch("train", "cifar10-resnet56", *options)
    assert "VRGD, figure 2" in out
    _, out, _ = bigbatch("list", "cifar10-resnet56")
    assert "figure-2: lr_schedule=x0.1 at 91 and 136 epochs, label_smoothing=0.0" in out
