"""The recipe of Fashion-MNIST: its networks, and trainings on its real data."""

import json

import pytest
import torch
from torch import nn

from bigbatch.errors import SettingError
from bigbatch_recipes.fashion_mnist import FASHION_MNIST
from bigbatch_recipes.validate import require_trainable
from real_data import FOLDER, needs

needs_data = needs("fashion-mnist")
SETTINGS = FASHION_MNIST.settings()
TINY = {"network": "mlp", "hidden": 4, "samples": 3000}


def accuracy(run):
    last = (run / "metrics.jsonl").read_text().splitlines()[-1]
    return json.loads(last)["metrics"]["test accuracy, %"]


def test_the_mlp_is_784_hidden_hidden_10_on_normalised_bytes():
    model = FASHION_MNIST.model(SETTINGS.with_changes({"network": "mlp", "hidden": 32}))
    sizes = [
        (layer.in_features, layer.out_features)
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    assert [(784, 32), (32, 32), (32, 10)] == sizes
    assert 784 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10 == sum(p.numel() for p in model.parameters())
    images = torch.randint(256, (5, 1, 28, 28), dtype=torch.uint8)
    x = ((images / 255 - 0.2860) / 0.3530).flatten(1)
    for layer in (one for one in model.modules() if isinstance(one, nn.Linear)):
        x = layer(x if layer.in_features == 784 else x.clamp(min=0))
    assert torch.allclose(x, model(images), atol=1e-5)


def test_the_network_is_the_resnet_unless_the_settings_say_so():
    assert ("resnet", 128) == (SETTINGS.task["network"], SETTINGS.task["hidden"])
    kinds = {type(module) for module in FASHION_MNIST.model(SETTINGS).modules()}
    assert {nn.Conv2d, nn.BatchNorm2d} <= kinds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": "cnn"}, "network 'cnn' is unknown; choose one of: resnet, mlp"),
        ({"network": "mlp", "hidden": 0}, "hidden=0 must be a whole number of at least 1"),
    ],
)
def test_a_network_that_there_is_not_is_refused(changes, message):
    with pytest.raises(SettingError, match=message):
        require_trainable(FASHION_MNIST, SETTINGS.with_changes(changes))


@needs_data
@pytest.mark.thorough
@pytest.mark.parametrize("more", [("--set", "width=4"), ("--set", "network=mlp", "--groups", "8")])
def test_a_tiny_training_learns(bigbatch, tmp_path, more):
    place = tmp_path / "run"
    tiny = ("--set", "samples=3000", "--epochs", "1", "--quiet")
    options = (*tiny, *more, "--arm", "simigrad", "--run-dir", place)
    assert 0 == bigbatch("train", "fashion-mnist", "--data", FOLDER, *options)[0]
    assert accuracy(place) > 25  # chance has 10


@needs_data
@pytest.mark.release
def test_the_small_scale_is_right_for_85_images_of_100(bigbatch, tmp_path):
    place = tmp_path / "run"
    options = ("--arm", "fixed-64", "--quiet", "--run-dir", place)
    assert 0 == bigbatch("train", "fashion-mnist", "--data", FOLDER, *options)[0]
    assert accuracy(place) > 85


@needs_data
def test_the_gap_is_scored_on_as_many_images_that_are_trained_on():
    data = str(FASHION_MNIST.origin.find(FOLDER))
    names = {
        gap: list(scores_of(SETTINGS.with_changes({"data": data, "gap": gap, **TINY})))
        for gap in (False, True)
    }
    assert ["test accuracy, %", "test loss"] == names[False]
    expected = ["train accuracy, % (3,000 samples)", "train minus test, %"]
    assert [*names[False], *expected] == names[True]


def scores_of(settings):
    return FASHION_MNIST.data(settings).scores(FASHION_MNIST.model(settings))
