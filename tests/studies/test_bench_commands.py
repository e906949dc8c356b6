"""The benches measure what they say; how fast it is, is theirs to print and not ours to assert."""

import math

import pytest
import torch
from torch import nn
from typer import BadParameter

from bigbatch import GradientMeter
from bigbatch.data.collate import count_samples
from bigbatch_recipes.models.resnet import resnet_of_basic_blocks
from studies import (
    commands,
    loop_cost,
    loop_overhead,
    meter_cost,
    projection_accuracy,
    sized_networks,
)
from studies.gloo_processes import count_bytes_sent
from studies.timing import Cost, interleaved, median_and_range


def test_a_row_shows_the_median_its_range_and_the_floor():
    row = Cost("a / b", [1.1, 1.5, 1.2], floor=1.0).row()
    assert ["a / b", "1.200", "1.100 to 1.500", "1.000", "1.20"] == [*row.values()]


def test_a_median_is_shown_with_its_range_and_without_values_as_a_dash():
    assert "1.2 [1.1, 1.5]" == median_and_range([1.1, 1.5, 1.2], digits=1)
    assert "-" == median_and_range([])


def test_runs_take_turns_after_one_that_is_not_counted():
    turns = []
    times = interleaved([lambda: turns.append("a"), lambda: turns.append("b")], rounds=3)
    assert "ab" * 4 == "".join(turns)
    assert [2, 2, 2] == [len(row) for row in times]


@pytest.mark.parametrize(
    ("build", "millions"),
    [
        (resnet_of_basic_blocks, 11.2),
        (sized_networks.transformer, 19.2),
        (sized_networks.wide_layers, 4.9),
        (sized_networks.small_cnn, 0.1),
    ],
)
def test_the_networks_have_the_size_they_say(build, millions):
    assert millions == round(sized_networks.count(build()) / 1e6, 1)


def test_a_shape_is_timed_with_each_measurement():
    def small() -> nn.Module:
        return nn.Sequential(nn.Linear(1280, 8), nn.ReLU(), nn.Linear(8, 1280))

    costs = list(meter_cost.shape_costs(meter_cost.Shape("small", small, 4, 1), 2, "cpu"))
    kinds = [cost.what.split(": ")[1] for cost in costs]
    assert ["nothing", "similarity", "similarity and interval", "second moment"] == kinds
    for cost in costs:
        assert 2 == len(cost.ratios)
        assert all(0 < ratio < math.inf for ratio in cost.ratios)
    nothing, one, two, moments = (cost.floor for cost in costs)
    assert 1 == nothing < one < two  # reads
    assert 1 < moments


def test_benches_of_real_networks_take_batches_that_fit_them():
    networks = (
        (sized_networks.transformer, 16),
        (resnet_of_basic_blocks, 8),
        (sized_networks.wide_layers, 1),
    )
    for build, length in networks:
        model = build()
        x, y = sized_networks.random_batch(model, 2, length)
        out = model(x)
        assert len(y) == len(out)
        assert torch.isfinite(out).all()


STEPS = 3  # in the second one DDP sorts its buckets, and sends their sizes


def linear_steps(wrap):
    model = wrap(nn.Linear(100, 10, bias=False))
    for _ in range(STEPS):
        model(torch.ones(1, 100)).sum().backward()
        yield


def metered_steps(wrap):
    model = wrap(nn.Linear(100, 10, bias=False))
    with GradientMeter(model) as meter:
        for _ in range(STEPS):
            for scale in (1.0, 2.0):
                (model(torch.rand(1, 100)).sum() * scale).backward()
            meter.read([1, 1])
            model.zero_grad()
            yield


def failing_steps(wrap):
    raise ValueError
    yield


def test_bytes_that_ranks_send_are_counted():
    assert 4000 == count_bytes_sent(linear_steps)  # the gradient
    assert 2 * 4000 + 8 * (3 + 22 + 2 * 7) == count_bytes_sent(metered_steps)
    with pytest.raises(RuntimeError, match="failed"):
        count_bytes_sent(failing_steps)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(BadParameter, match="torch sees no GPU here"):
        commands.measure_(device="cuda")


@pytest.mark.parametrize(("name", "build", "shape"), loop_cost._IMAGE_MODELS)
def test_the_networks_of_the_loops_bench_take_their_images(name, build, shape):
    images, labels = loop_cost._images(2, shape)
    assert (2, 10) == build()(images).shape
    assert labels.max() < 10


@pytest.mark.parametrize("name", loop_overhead.NETWORKS)
def test_the_networks_of_the_overhead_learn_from_their_batches(name):
    network = loop_overhead.NETWORKS[name]
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


def test_the_overhead_has_a_row_for_each_batch_with_both_times_of_each_way(monkeypatch):
    monkeypatch.setattr(loop_overhead, "_MAX_STEPS", 1)
    rows = list(loop_overhead.rows(["small CNN"], [4, 8], rounds=1))
    assert [("small CNN", "4"), ("small CNN", "8")] == [
        (row["network"], row["batch"]) for row in rows
    ]
    for way in loop_overhead.WAYS:
        assert all("CPU" in row[way] for row in rows)


def test_a_network_that_is_not_there_is_refused():
    with pytest.raises(BadParameter, match="ResNet-18"):
        commands.overhead(over=["AlexNet"])


def test_projections_are_near_the_exact_gradients():
    noise, difference, exact = projection_accuracy.run(seeds=1, steps=12)
    assert ["noise, projected / exact", "similarity, exact"] == [
        noise["quantity"],
        exact["quantity"],
    ]
    assert 0.8 < float(noise["mean"]) < 1.2
    assert abs(float(difference["mean"])) < 0.1
    assert 0 < float(noise["sd"]) < 0.4
