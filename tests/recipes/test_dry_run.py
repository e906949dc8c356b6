"""What a training would take, said beforehand; held to real trainings where they fit here."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from bigbatch.errors import SettingError
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.dry_run import dry_run, sources
from bigbatch_recipes.recipe import Sweep
from bigbatch_recipes.recipe_registry import RECIPES
from bigbatch_recipes.study import start_study, start_sweep
from bigbatch_recipes.sweep import points_of
from bigbatch_recipes.train_run import Training
from bigbatch_recipes.validate import count_parameters

ARMS = [
    pytest.param(
        recipe,
        arm,
        id=f"{recipe.name}-{arm or 'none'}",
        marks=() if place < 2 else pytest.mark.release,
    )
    for recipe in RECIPES.values()
    for place, arm in enumerate(("", *recipe.arms))
]


def settings(**changes):
    return DIGITS.settings().with_changes(changes)


@pytest.mark.late
@pytest.mark.parametrize("paper_scale", [False, True], ids=["small", "full"])
@pytest.mark.parametrize(("recipe", "arm"), ARMS)
def test_every_arm_of_every_recipe_can_be_planned_at_both_scales(recipe, arm, paper_scale):
    scaled = recipe.at_scale(paper=paper_scale)
    asked = scaled.settings()
    run = dry_run(scaled, scaled.arm(arm, asked) if arm else asked, recipe.paper_ranks)
    assert run.parameters > 0
    for planned in run.plans.values():
        plan = planned.plan
        assert plan.batch_size == run.ranks * planned.accumulation * plan.micro
        assert planned.steps >= run.settings.epochs * run.samples / plan.batch_size


# passes over the data, and samples of all of them: as many steps as the paper's
IN_ALL = {"squad": 2 * 87_599, "cifar10-resnet18": 200 * 50_000}


@pytest.mark.thorough
@pytest.mark.parametrize("name", IN_ALL)
def test_the_paper_sees_its_samples_once_an_epoch(name):
    asked = RECIPES[name].at_scale(paper=True).settings()
    assert IN_ALL[name] == asked.epochs * dry_run(RECIPES[name], asked).samples


@pytest.mark.late
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_small_training_is_small_for_data_of_any_size(recipe):
    asked = recipe.settings()
    assert asked.epochs * dry_run(recipe, asked).samples <= 100_000


class Wide(nn.Module):
    """Two layers with one weight, and a norm with buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64)
        self.second = nn.Linear(64, 64, bias=False)
        self.second.weight = self.first.weight


def test_a_shared_weight_counts_once_and_buffers_do_not():
    run = dry_run(dataclasses.replace(DIGITS, model=lambda _: Wide()), settings())
    assert 64 * 64 + 2 * 64 == run.parameters


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("arm", DIGITS.arms)
def test_the_plan_at_the_start_is_that_of_the_training(arm, ranks):
    asked = DIGITS.arm(arm, settings(min_batch=48, batch_size=48))
    expected = Training(DIGITS, asked.with_changes({"virtual_ranks": ranks})).train.plan
    assert expected == dry_run(DIGITS, asked, ranks).plans["start"].plan


@pytest.mark.parametrize("ranks", [1, 2, 512])  # the largest batch of the digits
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_samples_of_a_paper_are_counted_and_not_listed(recipe, ranks):
    """In a second, also for the billions of rows of a click log."""
    run = dry_run(recipe, recipe.at_scale(paper=True).settings(), ranks)
    expected = min(run.settings.samples or recipe.paper_samples, recipe.paper_samples)
    assert expected == run.samples


SCHEDULED = {"policy": "schedule", "batch_schedule": "32, x2 every 5 epochs"}


def test_a_written_schedule_has_its_own_least_and_largest_batch():
    run = dry_run(DIGITS, settings(**SCHEDULED, epochs=20))
    sizes = {name: planned.plan.batch_size for name, planned in run.plans.items()}
    assert {"start": 32, "least": 32, "largest": 256} == sizes


def test_learning_rates_follow_schedule_and_batch():
    asked = settings(lr_schedule="warm-up 1 epoch; polynomial 1", lr=0.1, epochs=4, base_batch=1)
    rates = (
        dry_run(DIGITS, asked.with_changes({"policy": "fixed", "batch_size": 4})).plans["start"].lr
    )
    assert pytest.approx([0.2 * r for r in (0.5 / 1347, 1, 2 / 3, 0)], abs=2e-4) == list(rates)


def test_samples_of_the_settings_are_the_epoch_where_they_are_fewer():
    assert 500 == dry_run(DIGITS, settings(samples=500)).samples
    assert 1347 == dry_run(DIGITS, settings(samples=50_000)).samples


def test_each_setting_says_whose_it_is():
    asked = DIGITS.arm("simigrad-vr", settings(lr=0.5))
    found = sources(dataclasses.replace(DIGITS, small={"epochs": 25}), asked)
    assert (0.5, "given here") == found["lr"]
    assert ("vr-momentum", "arm simigrad-vr, ours") == found["optimizer"]
    assert (25, "small scale, ours") == found["epochs"]
    assert (32, "ours") == found["base_batch"]
    assert (0.0, "default, ours") == found["clip"]


def test_what_an_arm_changes_says_whose_it_is():
    recipe = RECIPES["bert-pretrain"].at_scale(paper=True)
    arm = recipe.arm("simigrad-long", recipe.settings())
    found = sources(recipe, arm)
    code = "SimiGrad's code, BERT-Large, rows of 512"
    assert (0.002, f"arm simigrad-long, {code}") == found["lr"]
    assert (16, "arm simigrad-long, ours") == found["micro_batch"]
    lamb = recipe.arm("lamb-short", recipe.settings())
    batch = sources(recipe, lamb)["batch_size"]
    assert (65_536, "arm lamb-short, VRGD, table 1") == batch
    assert 65_536 == recipe.arm_changes["lamb-short"]["batch_size"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": "schedule"}, "policy=schedule needs batch_schedule"),
        ({"optimizer": "lion"}, "optimizer 'lion' is unknown"),
        ({"min_batch": 1024}, "min_batch=1024 exceeds max_batch=512"),
        ({"lr_scaling": "sqrt", **SCHEDULED, "batch_schedule": "32, then decay"}, "decay"),
        ({"optimizer": "vr-sgd", "gamma": 0.0}, "gamma=0"),
        (
            {"precision": "bfloat16", "double": True},
            "precision=bfloat16 has no effect on a model in float64",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_as_by_a_training(changes, said):
    with pytest.raises(SettingError, match=said) as expected:
        Training(DIGITS, settings(**changes))
    with pytest.raises(SettingError) as actual:
        dry_run(DIGITS, settings(**changes))
    assert str(expected.value) == str(actual.value)


REFUSED = [
    ("digits", "dropout=2.0", "cannot be built with dropout=2.0, double=False"),
    ("imagenet-resnet50", "size=512", "size=512 must be above 0 and at most resize="),
    ("bert-pretrain", "length=600", "length=600 must be from 16 to 512 tokens"),
    ("bert-pretrain", "predictions=0", "predictions=0"),
    ("squad", "stride=0", "stride=0"),
    ("char-lm", "length=0", "length=0"),
]


REFUSING = [
    Training,
    dry_run,
    lambda recipe, asked: start_sweep(
        recipe, Path("new"), points_of(recipe, Sweep(({"lr": (0.1,)},)), asked), (), seeds=1
    ),
    lambda recipe, asked: start_study(recipe, Path("new"), asked, seeds=1),
]


@pytest.mark.parametrize(("name", "change", "said"), REFUSED)
def test_training_study_sweep_and_dry_run_refuse_in_the_same_line(
    name, change, said, tmp_path, monkeypatch
):
    """Before data are read, which are not there, and before anything is written."""
    monkeypatch.chdir(tmp_path)
    own = RECIPES[name].settings()
    asked, lines = own.with_changes({**own.parse_change(change), "data": "nowhere"}), set()
    for refusing in REFUSING:
        with pytest.raises(SettingError, match=said) as raised:
            refusing(RECIPES[name], asked)
        lines.add(str(raised.value))
    assert 1 == len(lines)
    assert [] == list(tmp_path.iterdir())


def test_the_command_shows_the_small_scale_and_writes_nothing(bigbatch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = bigbatch(
        "train", "digits", "--dry-run", "--set", "epochs=3", "--arm", "simigrad"
    )
    assert (0, "") == (status, err)
    rows = {line.split("  ")[0].strip(): line.split() for line in out.splitlines()}
    assert ["epochs", "3", "given", "here"] == rows["epochs"]
    assert ["parameters", "71,754"] == rows["parameters"]
    assert ["lr", "0.02", "ours"] == rows["lr"]
    assert max(map(len, out.splitlines())) <= 80
    assert [] == list(tmp_path.iterdir())


def test_the_command_shows_the_full_scale_alone_on_so_many_ranks(bigbatch):
    status, out, _ = bigbatch(
        "train", "digits", "--dry-run", "--paper-scale", "--dry-run-ranks", "4"
    )
    rows = {line.split("  ")[0].strip(): line.split() for line in out.splitlines()}
    assert 0 == status
    assert ["ranks", "4"] == rows["ranks"]
    assert ["=", "4", "x", "1", "x", "8"] == rows["start: batch"][-6:]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dry-run", "--data", "nowhere"], "there is no data folder nowhere"),
        (
            ["--dry-run", "--policy", "fixed", "--target", "0.2"],
            "target has no effect with policy=fixed",
        ),
        (["--dry-run-ranks", "2"], "--dry-run-ranks is for dry runs"),
        (["--dry-run", "--set", "lr=-1"], "lr=-1.0 must be a number in [0, 3.4e38]"),
    ],
)
def test_options_that_do_not_go_together_are_refused_in_one_line(bigbatch, options, said):
    status, out, err = bigbatch("train", "digits", *options)
    assert (2, "") == (status, out)
    assert said in err
    assert 1 == len(err.splitlines())


def test_a_schedule_that_is_not_reached_is_said_as_by_the_training(bigbatch):
    schedule = "x0.1 at 2 and 9 epochs"
    with pytest.warns(UserWarning, match="continues for 12,123 samples") as said:
        Training(DIGITS, settings(lr_schedule=schedule, epochs=8))
    asked = ("--set", f"lr_schedule={schedule}", "--epochs", "8")
    _, out, _ = bigbatch("train", "digits", "--dry-run", *asked)
    assert 1 == " ".join(out.split()).count(str(said[0].message))
    _, out, _ = bigbatch("train", "digits", "--dry-run", *asked[:2], "--epochs", "9")
    assert "continues for" not in out


def test_rates_that_another_run_multiplies_are_said_to_be_without_it(bigbatch):
    arm = ("--arm", "momentum-like-vr-momentum")
    status, out, _ = bigbatch("train", "cifar10-resnet56", "--dry-run", *arm)
    assert 0 == status
    assert "The mean r of lr_control_from is known when that run has ended" in " ".join(out.split())


@pytest.mark.parametrize("name", ["bert-pretrain", "squad"])
def test_the_outline_of_bert_has_as_many_weights_as_the_model(name):
    recipe = RECIPES[name]
    for size in ("tiny", "mini"):
        asked = recipe.settings().with_changes({"size": size})
        model = dataclasses.replace(recipe, outline=None)
        assert count_parameters(model, asked) == count_parameters(recipe, asked)


def command_without(packages, *arguments, folder):
    """Runs the command where these packages cannot be imported, as if they were not installed."""
    code = f"import sys; sys.modules.update(dict.fromkeys({packages}))\n"
    code += "from bigbatch.cli import main; main()"
    line = [sys.executable, "-c", code, *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, cwd=folder)


OF_DATA = ("transformers", "tokenizers", "sklearn", "pandas")


@pytest.mark.parametrize("name", ["digits", "dlrm", "bert-pretrain", "squad"])
def test_a_dry_run_needs_no_package_of_data_or_model(name, tmp_path):
    ended = command_without(OF_DATA, "train", name, "--dry-run", folder=tmp_path)
    assert (0, "") == (ended.returncode, ended.stderr)


@pytest.mark.parametrize("arguments", [["train", "bert-pretrain"], ["sweep", "bert-pretrain"]])
def test_a_missing_package_is_named_before_anything_is_written(arguments, tmp_path):
    ended = command_without(("tokenizers",), *arguments, folder=tmp_path)
    note, line = ended.stderr.splitlines()
    assert note.startswith("bigbatch: note: no --data")
    assert line.startswith("bigbatch: bigbatch-recipes[bert] needs tokenizers, which is not")
    assert "; run: pip install " in line
    assert [] == list(tmp_path.rglob("*.json"))
