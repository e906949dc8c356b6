"""Settings: their types, changes by name, changes written as text, and a recipe's table."""

import inspect
from dataclasses import replace

import pytest
import torch
from torch import nn

from bigbatch import AdaptiveBatch, Batches, Controller
from bigbatch.errors import SettingError
from bigbatch.policies.parse import POLICIES
from bigbatch_recipes.build_loop import OPTIMIZERS, build_optimizer
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.recipe import OURS
from bigbatch_recipes.settings import HELP, SETTING_TYPES, Settings, policy_settings, unused_in
from bigbatch_recipes.study import build_training
from bigbatch_recipes.sweep import points_of, sweep_of

DEFAULT = DIGITS.settings()


def test_every_setting_of_the_loop_has_an_option():
    loop = (Controller, Batches, AdaptiveBatch)
    names = {name for kind in loop for name in inspect.signature(kind).parameters}
    names |= {setting for name in POLICIES for setting in policy_settings(name).values()}
    objects = {"policy", "loader", "model", "scheduler", "scaler", "meter", "options"}
    # of other loaders, and of parameters in half types
    for_others = {"split", "count", "packed", "unit", "accumulate_float32_above"}
    assert names - objects - for_others <= SETTING_TYPES.keys()


def test_settings_of_the_loop_reach_it(tmp_path):
    changes = {"min_micro_batches": 6, "remainder": "drop", "virtual_ranks": 2, "samples": 100}
    train = build_training(tmp_path, DEFAULT.with_changes(changes)).train
    assert (2, 3) == (train.plan.ranks, train.plan.accumulation)
    assert ("drop", 2) == (train.batches.remainder, train.batches.virtual_ranks)


def test_a_fixed_micro_batch_is_that_of_every_step_in_one_training_and_on_a_grid(tmp_path):
    changes = {"fixed_micro_batch": True, "micro_batch": 8, "batch_size": 50, "policy": "fixed"}
    changes["virtual_ranks"] = 4
    plan = build_training(tmp_path, DEFAULT.with_changes(changes)).train.plan
    assert (8, 0) == (plan.micro, plan.batch_size % 32)
    sweep = sweep_of(DIGITS, DEFAULT, ["fixed_micro_batch=no,yes"], ())
    found = [point.settings.fixed_micro_batch for point in points_of(DIGITS, sweep, DEFAULT)]
    assert [False, True] == found


def test_a_recipes_table_fills_the_fields_and_leaves_the_rest_to_the_recipe():
    assert (25, 0.02, 32) == (DEFAULT.epochs, DEFAULT.lr, DEFAULT.base_batch)
    assert {"dropout": 0.0, "double": False} == DEFAULT.task


def test_the_small_scale_changes_the_papers():
    recipe = replace(
        DIGITS, paper_scale={**DIGITS.paper_scale, "epochs": (200, OURS)}, small={"dropout": 0.5}
    )
    paper_scale, small = recipe.at_scale(paper=True).settings(), recipe.settings()
    assert (200, 0.0) == (paper_scale.epochs, paper_scale.task["dropout"])
    assert (200, 0.5) == (small.epochs, small.task["dropout"])


def test_a_config_file_brings_them_back():
    assert DEFAULT == Settings.from_dict(DEFAULT.as_dict())


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("epochs=3", "epochs", 3),
        ("lr = 1e-3", "lr", 1e-3),
        ("lr=1", "lr", 1.0),
        ("batch_schedule=64, x2 at 5 epochs", "batch_schedule", "64, x2 at 5 epochs"),
        ("smoothing=4K samples", "smoothing", "4K samples"),
        ("smoothing=None", "smoothing", None),
        ("smoothing=auto", "smoothing", "auto"),
        ("max_change=auto", "max_change", "auto"),
        ("max_change=1.5", "max_change", 1.5),
        ("max_change=none", "max_change", None),
        ("every=none", "every", None),
        ("decay_all=no", "decay_all", False),
        ("dropout=0.25", "dropout", 0.25),
        ("double=false", "double", False),
        ("double=True", "double", True),
    ],
)
def test_a_text_is_read_in_the_type_of_the_present_value(text, name, value):
    assert {name: value} == DEFAULT.parse_change(text)
    changed = DEFAULT.with_changes(DEFAULT.parse_change(text))
    assert value == changed.task.get(name, getattr(changed, name, None))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wings=2", "recipe 'digits' has no setting 'wings'; it has .*dropout, .*epochs"),
        ("task=2", "has no setting|must be"),
        ("epochs=3.5", "epochs='3.5' must be a whole number"),
        ("double=maybe", "double='maybe' must be True or False"),
        ("epochs", "'epochs' must be written KEY=VALUE"),
        ("changed=1", "has no setting 'changed'"),
    ],
)
def test_a_text_that_cannot_be_read_says_what_can(text, message):
    with pytest.raises(SettingError, match=message):
        DEFAULT.parse_change(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": "much"}, "dropout='much' must be a number"),
        ({"decay_all": 1}, "decay_all=1 must be True or False"),
        ({"samples": -1}, "samples=-1 must be a whole number of at least 0"),
        ({"clip": float("inf")}, r"clip=inf must be a number in \[0, 3.4e38\]"),
        ({"weight_decay": 10**39}, "weight_decay=1000.* must be a number in"),
        ({"target": 1.0}, r"target=1.0 must be a number in \(-1, 1\), a cosine"),
        ({"gamma": 1.5}, r"gamma=1.5 must be a number in \(0, 1\]"),
        ({"beta3": 1.0}, r"beta3=1.0 must be a number in \[0, 1\), or None"),
        ({"r_max": 0.5}, "r_max=0.5 must be a number of at least 1"),
        ({"precision": "int8"}, "precision='int8' must be one of"),
        ({"device": "tpu"}, "device='tpu' must be one of"),
        ({"lr_schedule": "wavy"}, "lr_schedule 'wavy' is not understood"),
        ({"task": 5}, "task=5 must be names, each with True or False, a whole number"),
    ],
)
def test_a_bad_value_is_refused_at_once(changes, message):
    with pytest.raises(SettingError, match=message):
        DEFAULT.with_changes(changes)


# the optimizer


def groups(optimizer, **changes):
    """(weight decay, vr) of each parameter, by name."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    settings = DEFAULT.with_changes({"optimizer": optimizer, "weight_decay": 0.5, **changes})
    built = build_optimizer(settings, model.named_parameters(), frozenset({"0.weight"}))
    return {
        name: (group["weight_decay"], group.get("vr"))
        for group in built.param_groups
        for name in group["param_names"]
    }


def test_biases_and_norms_decay_only_where_all_do():
    decays = {"0.weight": 0.5, "0.bias": 0.5, "1.weight": 0.5, "1.bias": 0.5}
    assert decays == {name: decay for name, (decay, _) in groups("adam").items()}
    kept = {**decays, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0}
    found = groups("adam", decay_all=False)
    assert kept == {name: decay for name, (decay, _) in found.items()}


def test_a_vr_optimizer_steps_the_excluded_as_its_base_does():
    found = {name: vr for name, (_, vr) in groups("vr-momentum").items()}
    assert {"0.weight": False, "0.bias": True, "1.weight": True, "1.bias": True} == found


def test_a_share_of_the_rate_is_not_for_what_a_vr_optimizer_steps_as_its_base_does():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    settings = DEFAULT.with_changes({"optimizer": "sgd", "lr": 0.5})
    built = build_optimizer(settings, model.named_parameters(), frozenset({"0.weight"}), 0.25)
    rates = {name: group["lr"] for group in built.param_groups for name in group["param_names"]}
    assert {"0.weight": 0.5, "0.bias": 0.125, "1.weight": 0.125, "1.bias": 0.125} == rates


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_the_rate_and_decay_of_the_settings(name):
    (group,) = build_optimizer(
        DEFAULT.with_changes({"optimizer": name, "lr": 0.25, "weight_decay": 0.125}),
        [("w", nn.Parameter(torch.ones(2, 2)))],
    ).param_groups
    assert (0.25, 0.125) == (group["lr"], group["weight_decay"])


def test_momentum_is_the_settings():
    settings = DEFAULT.with_changes({"momentum": 0.875})
    for name in ("momentum", "lars", "vr-momentum"):
        optimizer = build_optimizer(
            settings.with_changes({"optimizer": name}), [("w", nn.Parameter(torch.ones(2)))]
        )
        assert [0.875] == [group["momentum"] for group in optimizer.param_groups]


def built_vr(name, **changes):
    """The optimizer over one weight, built by the settings."""
    settings = DEFAULT.with_changes({"optimizer": name, **changes})
    return build_optimizer(settings, [("w", nn.Parameter(torch.ones(2)))])


def test_a_vr_optimizer_scales_the_step_by_r():
    """Gradients (1, 1) and (1, 3): G = (1, 2), s2 = (0, 1), so the ratios are inf and 4; k = 2."""
    optimizer = built_vr("vr-sgd", gamma=0.5, r_max=1.0, lr=1.0)
    (weight,) = optimizer.param_groups[0]["params"]
    for gradient in (1.0, 1.0), (1.0, 3.0):
        (weight * torch.tensor(gradient) / 2).sum().backward()
    optimizer.step()
    assert pytest.approx([1 - 1.0, 1 - 2.0]) == weight.tolist()


@pytest.mark.parametrize(
    ("optimizer", "beta3", "expected"),
    [
        ("vr-momentum", None, None),
        ("vr-adam", None, 0.9),
        ("vr-lamb", None, 0.9),
        ("vr-adam", 0.0, None),
        ("vr-lamb", 0.5, 0.5),
        ("vr-lars", 0.5, 0.5),
        ("vr-sgd", 0.9, 0.9),
    ],
)
def test_the_momentum_of_r_is_the_optimizers_own_or_what_the_settings_say(
    optimizer, beta3, expected
):
    (group,) = built_vr(optimizer, beta3=beta3).param_groups
    assert expected == group["beta3"]


@pytest.mark.parametrize("name", ["beta3", "gamma", "r_max"])
def test_an_optimizer_without_vr_lacks_the_options_of_r(name):
    assert name in unused_in(DEFAULT.with_changes({"optimizer": "adam"}))
    assert name not in unused_in(DEFAULT.with_changes({"optimizer": "vr-adam"}))


@pytest.mark.parametrize(
    "name", sorted(SETTING_TYPES.keys() - {"task", "init_from", "lr_control_from", "replay_from"})
)
def test_an_option_reads_what_a_setting_is(name):
    value = getattr(DEFAULT, name)
    assert value == Settings.parse_value(name, str(value))


def test_the_help_names_every_policy():
    assert all(f"{name}," in HELP["policy"] or f"{name};" in HELP["policy"] for name in POLICIES)
