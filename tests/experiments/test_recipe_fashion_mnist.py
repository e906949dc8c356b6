"""The recipe of Fashion-MNIST on its real data."""

import json

import pytest

from real_data import FOLDER, needs

pytestmark = needs("fashion-mnist")


def accuracy(run):
    last = (run / "metrics.jsonl").read_text().splitlines()[-1]
    return json.loads(last)["metrics"]["test accuracy, %"]


@pytest.mark.thorough
def test_a_tiny_training_learns(bigbatch, tmp_path):
    place = tmp_path / "run"
    tiny = ("--set", "samples=3000", "--set", "width=4", "--epochs", "1", "--quiet")
    options = (*tiny, "--arm", "simigrad", "--run-dir", place)
    assert 0 == bigbatch("train", "fashion-mnist", "--data", FOLDER, *options)[0]
    assert accuracy(place) > 25  # chance has 10


@pytest.mark.release
def test_the_small_scale_is_right_for_85_images_of_100(bigbatch, tmp_path):
    place = tmp_path / "run"
    options = ("--arm", "fixed-64", "--quiet", "--run-dir", place)
    assert 0 == bigbatch("train", "fashion-mnist", "--data", FOLDER, *options)[0]
    assert accuracy(place) > 85
