"""Exact signal and noise equal those of a loop over samples, and the mean of all possible steps."""

import math
from itertools import combinations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bigbatch.errors import SettingError
from bigbatch.statistics.noise_scale import from_weighted_losses
from studies.results.exact_gradients import exact_statistics


def made(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    inputs = torch.randn(samples, 5, dtype=torch.float64, generator=generator)
    return network, inputs, torch.randint(3, (samples,), generator=generator)


def gradients_of(network, inputs, labels):
    """The gradient of each sample, (M, P), by a loop."""
    rows = []
    for sample in range(len(labels)):
        loss = cross_entropy(network(inputs[sample : sample + 1]), labels[sample : sample + 1])
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows)


def by_pairs(gradients):
    """|mu|^2 as the mean product of two different samples, tr(Sigma) as the sample variance."""
    pairs = list(combinations(range(len(gradients)), 2))
    signal = math.fsum(float(gradients[i] @ gradients[j]) for i, j in pairs) / len(pairs)
    return signal, float(gradients.var(0).sum())


def test_signal_and_noise_are_those_of_a_loop_over_samples():
    network, inputs, labels = made(37)  # the parts differ in size
    signal, noise = by_pairs(gradients_of(network, inputs, labels))
    statistics, _ = exact_statistics(network, inputs, labels)
    assert pytest.approx(signal, rel=1e-10) == statistics.grad_sqnorm
    assert pytest.approx(noise, rel=1e-10) == statistics.grad_variance
    assert (37, 37) == (statistics.samples, statistics.micro_batches)


def test_they_are_the_mean_over_all_steps_that_can_be_drawn():
    network, inputs, labels = made(7)
    rows = gradients_of(network, inputs, labels)
    steps = []
    for one in combinations(range(7), 2):  # two micro-batches, of 2 and 3 samples
        for other in combinations(sorted(set(range(7)) - set(one)), 3):
            h = [rows[list(part)].sum(0) / 5 for part in (one, other)]
            spread = sum(float(g @ g) / n for g, n in zip(h, (2, 3), strict=True))
            total = h[0] + h[1]
            steps.append(from_weighted_losses(spread, float(total @ total), 2, 5, eps=1e-15))
    assert 210 == len(steps)
    statistics, _ = exact_statistics(network, inputs, labels)
    for name in ("grad_sqnorm", "grad_variance"):
        mean = math.fsum(getattr(step, name) for step in steps) / len(steps)
        assert pytest.approx(mean, rel=1e-9) == getattr(statistics, name)


def test_the_standard_error_is_the_jackknife_over_16_parts():
    network, inputs, labels = made(48)
    labels = torch.zeros_like(labels)  # a strong signal
    _, error = exact_statistics(network, inputs, labels)
    rows = gradients_of(network, inputs, labels)
    logs = []
    for part in range(16):
        rest = torch.cat([rows[: 3 * part], rows[3 * part + 3 :]])
        signal, noise = by_pairs(rest)
        logs.append(math.log(noise / signal))
    mean = math.fsum(logs) / 16
    expected = math.sqrt(15 / 16 * math.fsum((x - mean) ** 2 for x in logs))
    assert pytest.approx(expected, rel=1e-8) == error


def test_a_signal_that_is_not_positive_has_no_standard_error():
    network, inputs, _ = made(15)
    for parameter in network.parameters():
        nn.init.zeros_(parameter)  # the mean gradient of balanced classes is then 0
    statistics, error = exact_statistics(network, inputs, torch.arange(15) % 3)
    assert statistics.grad_sqnorm < 0
    assert math.isnan(error)


def test_other_layers_and_types_are_refused():
    network, inputs, labels = made(16)
    with pytest.raises(SettingError, match="gradients of LayerNorm are not known"):
        exact_statistics(nn.Sequential(*network, nn.LayerNorm(3)).double(), inputs, labels)
    with pytest.raises(SettingError, match="float64"):
        exact_statistics(network, inputs.float(), labels)
