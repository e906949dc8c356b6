"""Images on their way through a recipe: normalised, shifted and flipped, scored."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from bigbatch_recipes.datasets.in_memory import InMemoryDataset
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.image_classification import (
    OfBytes,
    accuracies,
    class_loss,
    data_of,
    examples,
    random_shift_and_flip,
)
from bigbatch_recipes.models.resnet import resnet_of_basic_blocks

IMAGES = torch.arange(1, 2 * 3 * 6 * 5 + 1).to(torch.uint8).reshape(2, 3, 6, 5)


def test_a_network_sees_images_less_their_mean_in_units_of_their_deviation():
    network = OfBytes(nn.Identity(), (0.5, 0.4, 0.3), (0.25, 0.2, 0.1))
    expected = torch.stack(
        [
            (IMAGES[:, plane] / 255 - mean) / std
            for plane, (mean, std) in enumerate([(0.5, 0.25), (0.4, 0.2), (0.3, 0.1)])
        ],
        dim=1,
    )
    assert torch.allclose(expected, network(IMAGES), atol=1e-6)
    assert {} == network.state_dict()


@pytest.mark.parametrize(("width", "last"), [(4, False), (7, False), (8, True)])
def test_channels_lie_last_where_onednn_can_take_them_so(width, last):
    """Of the narrow ones oneDNN's backward writes past its arrays, and the process may end."""
    network = OfBytes(resnet_of_basic_blocks(18, width, 10), (0.5,) * 3, (0.2,) * 3)
    weight = network.network[0][0].weight
    assert last == weight.is_contiguous(memory_format=torch.channels_last)
    x = torch.randint(256, (16, 3, 32, 32), dtype=torch.uint8)
    for _ in range(3):
        network(x).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in network.parameters())


def crops(image, padding):
    """All crops of a padded image, as they are and mirrored, one by one."""
    height, width = image.shape[1:]
    padded = functional.pad(image, (padding,) * 4)
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = padded[:, top : top + height, left : left + width]
            yield crop
            yield crop.flip(-1)


def test_each_shifted_image_is_one_of_the_crops_of_its_own_and_all_of_them_are_drawn():
    torch.manual_seed(0)
    samples = 400
    found = random_shift_and_flip(IMAGES[[0, 1] * samples], padding=1)
    assert (2 * samples, 3, 6, 5) == found.shape
    for number in (0, 1):
        wanted = torch.stack(list(crops(IMAGES[number], 1)))
        same = (found[number::2, None] == wanted).flatten(2).all(2)
        assert [1] * samples == same.sum(1).tolist()
        drawn = same.sum(0) / samples  # each with chance 1 / 18; four deviations of 400 draws
        assert (18,) == drawn.shape
        assert ((drawn - 1 / 18).abs() < 4 * (17 / 18**2 / samples) ** 0.5).all()


class Counted(nn.Module):
    """Logits that are the images' first pixels; remembers what it was given."""

    def forward(self, x):
        self.given = x
        return x[:, 0, 0].float()


def test_images_are_augmented_in_training_alone():
    model, batch = Counted(), (IMAGES, torch.tensor([0, 4]))
    loss_of = class_loss(augment=lambda x: 255 - x)
    loss_of(model, batch)
    assert torch.equal(255 - IMAGES, model.given)
    loss_of(model.eval(), batch)
    assert torch.equal(IMAGES, model.given)


def test_smoothed_labels_share_a_part_of_the_loss_among_all_classes():
    model, labels = Counted(), torch.tensor([0, 3])
    logs = functional.log_softmax(IMAGES[:, 0, 0].float(), dim=1)
    own = logs[[0, 1], labels].mean()
    expected = -(0.9 * own + 0.1 * logs.mean())
    assert torch.allclose(expected, class_loss(0.1)(model, (IMAGES, labels)))


def test_the_gap_is_the_train_accuracy_less_that_of_the_test():
    settings = DIGITS.settings().with_changes({"micro_batch": 2})
    x = torch.eye(5).to(torch.uint8).reshape(5, 1, 1, 5)
    test = InMemoryDataset(x, torch.tensor([0, 1, 0, 0, 0]))
    train = InMemoryDataset(x[:4], torch.tensor([0, 1, 2, 0]))
    model = Counted().eval()
    scores = accuracies(test, settings, train)(model)
    loss = torch.nn.functional.cross_entropy(model(test.tensors[0]), test.tensors[1]).item()
    assert {
        "test accuracy, %": 40.0,
        "test loss": pytest.approx(loss, rel=1e-6),
        "train accuracy, % (4 samples)": 75.0,
        "train minus test, %": 35.0,
    } == scores
    assert "test accuracy, %" == next(iter(scores))
    assert ["test accuracy, %", "test loss"] == list(accuracies(test, settings)(model))
    assert {"held-out accuracy, %": 75.0} == data_of(train, test, settings).scores_on(train)(model)


def test_an_example_has_the_types_of_a_batch_and_no_storage():
    images, labels = examples(3, 32)(DIGITS.settings(), 7)
    assert (7, 3, 32, 32) == images.shape
    assert (torch.uint8, torch.int64) == (images.dtype, labels.dtype)
    assert "meta" == images.device.type == labels.device.type
    assert images.shape == random_shift_and_flip(images).shape
