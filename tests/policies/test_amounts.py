"""Amounts in words, against the same said in numbers."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigbatch import Controller, GradientStatistics, NoiseAverage, NoiseScale, TrainingState
from bigbatch.errors import SettingError
from bigbatch.policies.amounts import Amount, AmountIn


@pytest.mark.parametrize(
    ("text", "count", "unit"),
    [
        ("16 steps", 16, "step"),
        ("1 step", 1, "step"),
        ("4K samples", 4_000, "sample"),
        ("4.5k samples", 4_500, "sample"),
        ("2M  samples", 2_000_000, "sample"),
        ("8B tokens", 8 * 10**9, "token"),
        ("1T tokens", 10**12, "token"),
        ("0.1 epochs", Fraction(1, 10), "epoch"),
        (" 20epochs ", 20, "epoch"),
    ],
)
def test_an_amount_is_a_number_and_a_unit(text, count, unit):
    assert Amount(Fraction(count), unit) == Amount.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "16", "steps", "-1 steps", "0 steps", "0 epochs", "1.5 steps", "1e3 samples"),
        *("2 hours", "4 K samples", "inf steps", "1 step 2 steps", "0.5 tokens"),
        *("1.00005K samples", "\u0663 steps"),
    ],
)
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(SettingError, match=r"no amount|whole number"):
        Amount.parse(text)
    assert text not in AmountIn("step", "sample", "epoch", whole_epochs=False)


@given(count=st.integers(1, 10**15 - 1), unit=st.sampled_from(["step", "sample", "epoch", "token"]))
def test_an_amount_is_read_as_it_is_written(count, unit):
    amount = Amount(Fraction(count), unit)
    assert amount == Amount.parse(str(amount))


def walk(steps=40, **options):
    """The batch after each step of 64 samples, 4 steps an epoch, where the policy wants 1000."""
    controller = Controller(NoiseScale(), 64, **({"smoothing": "1 step"} | options))
    noise = [_noise(10.0 if step == 0 else 1000.0) for step in range(steps)]
    decided = []
    for step, one in enumerate(noise, start=1):
        now = TrainingState(64, 64, samples=64 * step, steps=step, epoch=step // 4)
        decided.append(controller.next(one, now).batch_size)
    return decided


def _noise(noise_scale):
    return GradientStatistics(1.0, noise_scale, samples=64, micro_batches=4)


def test_steps_samples_and_epochs_of_one_length_warm_up_alike():
    in_steps = walk(warmup="8 steps")
    assert [64] * 7 == in_steps[:7]
    assert 64 not in in_steps[7:]
    assert in_steps == walk(warmup="512 samples") == walk(warmup="2 epochs")


def test_a_window_in_steps_is_one_in_samples_where_steps_are_alike():
    assert walk(smoothing="8 steps") == walk(smoothing="512 samples")
    assert walk(smoothing="8 steps") != walk(smoothing="4 steps")


@pytest.mark.parametrize("sizes", [(64, 64, 64, 64), (1, 2, 4, 8), (300, 7, 7, 1)])
def test_a_window_in_steps_forgets_by_steps_and_weighs_by_samples(sizes):
    signals = [1.0, 3.0, -2.0, 5.0]
    average = NoiseAverage(2, "steps")
    for signal, samples in zip(signals, sizes, strict=True):
        average.update(GradientStatistics(signal, 9.0, samples=samples, micro_batches=4))
    weights = [samples * math.exp(-(3 - i) / 2) for i, samples in enumerate(sizes)]
    mean = sum(w * s for w, s in zip(weights, signals, strict=True)) / sum(weights)
    assert mean == pytest.approx(average.grad_sqnorm, rel=1e-12)
