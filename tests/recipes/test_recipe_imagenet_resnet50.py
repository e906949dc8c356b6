"""ResNet-50's recipe on images made here, and on twenty real classes."""

import json
import os
import shutil
import subprocess
import sys

import numpy
import pytest
import torch
from PIL import Image

from bigbatch.errors import SettingError
from bigbatch_recipes.build_loop import build_controller, build_optimizer
from bigbatch_recipes.imagenet_resnet50 import IMAGENET_RESNET50 as RECIPE
from bigbatch_recipes.train_run import Training
from real_data import FOLDER, needs

TINY = {"classes": 2, "size": 16, "resize": 16, "width": 2, "micro_batch": 8, "epochs": 2}
TINY |= {"batch_size": 16, "base_batch": 16, "min_batch": 8, "lr": 0.1}
TINY |= {"lr_schedule": "constant"}
TEST = "test accuracy, % of 2 classes"
SECONDS = 240  # far more than needed: a hang ends as a failure


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Noise that is red in one class and blue in the other."""
    random, folder = numpy.random.default_rng(0), tmp_path_factory.mktemp("images")
    for split, count in [("train", 24), ("val", 7)]:
        for channel, name in [(0, "red"), (2, "blue")]:
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 128, (20, 24, 3), dtype=numpy.uint8)
                pixels[..., channel] += 100
                Image.fromarray(pixels).save(folder / split / name / f"{number}.jpeg")
    return folder


def settings_of(folder, **changes):
    return RECIPE.settings().with_changes({**TINY, "data": str(folder), **changes})


def options_of(changes):
    return [part for name, value in changes.items() for part in ("--set", f"{name}={value}")]


def last_scores(place):
    return json.loads((place / "metrics.jsonl").read_text().splitlines()[-1])["metrics"]


def weights_of(training):
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


def taken(training, steps):
    """Continues for so many steps, over as many epochs as it takes."""
    done = 0
    for _ in training.train.epochs(training.settings.epochs):
        for step in training.train:
            for batch in step:
                step.backward(training.loss_of(training.wrapped_model, batch))
            step.update()
            done += 1
            if done == steps:
                return training
    return training


# at the papers' scale


def test_the_full_model_is_resnet50_and_takes_its_example():
    settings = RECIPE.at_scale(paper=True).settings()
    with torch.device("meta"):
        model = RECIPE.model(settings)
    assert 25_557_032 == sum(p.numel() for p in model.parameters())
    images, labels = RECIPE.example(settings, 3)
    assert (3, 3, 224, 224) == images.shape
    loss = RECIPE.loss(settings)(model, (images, labels))
    assert ((), "meta") == (loss.shape, loss.device.type)


def test_the_full_training_is_simigrads():
    settings = RECIPE.at_scale(paper=True).settings()
    assert (2.048, 2048, 0.875, 2**-15) == (
        settings.lr,
        settings.base_batch,
        settings.momentum,
        settings.weight_decay,
    )
    model = RECIPE.model(RECIPE.settings())
    groups = build_optimizer(settings, model.named_parameters()).param_groups
    decays = {p.ndim > 1: group["weight_decay"] for group in groups for p in group["params"]}
    assert {True: 2**-15, False: 0.0} == decays  # neither norms nor biases


@pytest.mark.parametrize("paper_scale", [False, True])
def test_every_arm_and_every_point_can_be_built(paper_scale):
    recipe = RECIPE.at_scale(paper=paper_scale)
    for name in recipe.arms:
        settings = recipe.arm(name, recipe.settings())
        assert settings.batch_size == build_controller(settings).decision.batch_size
    for grid in recipe.sweep.grids:
        for name, values in grid.items():
            for value in values:
                recipe.settings().with_changes({name: value})


# at a small one


def test_the_command_learns_to_tell_red_from_blue(bigbatch, images, tmp_path):
    # that ends at 100 % with each of six seeds; at a constant rate of 0.1 it was luck
    options = options_of({**TINY, "epochs": 12, "lr": 0.02, "lr_schedule": "polynomial 1"})
    place = tmp_path / "run"
    status, *said = bigbatch(
        "train", RECIPE.name, "--data", images, "--arm", "simigrad", *options, "--run-dir", place
    )
    assert 0 == status, said
    found = last_scores(place)
    assert TEST == next(iter(found))
    assert 85 < found[TEST]  # of 14 images, all but two


def test_the_score_is_the_share_of_whole_images_whose_largest_logit_is_right(images):
    training = taken(Training(RECIPE, settings_of(images)), 4)
    scores = training.scores()
    right = {}
    model = training.model.eval()
    for split in ("train", "val"):
        for label, name in enumerate(("blue", "red")):
            for path in sorted((images / split / name).iterdir()):
                image = Image.open(path).resize((19, 16), Image.Resampling.BILINEAR)
                pixels = numpy.asarray(image.crop((2, 0, 18, 16)))
                with torch.no_grad():
                    logits = model(torch.tensor(pixels).permute(2, 0, 1)[None])
                right.setdefault(split, []).append(logits.argmax().item() == label)
    assert pytest.approx(100 * numpy.mean(right["val"])) == scores[TEST]
    assert "train accuracy, % (14 samples) of 2 classes" in scores  # as many as are tested on


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("samples", [0, 40])
def test_a_training_that_continues_sees_the_same_crops(images, tmp_path, workers, samples):
    settings = settings_of(images, workers=workers, samples=samples)
    whole = taken(Training(RECIPE, settings), 5)
    saved = taken(Training(RECIPE, settings), 4).state_dict()  # in the second epoch
    resumed = Training(RECIPE, settings)
    resumed.load_state_dict(saved, tmp_path)
    assert torch.equal(weights_of(whole), weights_of(taken(resumed, 1)))


@pytest.mark.parametrize("samples", [0, 40])
def test_every_epoch_has_other_crops(images, samples):
    training = Training(RECIPE, settings_of(images, samples=samples, lr=0.0))
    seen = [set(), set()]
    for epoch in training.train.epochs(2):
        for step in training.train:
            for batch in step:
                seen[epoch] |= {image.numpy().tobytes() for image in batch[0]}
                step.backward(training.loss_of(training.wrapped_model, batch))
            step.update()
    assert (samples or 48) == len(seen[0]) == len(seen[1])
    assert not seen[0] & seen[1]


@pytest.mark.parametrize("samples", [0, 20])
def test_the_train_accuracy_is_of_images_of_every_class(images, samples):
    def red(x):
        return torch.nn.functional.one_hot(torch.ones(len(x), dtype=torch.long), 2).float()

    scores = RECIPE.data(settings_of(images, samples=samples)).scores(red)
    assert 0 < scores["train accuracy, % (14 samples) of 2 classes"] < 100  # they lie by class


def trained(rank, ranks, settings):
    training = taken(Training(RECIPE, settings), 3)
    return training.scores(), weights_of(training)


def test_two_ranks_have_the_same_weights_and_scores(ranks, images):
    (scores, weights), (other_scores, other_weights) = ranks(2)(trained, settings_of(images))
    assert scores == other_scores
    assert torch.equal(weights, other_weights)


# what is refused


def test_a_part_larger_than_the_image_is_refused(images):
    with pytest.raises(SettingError, match="size=32 must be above 0 and at most resize=16"):
        RECIPE.example(settings_of(images, size=32), 1)


def test_another_number_of_classes_is_said(bigbatch, images, tmp_path):
    command = ("train", RECIPE.name, "--data", images, "--arm", "fixed")
    status, _, said = bigbatch(*command, "--run-dir", tmp_path / "run")
    assert 2 == status
    assert "train has 2 classes, not 20; set classes to that" in said


def test_a_damaged_image_is_one_line_from_a_worker_too(bigbatch, images, tmp_path):
    folder = shutil.copytree(images, tmp_path / "images")
    for path in (folder / "train" / "red").iterdir():
        path.write_bytes(b"no image")
    options = [*options_of({**TINY, "workers": 2}), "--arm", "simigrad", "--quiet"]
    train = ["train", "imagenet-resnet50", "--data", folder, "--run-dir", tmp_path / "run"]
    status, _, said = bigbatch(*train, *options)
    assert (2, 1) == (status, len(said.splitlines()))
    assert said.startswith(f"bigbatch: {folder.resolve()}/train/red/")
    assert said.endswith("; replace it by a good copy\n")


def test_no_images_in_the_folder_are_said(bigbatch, tmp_path):
    status, _, said = bigbatch("train", RECIPE.name, "--data", tmp_path)
    assert 2 == status
    assert f"ImageNet is not in {tmp_path}: train/*/* or train.tar of" in said


# slow


@pytest.mark.release
@needs("tiny-imagenet-20")
def test_twenty_real_classes_are_distinguished_far_better_than_by_chance(bigbatch, tmp_path):
    options = [*options_of({"epochs": 2}), "--arm", "fixed", "--run-dir", tmp_path / "run"]
    status, *said = bigbatch("train", RECIPE.name, "--data", FOLDER, *options)
    assert 0 == status, said
    assert 10 < last_scores(tmp_path / "run")["test accuracy, % of 20 classes"]  # by chance 5


@pytest.mark.release
def test_torchrun_trains_on_two_ranks(images, tmp_path):
    place = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = ["-m", "bigbatch", "train", RECIPE.name, "--data", images, "--arm", "simigrad"]
    options = [*options_of({**TINY, "workers": 1}), "--run-dir", place]
    result = subprocess.run(
        [sys.executable, *launcher, *command, *options],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert 0 == result.returncode, result.stderr
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert 96 == rows[-1]["samples"]
    assert TEST in rows[-1]["metrics"]
