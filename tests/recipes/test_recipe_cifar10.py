"""The recipes of CIFAR-10: their tables, and trainings on a part of it."""

import itertools
import json

import pytest
import torch

from bigbatch_recipes.build_loop import build_controller, build_optimizer
from bigbatch_recipes.datasets import cifar10
from bigbatch_recipes.datasets.in_memory import chosen_indices
from bigbatch_recipes.recipe_registry import RECIPES
from bigbatch_recipes.study import trainings_of
from bigbatch_recipes.sweep import points_of
from bigbatch_recipes.train_run import Training
from cifar_files import write_few
from real_data import needs
from torchrun import torchrun

RESNET18, RESNET56 = RECIPES["cifar10-resnet18"], RECIPES["cifar10-resnet56"]
IMAGE_RECIPES = [RESNET18, RESNET56, RECIPES["fashion-mnist"]]
NAMES = [recipe.name for recipe in IMAGE_RECIPES]
TINY = ("--set", "width=4", "--set", "samples=0", "--epochs", "3", "--quiet")
TINY += ("--set", "lr_schedule=x0.1 at 2 and 3 epochs")


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A folder with 1,500 images to train on and 500 to test."""
    folder = tmp_path_factory.mktemp("few")
    write_few(folder, 1500, 500)
    return folder


@pytest.mark.parametrize(("recipe", "parameters"), [(RESNET18, 11_173_962), (RESNET56, 853_018)])
def test_the_full_network_is_that_of_the_paper(recipe, parameters):
    with torch.device("meta"):
        network = recipe.model(recipe.at_scale(paper=True).settings())
    assert parameters == sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize("paper_scale", [False, True])
@pytest.mark.parametrize("recipe", IMAGE_RECIPES, ids=NAMES)
def test_every_arm_can_be_built_and_takes_a_batch(recipe, paper_scale):
    settings = recipe.at_scale(paper=paper_scale).settings()
    with torch.device("meta"):
        model = recipe.model(settings)
    loss = recipe.loss(settings)(model, recipe.example(settings, 8))
    assert () == loss.shape
    for name in recipe.arms:
        arm = recipe.arm(name, settings)
        assert arm.batch_size <= build_controller(arm).decision.batch_size
        optimizer = build_optimizer(arm, model.named_parameters())
        assert arm.optimizer.startswith("vr-") == hasattr(optimizer, "gsnr")
    if paper_scale:
        assert all(source for _, source in recipe.paper_scale.values())
        assert recipe.small.keys() <= recipe.paper_scale.keys() | {"samples"}


def points(grids):
    """What the values of each grid make together."""
    return [
        dict(zip(grid, values, strict=True))
        for grid in grids
        for values in itertools.product(*grid.values())
    ]


def test_the_full_sweep_of_simigrad_is_its_grid_of_609_runs():
    swept = [point for point in points(RESNET18.paper_sweep.grids) if "target" in point]
    found = {(point["max_batch"], point["min_batch"], point["target"]) for point in swept}
    expected = {
        (upper * 1024, lower, round(target * 0.01, 2))
        for upper in (16, 8, 4, 2, 1)
        for lower in (1024, 512, 256, 128, 64, 32)
        for target in range(21)
        if lower < upper * 1024
    }
    assert 609 == len(swept) == len(expected)
    assert expected == found


def test_a_small_sweep_of_simigrad_has_targets_and_bounds():
    swept = [point for point in points(RESNET18.sweep.grids) if "target" in point]
    found = {(point["target"], point["min_batch"]) for point in swept}
    targets, bounds = ({pair[place] for pair in found} for place in (0, 1))
    assert set(itertools.product(targets, bounds)) == found
    assert min(len(targets), len(bounds)) > 1


def test_linear_and_square_root_scaling_are_tuned_over_the_same_rates():
    for recipe, batches in ((RESNET18, 9), (RESNET56, 6)):
        fixed = [p for p in points(recipe.paper_sweep.grids) if "batch_size" in p]
        assert batches == len({point["batch_size"] for point in fixed})
        assert ("lr",) == recipe.paper_sweep.tuned == recipe.sweep.tuned
    by_scaling = {"linear": [], "sqrt": []}
    for point in points(RESNET18.paper_sweep.grids):
        if "lr_scaling" in point:
            by_scaling[point["lr_scaling"]].append((point["batch_size"], point["lr"]))
    assert by_scaling["linear"] == by_scaling["sqrt"]
    assert 45 == len(by_scaling["sqrt"])


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", IMAGE_RECIPES[:2], ids=NAMES[:2])
def test_every_point_of_a_sweep_can_be_trained(recipe):
    for one in (recipe, recipe.at_scale(paper=True)):
        for point in points_of(one, one.sweep, one.settings()):
            assert point.settings.min_batch < point.settings.max_batch


SWEPT = ("lr", "batch_size", "lr_schedule", "weight_decay", "momentum")


def swept(*, paper_scale):
    """Of each optimizer with its upper clip: the rest of each of its points."""
    recipe, found = RESNET56.at_scale(paper=paper_scale), {}
    for point in points_of(recipe, recipe.sweep, recipe.settings()):
        one = point.settings
        key = (one.optimizer, one.r_max if one.optimizer.startswith("vr-") else one.lr_control_from)
        found.setdefault(key, set()).add(tuple(getattr(one, name) for name in SWEPT))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("paper_scale", "bases"), [(False, 2), (True, 4)])
def test_a_base_and_its_vr_arms_are_swept_over_the_same_values(paper_scale, bases):
    found = swept(paper_scale=paper_scale)
    plain = [optimizer for optimizer, other in found if other == ""]
    assert bases == len(plain)
    for base in plain:
        assert found[base, ""] == found[f"vr-{base}", 1.0] == found[f"vr-{base}", 10.0]
    assert 5 * 6 == len(swept(paper_scale=True)["momentum", ""])


@pytest.mark.thorough
@pytest.mark.parametrize("paper_scale", [False, True])
def test_every_point_of_vr_momentum_has_a_control_at_its_mean_rate(paper_scale):
    recipe = RESNET56.at_scale(paper=paper_scale)
    found = points_of(recipe, recipe.sweep, recipe.settings())
    trainings = trainings_of(RESNET56, found, 1)
    vr_arms = {name for name, one in trainings.items() if one.optimizer == "vr-momentum"}
    controls = [one for one in trainings.values() if one.lr_control_from]
    assert vr_arms
    assert vr_arms == {control.lr_control_from for control in controls}
    for control in controls:
        vr_arm = trainings[control.lr_control_from]
        assert "momentum" == control.optimizer
        assert all(getattr(vr_arm, name) == getattr(control, name) for name in SWEPT)


@pytest.mark.thorough
@needs("cifar10")
@pytest.mark.parametrize(
    ("recipe", "arm"),
    [(RESNET18, "simigrad"), pytest.param(RESNET56, "vr-lamb-10", marks=pytest.mark.release)],
    ids=NAMES[:2],
)
def test_a_tiny_training_learns(bigbatch, few, tmp_path, recipe, arm):
    place = tmp_path / "run"
    sizes = ["batch_size", "micro_batch", *(["min_batch"] if arm == "simigrad" else [])]
    smaller = [part for size in sizes for part in ("--set", f"{size}=64")]
    smaller += ["--set", "virtual_ranks=4"]
    options = (*TINY, *smaller, "--arm", arm, "--run-dir", place)
    status, _, said = bigbatch("train", recipe.name, "--data", few, *options)
    assert (0, "") == (status, said)
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert 3 * 1500 == rows[-1]["samples"]
    scores = rows[-1]["metrics"]
    assert "test accuracy, %" == next(iter(scores))
    assert scores["test accuracy, %"] > 18  # chance has 10, and deviates by 1.4
    if recipe is RESNET56:
        train, gap = (
            scores[f"train {of}"] for of in ("accuracy, % (500 samples)", "minus test, %")
        )
        assert pytest.approx(train - scores["test accuracy, %"]) == gap


@needs("cifar10")
def test_the_train_accuracy_is_of_images_that_are_trained_on(few):
    settings = RESNET56.settings().with_changes({"data": str(few), "samples": 300})

    def constant(x):
        return torch.nn.functional.one_hot(torch.full((len(x),), 3), 10).float()

    labels = cifar10.read(few)[0].tensors[1][chosen_indices(1500, 300)]
    scores = RESNET56.data(settings).scores(constant)
    expected = 100 * (labels == 3).double().mean().item()
    assert pytest.approx(expected) == scores["train accuracy, % (300 samples)"]


def steps(rank, ranks, recipe, settings):
    """Weights and batch sizes after three steps, and the first image as it was augmented."""
    training = Training(RECIPES[recipe], settings)
    sizes = []
    for _ in training.train.epochs(1):
        for step in itertools.islice(training.train, 3):
            for batch in step:
                step.backward(training.loss_of(training.wrapped_model, batch))
            sizes.append(step.update().batch_size)
        break
    return [p.tolist() for p in training.model.parameters()], sizes, torch.initial_seed()


@needs("cifar10")
@pytest.mark.parametrize("name", NAMES[:2])
def test_two_ranks_hold_the_same_weights(ranks, few, name):
    changes = {"data": str(few), "samples": 0, "width": 2, "batch_size": 64, "micro_batch": 16}
    settings = RECIPES[name].settings().with_changes({**changes, "min_batch": 32})
    (weights, sizes, seed), (others, other_sizes, other_seed) = ranks(2)(steps, name, settings)
    assert 3 == len(sizes)
    assert sizes == other_sizes
    assert weights == others
    assert seed != other_seed  # of the augmentation


@needs("cifar10")
@pytest.mark.release
def test_two_ranks_of_torchrun_train_to_the_end(few, tmp_path):
    place = tmp_path / "run"
    command = ("-m", "bigbatch", "train", "cifar10-resnet56", "--data", few, "--arm", "vr-lars")
    result = torchrun(2, *command, *TINY, "--batch-size", "128", "--run-dir", place)
    assert 0 == result.returncode, result.stderr
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert 3 * 1500 == rows[-1]["samples"]
    assert rows[-1]["metrics"]["test accuracy, %"] > 12
