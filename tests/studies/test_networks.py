"""What studies time is what their tables say: networks of that size, batches that fit them."""

import pytest
import torch
from torch import nn

from bigbatch.data.collate import count_samples
from bigbatch_recipes.models.resnet import resnet_of_basic_blocks
from studies import overhead, projection_accuracy, sized_networks


@pytest.mark.parametrize(
    ("build", "millions"),
    [
        (resnet_of_basic_blocks, 11.2),
        (sized_networks.wide_layers, 4.9),
        (sized_networks.small_cnn, 0.1),
    ],
)
def test_the_networks_have_the_size_they_say(build, millions):
    assert millions == round(sized_networks.count(build()) / 1e6, 1)


def test_networks_take_batches_that_fit_them():
    networks = (
        (lambda: sized_networks.GPT(1, 64, 256, 16), 16),
        (resnet_of_basic_blocks, 8),
        (sized_networks.wide_layers, 1),
    )
    for build, length in networks:
        model = build()
        loss = sized_networks.mean_loss(model, *sized_networks.random_batch(model, 2, length))
        assert torch.isfinite(loss)


def test_a_position_of_the_gpt_sees_none_after_it():
    torch.manual_seed(0)
    model = sized_networks.GPT(2, 64, 256, 8)
    tokens = torch.randint(256, (3, 8))
    changed = tokens.clone()
    changed[:, 5] += 1
    changed %= 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("name", [n for n, one in overhead.NETWORKS.items() if one.device == "cpu"])
def test_the_networks_of_the_overhead_learn_from_their_batches(name):
    network = overhead.NETWORKS[name]
    model, (x, y) = network.build(), network.batch(4)
    assert 4 == count_samples((x, y))  # so that the loop can cut it
    loss = sized_networks.mean_loss(model, x, y)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in model.parameters())


def test_group_norms_take_the_place_of_all_batch_norms():
    model = sized_networks.with_group_norm(resnet_of_basic_blocks(width=8))
    kinds = [type(module) for module in model.modules()]
    assert 20 == kinds.count(nn.GroupNorm)
    assert nn.BatchNorm2d not in kinds


def test_the_overhead_has_a_number_for_each_way():
    numbers = list(overhead.costs("small CNN", 8, rounds=1, most_steps=1))
    assert ["plain", *overhead.WAYS] == [one["way"] for one in numbers]
    assert 1 == numbers[0]["ratio"]
    assert all(one["ms"] > 0 and one["cpu_ratio"] > 0 for one in numbers)


def test_projections_are_near_the_exact_gradients():
    noise, difference, exact = projection_accuracy.run(seeds=1, steps=12)
    assert ["noise, projected / exact", "similarity, exact"] == [
        noise["quantity"],
        exact["quantity"],
    ]
    assert 0.8 < float(noise["mean"]) < 1.2
    assert abs(float(difference["mean"])) < 0.1
    assert 0 < float(noise["sd"]) < 0.4
