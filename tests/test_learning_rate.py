"""How the learning rate follows the batch: the factors, and how they leave no trace."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import bigbatch as bb
from bigbatch.act.learning_rate import (
    AdaScale,
    linear,
    multiplied,
    scaling_named,
    square_root,
    unscaled,
)
from bigbatch.errors import SettingError

torch.set_num_threads(1)
property_test = settings(deadline=None, derandomize=True, max_examples=200)
batch_sizes = st.integers(1, 2**20)
positive = st.floats(1e-9, 1e9)


def noise_of(signal: float, noise: float, samples: int = 64) -> bb.GradientNoise:
    return bb.GradientNoise(signal, noise, samples, micro_batches=4)


# factors


@pytest.mark.parametrize(
    ("rule", "factors"),
    [(square_root, [0.5, 1.0, 2.0]), (linear, [0.25, 1.0, 4.0]), (unscaled, [1.0, 1.0, 1.0])],
)
def test_a_quarter_the_same_and_four_times_the_base_batch(rule, factors):
    assert factors == [rule(batch_size, 128) for batch_size in (32, 128, 512)]


@pytest.mark.parametrize(
    ("name", "rule"), [("sqrt", square_root), ("linear", linear), (None, unscaled)]
)
def test_a_rule_has_its_name(name, rule):
    assert scaling_named(name, 128) is rule


def test_adascale_has_its_name():
    assert isinstance(scaling_named("adascale", 128), AdaScale)


def test_a_function_of_ones_own_is_taken_as_it_is():
    def rule(batch_size: int, base_batch: int, noise: bb.GradientNoise | None) -> float:
        return 3.0

    assert scaling_named(rule, 128) is rule


@pytest.mark.parametrize("name", ["square", "SQRT", "", "none"])
def test_an_unknown_rule_is_refused_with_its_name(name):
    with pytest.raises(SettingError, match=rf"lr_scaling='{name}'.*\"sqrt\""):
        scaling_named(name, 128)


@property_test
@given(base=batch_sizes, signal=positive, noise=positive)
def test_the_base_batch_itself_is_never_scaled(base, signal, noise):
    for name in ("sqrt", "linear", "adascale", None):
        assert 1.0 == scaling_named(name, base)(base, base, noise_of(signal, noise))


# AdaScale

# the average divides by what it multiplied with: a few roundings of float64
rounding = 1e-9


@property_test
@given(batch_size=batch_sizes, base=batch_sizes, signal=positive)
def test_adascale_without_noise_gains_nothing(batch_size, base, signal):
    assert 1.0 == AdaScale(base)(batch_size, base, noise_of(signal, 0.0))


@property_test
@given(batch_size=batch_sizes, base=batch_sizes, signal=st.floats(-1e9, 0.0), noise=positive)
def test_adascale_with_noise_alone_is_linear(batch_size, base, signal, noise):
    gain = AdaScale(base)(batch_size, base, noise_of(signal, noise))
    assert pytest.approx(linear(batch_size, base), rel=rounding) == gain


@property_test
@given(batch_size=batch_sizes, base=batch_sizes, signal=positive, noise=positive)
def test_adascale_gains_between_nothing_and_linear(batch_size, base, signal, noise):
    gain = AdaScale(base)(batch_size, base, noise_of(signal, noise))
    low, high = sorted([1.0, linear(batch_size, base)])
    assert low * (1 - rounding) <= gain <= high * (1 + rounding)
    expected = (signal + noise / base) / (signal + noise / batch_size)
    assert pytest.approx(expected, rel=rounding) == gain


def test_adascale_before_any_measurement_is_one():
    assert 1.0 == AdaScale(64)(1024, 64, None)


def test_adascale_of_dead_gradients_is_one():
    assert 1.0 == AdaScale(64)(1024, 64, noise_of(0.0, 0.0))


def test_adascale_keeps_its_average_through_steps_without_a_measurement():
    rule = AdaScale(64)
    rule(256, 64, noise_of(1.0, 64.0))
    # (1 + 64/64) / (1 + 64/128)
    assert pytest.approx(2 / 1.5, rel=rounding) == rule(128, 64, None)


def test_adascale_averages_signal_and_noise_before_it_divides():
    rule = AdaScale(64)
    rule(256, 64, noise_of(-1.0, 64.0))
    gain = rule(256, 64, noise_of(3.0, 64.0))
    # two equal steps in a window of 1000 base batches weigh almost the same: signal 1.0005
    assert pytest.approx((1 + 1) / (1 + 0.25), rel=1e-3) == gain


def test_adascale_goes_on_from_a_saved_state_bit_for_bit():
    steps = [noise_of(s, n) for s, n in [(1.0, 64.0), (-0.5, 90.0), (0.3, 70.0), (0.2, 50.0)]]
    whole, first = AdaScale(64), AdaScale(64)
    expected = [whole(256, 64, noise) for noise in steps]
    for noise in steps[:2]:
        first(256, 64, noise)
    second = AdaScale(64)
    second.load_state_dict(first.state_dict())
    assert expected[2:] == [second(256, 64, noise) for noise in steps[2:]]


def test_a_restored_adascale_knows_its_gain_before_the_next_measurement():
    first, second = AdaScale(64), AdaScale(64)
    first(256, 64, noise_of(1.0, 64.0))
    second.load_state_dict(first.state_dict())
    assert first(256, 64, None) == second(256, 64, None)


# around the step


def optimizer_with(*rates: float | Tensor) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in rates]
    return torch.optim.SGD(groups)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float | Tensor]:
    return [group["lr"] for group in optimizer.param_groups]


@property_test
@given(rates=st.lists(st.floats(0.0, 1e3), min_size=1, max_size=3), factor=st.floats(0.0, 1e6))
def test_inside_the_rates_are_multiplied_and_afterwards_the_very_same(rates, factor):
    optimizer = optimizer_with(*rates)
    with multiplied(optimizer, factor) as used:
        assert [lr * factor for lr in rates] == rates_of(optimizer) == used
    assert rates == rates_of(optimizer)


def test_the_rates_come_back_after_an_error():
    optimizer = optimizer_with(0.1, 0.3)
    with pytest.raises(ZeroDivisionError), multiplied(optimizer, 3.0):
        raise ZeroDivisionError
    assert [0.1, 0.3] == rates_of(optimizer)


def test_a_tensor_rate_is_multiplied_and_the_same_tensor_comes_back():
    rate = torch.tensor(0.1)
    optimizer = optimizer_with(rate)
    with multiplied(optimizer, 3.0) as used:
        assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
        assert (torch.tensor(0.1) * 3.0).item() == optimizer.param_groups[0]["lr"].item() == used[0]
    assert optimizer.param_groups[0]["lr"] is rate
    assert torch.tensor(0.1).item() == rate.item()


# in the loop


def one_step(
    optimizer_of: type[torch.optim.Optimizer], lr: float | Tensor, **more: object
) -> tuple[list[float], bb.StepRecord, torch.optim.Optimizer]:
    """(rates that the optimizer stepped with, the record, the optimizer afterwards)."""
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 1)
    optimizer = optimizer_of(model.parameters(), lr=lr)
    used: list[float] = []
    optimizer.register_step_pre_hook(lambda o, *_: used.append(float(o.param_groups[0]["lr"])))
    loader = [torch.randn(96, 4)]
    train = bb.AdaptiveBatch(
        model,
        optimizer,
        loader,
        policy=bb.Fixed(96),
        batch_size=96,
        base_batch=32,
        micro_batch=24,
        **more,
    )
    for step in train:
        for x in step:
            step.backward(model(x).square().mean())
        record = step.update()
    return used, record, optimizer


@pytest.mark.parametrize(
    ("rule", "factor"),
    [
        ("sqrt", math.sqrt(3)),
        ("linear", 3.0),
        (None, 1.0),
        (lambda batch, base, noise: batch / base / noise.micro_batches, 0.75),
    ],
)
def test_the_optimizer_steps_with_the_scaled_rate_and_the_record_says_it(rule, factor):
    used, record, optimizer = one_step(torch.optim.SGD, 0.1, lr_scaling=rule)
    assert [0.1 * factor] == used == list(record.lr)
    assert [0.1] == rates_of(optimizer)


def test_the_optimizer_steps_with_adascale_of_what_was_measured():
    used, record, _ = one_step(torch.optim.SGD, 0.1, lr_scaling="adascale")
    signal, noise = max(0.0, record.noise.signal), record.noise.noise
    gain = (signal + noise / 32) / (signal + noise / 96)
    assert pytest.approx(0.1 * gain, rel=rounding) == used[0]
    assert 1.0 < gain < 3.0


@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, torch.optim.AdamW])
def test_a_tensor_rate_is_recorded_as_it_was_used(optimizer_of):
    rate = torch.tensor(0.1)
    used, record, optimizer = one_step(optimizer_of, rate, lr_scaling="sqrt")
    assert used == list(record.lr)
    assert optimizer.param_groups[0]["lr"] is rate
    assert torch.tensor(0.1).item() == rate.item()
