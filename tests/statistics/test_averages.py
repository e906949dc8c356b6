"""Averages of signal and noise: over samples, over steps, over a window that adapts."""

import json
import math
from statistics import median

import numpy as np
import pytest
import torch

from bigbatch import GradientStatistics, NoiseAverage
from bigbatch.errors import SettingError
from bigbatch.statistics.averages import AdaptiveAverage
from oracles import averages as oracle


def step(signal, noise, samples=100, micro_batches=4):
    return GradientStatistics(signal, noise, samples, micro_batches)


def run(average, steps):
    return [average.update(one) for one in steps][-1]


def test_the_first_step_is_its_own_average():
    first = step(3.0, 60.0)
    actual = NoiseAverage(1e6).update(first)
    assert pytest.approx((3.0, 60.0)) == (actual.grad_sqnorm, actual.grad_variance)


def test_two_steps_are_weighted_by_their_age_in_samples():
    old = math.exp(-300 / 1000)  # what the second step, of 300 samples, leaves of the first
    first, second = (1 - math.exp(-100 / 1000)) * old, 1 - old
    actual = run(NoiseAverage(1000), [step(-1.0, 60.0), step(3.0, 20.0, samples=300)])
    total = first + second
    assert pytest.approx((3 * second - first) / total) == actual.grad_sqnorm
    assert pytest.approx((20 * second + 60 * first) / total) == actual.grad_variance


def test_a_constant_stays_itself_from_the_first_step_on():
    average = NoiseAverage(1000)
    for samples in (8, 4096, 100, 1):
        actual = average.update(step(2.0, 50.0, samples))
        assert pytest.approx((2.0, 50.0)) == (actual.grad_sqnorm, actual.grad_variance)


def test_the_window_is_as_many_samples_whatever_the_batch_size():
    whole = run(NoiseAverage(500), [step(1.0, 9.0), step(2.0, 5.0)])
    halves = [step(1.0, 9.0, samples=50)] * 2 + [step(2.0, 5.0, samples=50)] * 2
    parts = run(NoiseAverage(500), halves)
    assert pytest.approx((whole.grad_sqnorm, whole.grad_variance)) == (
        parts.grad_sqnorm,
        parts.grad_variance,
    )


def test_what_is_many_windows_old_is_forgotten():
    actual = run(NoiseAverage(100), [step(1e6, 1e6), *[step(1.0, 2.0)] * 50])
    assert pytest.approx((1.0, 2.0)) == (actual.grad_sqnorm, actual.grad_variance)


def test_samples_and_micro_batches_are_those_of_the_present_step():
    actual = run(NoiseAverage(1000), [step(1.0, 1.0), step(1.0, 1.0, 32, micro_batches=8)])
    assert (32, 8) == (actual.samples, actual.micro_batches)


def test_the_noise_scale_of_averages_is_right_where_that_of_steps_is_often_infinite():
    draws = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steps = [step(1.0 + 2.0 * draw, 50.0) for draw in draws.tolist()]
    infinite = sum(math.isinf(one.noise_scale) for one in steps)
    assert infinite > 500  # one in three
    # 2,000 steps in the window: the signal's standard error is about .05
    actual = run(NoiseAverage(200_000), steps)
    assert pytest.approx(50.0, rel=0.2) == actual.noise_scale


def test_the_similarity_of_an_average_stays_a_cosine_while_the_batch_grows():
    average = NoiseAverage(10_000)
    for samples in (8, 64, 512, 4096):
        actual = average.update(step(-8.0 / samples, 8.0, samples))  # phi = -1
        assert -1 <= actual.similarity <= 0


def test_a_saved_average_continues_as_if_it_had_never_stopped():
    steps = [step(1.0, 9.0), step(-2.0, 5.0, samples=7), step(4.0, 1.0, samples=300)]
    unbroken, before, after = (NoiseAverage(500) for _ in range(3))
    run(before, steps[:2])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert run(unbroken, steps) == run(after, steps[2:])


@pytest.mark.parametrize("window", [0, -1, math.nan, math.inf])
def test_a_window_that_is_no_number_of_window_is_refused(window):
    with pytest.raises(SettingError, match="window"):
        NoiseAverage(window)


def test_a_noise_too_faint_to_square_has_no_interval():
    average = NoiseAverage(100, confidence=0.9)
    for noise in (1e-216, 2e-216, 1e-216, 3e-216):
        found = average.update(GradientStatistics(noise, noise, samples=10, micro_batches=4))
    assert (-1.0, 1.0) == found.similarity_interval


# a window that adapts


def changing(seed, before, after, steps=400):
    """Signal and noise of steps that scatter by 50 % and 10 %, around other means in the middle."""
    draw = torch.Generator().manual_seed(seed)
    for t, (s, n) in enumerate(torch.randn(steps, 2, generator=draw, dtype=torch.float64).tolist()):
        signal, noise = before if t < steps // 2 else after
        yield signal * (1 + 0.5 * s), noise * (1 + 0.1 * n)


@pytest.mark.parametrize("after", [(1.0, 50.0), (8.0, 50.0), (1.0, 400.0), (-0.2, 55.0)])
def test_an_adaptive_average_is_that_of_the_window_that_the_oracle_chooses(after):
    adaptive = AdaptiveAverage()
    fixed = {w: NoiseAverage(w, "steps") for w in oracle.WINDOWS}
    seen, windows = [], set()
    for signal, noise in changing(0, (1.0, 50.0), after, steps=160):
        seen.append((signal, noise, 20 + len(seen) % 17))
        one = step(signal, noise, samples=seen[-1][2])
        actual, expected = adaptive.update(one), {w: a.update(one) for w, a in fixed.items()}
        assert oracle.window_of(*zip(*seen, strict=True)) == adaptive.window
        assert expected[adaptive.window] == actual
        later = step(math.nan, math.nan, samples=999, micro_batches=0)
        assert fixed[adaptive.window].at(later) == adaptive.at(later)
        windows.add(adaptive.window)
    signals, _, samples = zip(*seen, strict=True)
    mean = oracle.mean(np.array(signals), np.array(samples), adaptive.window)
    assert pytest.approx(mean) == actual.grad_sqnorm
    assert len(windows) >= 4


@pytest.mark.parametrize("values", [(1.0, 50.0), (1.1, 50.3), (-0.3, 7.7), (0.1, 0.0), (0.0, 0.0)])
def test_a_constant_keeps_the_longest_window(values):
    average = AdaptiveAverage()
    for number in range(150):
        actual = average.update(step(*values))
        assert 64 == average.window
        assert pytest.approx(values) == (actual.grad_sqnorm, actual.grad_variance)
        assert (number >= 3) == average.filled


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1.0, 50.0), (8.0, 50.0)),
        ((8.0, 50.0), (1.0, 50.0)),
        ((1.0, 50.0), (1.0, 400.0)),
        ((1.0, 400.0), (1.0, 50.0)),
    ],
)
def test_the_window_is_short_a_few_steps_after_a_change_and_recovers(seed, before, after):
    average, longest = AdaptiveAverage(), NoiseAverage(64, "steps")
    windows, off, off_longest = [], [], []
    for signal, noise in changing(seed, before, after):
        found, slow = average.update(step(signal, noise)), longest.update(step(signal, noise))
        windows.append(average.window)
        off.append(abs(math.log(found.noise_scale / (after[1] / after[0]))))
        off_longest.append(abs(math.log(slow.noise_scale / (after[1] / after[0]))))
    assert median(windows[100:200]) == 64
    assert max(windows[205:213]) <= 8
    assert median(windows[300:]) >= 32
    assert sum(off[210:240]) < sum(off_longest[210:240]) / 2


def test_a_step_without_a_number_leaves_an_adaptive_average_as_it_is():
    average = AdaptiveAverage()
    for signal, noise in changing(1, (1.0, 50.0), (8.0, 50.0), steps=30):
        average.update(step(signal, noise))
    before = average.state_dict()
    for signal, noise in [(math.nan, 1.0), (1.0, math.inf), (-math.inf, math.nan)]:
        lost = step(signal, noise)
        assert lost is average.update(lost)
    assert before == average.state_dict()


def test_one_step_is_an_adaptive_average_and_does_not_fill_it():
    average = AdaptiveAverage()
    assert not average.filled
    found = average.update(step(3.0, 60.0))
    assert pytest.approx((3.0, 60.0)) == (found.grad_sqnorm, found.grad_variance)
    assert not average.filled


def test_without_noise_the_window_follows_the_signal():
    average = AdaptiveAverage()
    for signal in [1.0] * 60 + [8.0] * 12:
        found = average.update(step(signal, 0.0))
        assert 0.0 == found.noise_scale
        assert 1.0 == found.similarity
    assert 7.0 < found.grad_sqnorm <= 8.0


@pytest.mark.parametrize("stop", [0, 1, 3, 101, 120])
def test_a_saved_adaptive_average_continues_as_if_it_had_never_stopped(stop):
    steps = [step(*values) for values in changing(2, (1.0, 50.0), (8.0, 90.0), steps=200)]
    unbroken, before, after = (AdaptiveAverage() for _ in range(3))
    expected = [(unbroken.update(one), unbroken.window) for one in steps][stop:]
    for one in steps[:stop]:
        before.update(one)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert before.filled == after.filled
    assert expected == [(after.update(one), after.window) for one in steps[stop:]]
    assert unbroken.state_dict() == after.state_dict()


@pytest.mark.parametrize(("window", "steps"), [(4, 1), (64, 16), (100, 25)])
def test_an_average_is_filled_by_a_quarter_of_its_window(window, steps):
    by_steps, by_samples = NoiseAverage(window, "steps"), NoiseAverage(10 * window)
    for number in range(steps + 3):
        assert (number >= steps) == by_steps.filled == by_samples.filled
        by_steps.update(step(1.0, 2.0))
        by_samples.update(step(1.0, 2.0, samples=10))
