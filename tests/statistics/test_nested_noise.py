"""Noise between and within clusters against the estimators that their expectations define."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from bigbatch import GradientMeter, GradientStatistics
from bigbatch.errors import GradientError, SettingError
from bigbatch.statistics.nested_noise import NestedNoise
from oracles import noise as oracle
from single_process_training import data, mean_loss, network, rows_of

EVEN = [3, 3, 3, 3, 3, 3]
RAGGED = [3, 9, 1, 6, 2, 2, 5, 4]


def accumulate(model, sizes):
    for x, y in data(sizes):
        (mean_loss(model, x, y) * len(y) / sum(sizes)).backward()


def fields(nested):
    return [nested.grad_sqnorm, nested.between, nested.within]


@pytest.mark.parametrize(
    ("sizes", "parts"), [(EVEN, 2), (EVEN, 3), (RAGGED, 2), (RAGGED, 4)], ids=str
)
def test_components_are_those_of_their_expectations(sizes, parts):
    model = network()
    with GradientMeter(model, cluster_parts=parts) as meter:
        for _ in range(2):  # of two equal steps
            accumulate(model, sizes)
            statistics = meter.read(sizes)
            model.zero_grad()
    signal, between, within = oracle.nested(rows_of(model, data(sizes)), sizes, parts)
    assert pytest.approx([signal, between, within], rel=1e-9) == fields(statistics.nested)
    squares = sum(sum(some) ** 2 for some in zip(*[iter(sizes)] * parts, strict=True))
    noise = between * squares / sum(sizes) + within
    assert pytest.approx(max(0, noise), rel=1e-9) == statistics.grad_variance
    assert signal == pytest.approx(statistics.grad_sqnorm, rel=1e-9)
    assert (len(sizes) // parts, "clusters") == (statistics.micro_batches, statistics.compared)


def test_layers_add_up():
    model = network()
    with GradientMeter(model, cluster_parts=2, per_layer=True) as meter:
        accumulate(model, RAGGED)
        statistics = meter.read(RAGGED)
    layers = [fields(layer.nested) for layer in statistics.layers.values()]
    assert 2 == len(layers)
    assert np.sum(layers, 0) == pytest.approx(fields(statistics.nested), rel=1e-9)


def test_a_layer_that_some_parts_do_not_reach_counts_as_zero():
    model = nn.ModuleList([nn.Linear(2, 1, bias=False).double() for _ in range(2)])
    numbers = [1.0, -2.0, 0.5, 4.0]
    with GradientMeter(model, cluster_parts=2) as meter:
        for number, factor in enumerate(numbers):
            (model[number % 2](torch.ones(1, 2).double()).sum() * factor / 4).backward()
        nested = meter.read([1] * 4).nested
    rows = torch.zeros(4, 4)
    for number, factor in enumerate(numbers):
        rows[number, 2 * (number % 2) : 2 * (number % 2) + 2] = factor
    assert oracle.nested(rows, [1] * 4, 2) == pytest.approx(fields(nested))


def test_prompts_and_rollouts_have_their_own_noise():
    """Of 300 steps with known components: 2 between prompts, 24 within them, 4 is |mu|^2."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.zeros(40, dtype=torch.float64, requires_grad=True)
    mu = torch.zeros(40, dtype=torch.float64)
    mu[0] = 2.0
    found = []
    with GradientMeter([weight], cluster_parts=2) as meter:
        for _ in range(300):
            for _ in range(8):
                prompt = torch.randn(40, generator=draw).double() * math.sqrt(2 / 40)
                for _ in range(2):  # halves of 8 rollouts
                    noise = torch.randn(4, 40, generator=draw).double() * math.sqrt(24 / 40)
                    ((mu + prompt + noise) @ weight).sum().div(64).backward()
            found.append(meter.read([4] * 16))
            weight.grad = None
    average = NestedNoise.average(each.nested for each in found)
    signal, between, within = fields(average)
    assert np.mean([each.nested.between for each in found]) == pytest.approx(between)
    # standard errors are 0.02, 0.02, 0.1
    assert [4, 2] == pytest.approx([signal, between], abs=0.1)
    assert pytest.approx(24, abs=0.5) == within
    assert pytest.approx(40, abs=1) == np.mean([each.grad_variance for each in found])  # 8 (2 + 3)


def test_the_noise_scale_is_that_of_whole_clusters():
    """A cluster whose parts agree is one gradient, and its parts add nothing."""
    model = network()
    sizes = [6, 6, 6]
    with GradientMeter(model) as meter:
        accumulate(model, sizes)
        whole = meter.read(sizes)
    model.zero_grad()
    with GradientMeter(model, cluster_parts=2) as meter:
        for x, y in data(sizes):
            for half in (slice(3), slice(3, 6)):
                (mean_loss(model, x[half], y[half]) / 6).backward()
        clusters = meter.read([3] * 6)
    for name in ("grad_sqnorm", "grad_variance", "samples", "micro_batches", "similarity"):
        assert getattr(whole, name) == pytest.approx(getattr(clusters, name), rel=1e-9)


def test_the_best_cluster_size_has_the_least_variance_at_a_cost():
    noise = NestedNoise(1.0, between=0.7, within=11.0)
    best = noise.best_cluster_size(cluster_cost=5.0, sample_cost=0.5)
    variances = [
        noise.variance(100 / (5.0 + 0.5 * size), size)
        for size in (best, *(best * factor for factor in (0.5, 0.9, 1.1, 2.0)))
    ]
    assert variances[0] == min(variances)
    assert math.inf == NestedNoise(1.0, between=-0.1, within=1.0).best_cluster_size(1.0)
    assert 0.0 == NestedNoise(1.0, between=0.5, within=0.0).best_cluster_size(1.0)


def test_noise_scales_are_where_noise_equals_signal():
    noise = NestedNoise(0.3, between=0.7, within=11.0)
    clusters = noise.noise_scale_of_clusters(cluster_size=4)
    assert pytest.approx(0.3) == noise.variance(clusters, 4)
    samples = noise.noise_scale_of_samples(clusters=6)
    assert pytest.approx(0.3 + 0.7 / 6) == noise.within / samples
    assert math.inf == NestedNoise(-0.1, 0.05, 1.0).noise_scale_of_clusters(4)
    assert math.inf == NestedNoise(-0.1, 0.05, 1.0).noise_scale_of_samples(4)


@pytest.mark.parametrize("size", [0, -1, math.inf])
def test_sizes_must_be_positive(size):
    noise = NestedNoise(1.0, 1.0, 1.0)
    for call in (noise.noise_scale_of_clusters, noise.noise_scale_of_samples):
        with pytest.raises(SettingError):
            call(size)
    with pytest.raises(SettingError, match="cluster_size"):
        noise.variance(4, size)
    with pytest.raises(SettingError, match="cluster_cost"):
        noise.best_cluster_size(size)


def test_an_average_needs_steps():
    with pytest.raises(SettingError, match="no steps to average"):
        NestedNoise.average([])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster_parts": 1}, "cluster_parts=1"),
        ({"loss": "mean"}, 'needs loss="weighted"'),
        ({"groups": 4}, "groups="),
        ({"confidence": 0.9}, "confidence="),
        ({"half_batch_cosine": True}, "half_batch_cosine=True"),
    ],
    ids=str,
)
def test_what_would_compare_parts_is_refused(options, message):
    with pytest.raises(SettingError, match=message):
        GradientMeter(network(), **{"cluster_parts": 2, **options})


def test_a_step_has_whole_clusters_and_two_of_them():
    model = network()
    with GradientMeter(model, cluster_parts=2) as meter:
        accumulate(model, [3, 3, 3])
        with pytest.raises(GradientError, match="no whole clusters of cluster_parts=2"):
            meter.read([3, 3, 3])
        model.zero_grad()
        accumulate(model, [3, 3])
        with pytest.raises(GradientError, match="1 cluster seen"):
            meter.read([3, 3])


def test_other_steps_are_not_measured():
    model = network()
    with GradientMeter(model, cluster_parts=2, every=2) as meter:
        readings = []
        for _ in range(4):
            accumulate(model, EVEN)
            readings.append(meter.read(EVEN))
            model.zero_grad()
    assert [True, False, True, False] == [isinstance(r, GradientStatistics) for r in readings]
    assert readings[0].nested == readings[2].nested


def test_half_types_are_summed_in_float32():
    weight = torch.zeros(64, dtype=torch.bfloat16, requires_grad=True)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 64, generator=draw).bfloat16()
    with GradientMeter([weight], cluster_parts=2) as meter:
        for row in rows:
            (weight * row / 8).sum().backward()
        nested = meter.read([1] * 8).nested
    _, between, within = oracle.nested(rows.float(), [1] * 8, 2)
    assert pytest.approx([between, within], rel=0.05) == [nested.between, nested.within]


def test_a_scaled_loss_has_the_noise_of_the_loss():
    model, scaler = network(torch.float32), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    plain = network(torch.float32)
    with (
        GradientMeter(model, cluster_parts=2, scaler=scaler) as meter,
        GradientMeter(plain, cluster_parts=2) as expected,
    ):
        for x, y in data(EVEN, torch.float32):
            scaler.scale(mean_loss(model, x, y) / 6).backward()
            (mean_loss(plain, x, y) / 6).backward()
        nested = meter.read(EVEN).nested
        assert fields(expected.read(EVEN).nested) == pytest.approx(fields(nested), rel=1e-4)


def test_groups_are_not_taken_from_a_loop_either():
    meter = GradientMeter(network(), cluster_parts=2)
    with pytest.raises(SettingError, match="groups=4 would compare their parts"):
        meter.cut_backwards(4, network())


def test_parts_of_a_prompt_share_its_baseline():
    """GRPO without division by the deviation: gradients of two rollouts covary by |grad|^2 / R^2.

    Over all outcomes of R rollouts of a prompt, with softmax over three answers, exactly.
    """
    size = 4
    logits = torch.tensor([0.3, -0.5, 0.2], dtype=torch.float64)
    reward, p = torch.tensor([1.0, 0.0, 0.4], dtype=torch.float64), torch.softmax(logits, 0)
    mean, product = torch.zeros(3, dtype=torch.float64), 0.0
    for answers in itertools.product(range(3), repeat=size):
        chance, rewards = p[list(answers)].prod(), reward[list(answers)]
        scores = torch.eye(3, dtype=torch.float64)[list(answers)] - p
        g = (rewards - rewards.mean())[:, None] * scores
        mean += chance * g[0]
        product += float(chance * (g[0] @ g[1]))
    gradient = (p * reward) @ (torch.eye(3, dtype=torch.float64) - p)
    assert pytest.approx(float(gradient @ gradient) / size**2) == product - float(mean @ mean)
    assert torch.allclose((1 - 1 / size) * gradient, mean)
