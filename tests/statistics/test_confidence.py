"""How sure: intervals within a step and over a window, and the sketches they rest on."""

import io
import math
from statistics import fmean, variance

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bigbatch import GradientMeter, GradientStatistics, NoiseAverage
from bigbatch.errors import SettingError
from bigbatch.gradients import MicroBatchGradients, SingleProcessSource
from bigbatch.statistics.confidence import Interval, jackknife, jackknife_excess, student_t
from bigbatch.statistics.random_projection import RandomProjections, leave_one_out
from oracles import interval as oracle
from oracles import noise as noise_oracle

torch.set_num_threads(1)  # small tensors: a second thread only waits
RAGGED = [3, 9, 1, 6]


def draw(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def ragged(k, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 30, (k,), generator=generator).tolist()


def feed(parameter, gradient):
    """One backward whose gradient is `gradient`."""
    (parameter * gradient.to(parameter.dtype)).sum().backward()


def measured(gradients, sizes, *, loss="weighted", level=0.9, unit=1.0, dtype=torch.float64):
    """What a meter says of one parameter whose micro-batches have these mean gradients."""
    weight = nn.Parameter(torch.zeros(gradients.shape[1:], dtype=dtype))
    with GradientMeter([weight], loss=loss, confidence=level) as meter:
        for gradient, n in zip(gradients, sizes, strict=True):
            share = n / sum(sizes) if loss == "weighted" else 1.0
            feed(weight, unit * share * gradient)
        return meter.read(sizes)


def ends(interval):
    return interval.low, interval.high


# Student's t


# (level, degrees of freedom): the two-sided values that statistics books print
@pytest.mark.parametrize(
    ("level", "freedom", "expected"),
    [
        (0.5, 1, 1.000),
        (0.9, 1, 6.314),
        (0.99, 1, 63.657),
        (0.9, 2, 2.920),
        (0.95, 3, 3.182),
        (0.95, 4, 2.776),
        (0.99, 5, 4.032),
        (0.95, 10, 2.228),
        (0.9, 30, 1.697),
        (0.95, 120, 1.980),
        (0.95, 1e9, 1.960),
        (0.99, 1e9, 2.576),
    ],
)
def test_students_t_is_that_of_the_tables(level, freedom, expected):
    assert pytest.approx(expected, abs=6e-4) == student_t(level, freedom)  # printed to 3 places


@pytest.mark.parametrize("freedom", [1.0, 1.3, 2.7, 19.0, 99.9, 100.0, 100.1, 130.7, 200.3, 2500.0])
@pytest.mark.parametrize("level", [0.01, 0.6, 0.95, 0.999])
def test_students_t_is_scipys_between_the_tables_too(level, freedom):
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    expected = stats.t.ppf((1 + level) / 2, freedom)
    # a quadrature of 40,000 chunks, which is coarsest where the tails are heaviest
    assert pytest.approx(expected, rel=1e-3) == student_t(level, freedom)


# one step: a micro-batch left out


@pytest.mark.parametrize("k", [3, 4, 7, 20])
@pytest.mark.parametrize("seed", range(3))
def test_leaving_one_out_is_measuring_the_others(k, seed):
    gradients, sizes = draw(k, 40, seed=seed) + 0.5, ragged(k, seed)
    n = torch.tensor(sizes, dtype=torch.float64)
    spread = (n * gradients.square().sum(1)).sum()
    count = torch.tensor(float(k))
    actual = leave_one_out(gradients, n, n @ gradients, spread, count, n.sum())
    assert pytest.approx(oracle.left_out(gradients, sizes)) == actual.tolist()


@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("k", [3, 5, 20])
def test_the_jackknife_is_tukeys(k, level):
    left = draw(k, seed=k).tolist()
    sums = math.fsum(left), math.fsum(x * x for x in left)
    actual = jackknife(0.7, sums, k, level)
    # the quadrature of t is good to 1e-4
    assert pytest.approx(oracle.jackknife(0.7, left, level), rel=2e-4) == ends(actual)
    assert (level, "step") == (actual.level, actual.covers)


@pytest.mark.parametrize("loss", ["weighted", "mean"])
@pytest.mark.parametrize("sizes", [[4, 4, 4], RAGGED, [2] * 12])
def test_a_meters_interval_is_the_oracles_where_the_sketch_is_the_gradient(loss, sizes):
    gradients = draw(len(sizes), 40, seed=5) + 0.5  # up to 1,021 floats nothing is projected
    step = getattr(noise_oracle, loss)(gradients, sizes)
    x = oracle.log_ratio(step.grad_sqnorm, step.grad_variance, sum(sizes))
    expected = oracle.jackknife(x, oracle.left_out(gradients, sizes), 0.9)
    # sketches are float32: x_d to 1e-6; t to 1e-4
    assert pytest.approx(expected, rel=1e-3) == ends(measured(gradients, sizes, loss=loss).interval)


def test_a_projected_gradients_interval_is_near_that_of_the_exact_one():
    gradients, sizes = 0.05 * draw(8, 5_000, seed=6) + 0.02, [4] * 8
    step = noise_oracle.weighted(gradients, sizes)
    x = oracle.log_ratio(step.grad_sqnorm, step.grad_variance, 32)
    low, high = oracle.jackknife(x, oracle.left_out(gradients, sizes), 0.9)
    actual = measured(gradients, sizes).interval
    assert pytest.approx(x) == (actual.low + actual.high) / 2  # the middle comes from exact norms
    # a scatter of 8 numbers, each estimated from 1,021 floats: a few times either way
    assert (high - low) / 4 < actual.high - actual.low < 4 * (high - low)


@pytest.mark.parametrize("truth", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("k", [3, 8, 20])
def test_the_jackknifes_variance_over_its_excess_is_that_of_the_estimate(k, truth):
    """Where the excess is exact: as much noise along the signal as along any other direction."""
    size, n, draws = 400, 4, 600
    mu = draw(size, seed=7)
    mu *= math.sqrt(truth * size / (k * n)) / mu.norm()  # N |mu|^2 / tr Sigma = truth
    sizes = torch.full((k,), float(n), dtype=torch.float64)
    x, variances = [], []
    for gradients in mu + draw(draws, k, size, seed=k) / math.sqrt(n):
        step = noise_oracle.weighted(gradients, [n] * k)
        x.append(math.log1p(k * n * step.grad_sqnorm / step.grad_variance))
        spread = (sizes[:, None] * gradients.square()).sum()
        left = leave_one_out(
            gradients, sizes, n * gradients.sum(0), spread, torch.tensor(k), sizes.sum()
        )
        variances.append((k - 1) ** 2 / k * left.var().item() / jackknife_excess(x[-1], k))
    # the variance of 600 draws is good to 1 in 17, and so is the jackknife's mean at k = 3; the
    # excess grows to 4 there. The rest is what 400 elements are short of a bell curve
    assert pytest.approx(variance(x), rel=0.25) == fmean(variances)


# 200 elements as they are; 4,000 are projected, and what 1,021 floats lose scatters too
@pytest.mark.parametrize(("size", "most"), [(200, 0.02), (4000, 0.4)])
@pytest.mark.parametrize("truth", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_intervals_of_gaussian_gradients_cover_the_truth_as_often_as_they_say(
    level, truth, size, most
):
    k, n, draws = 8, 4, 200
    mu = draw(size, seed=7)
    mu *= math.sqrt(truth * size / (k * n)) / mu.norm()  # N |mu|^2 / tr Sigma = truth
    covered = 0
    weight = nn.Parameter(torch.zeros(size))
    with GradientMeter([weight], loss="mean", confidence=level) as meter:
        for seed in range(draws):
            for gradient in mu + draw(k, size, seed=seed) / math.sqrt(n):
                feed(weight, gradient)
            interval = meter.read([n] * k).interval
            weight.grad = None
            covered += interval.low <= math.log1p(truth) <= interval.high
    # the standard error of 200 draws is .035 at .5, .021 at .9: 2.5 of them
    error = 2.5 * math.sqrt(level * (1 - level) / draws)
    assert level - error <= covered / draws <= min(1.0, level + most + error)


@pytest.mark.parametrize("loss", ["weighted", "mean"])
def test_two_micro_batches_say_nothing_of_how_sure_they_are(loss):
    step = measured(draw(2, 9, seed=8), [4, 4], loss=loss)
    assert (-1.0, 1.0) == step.similarity_interval
    assert (0.0, math.inf) == step.noise_scale_interval


def test_the_higher_the_level_the_wider_the_interval():
    gradients = draw(4, 30, seed=9) + 0.5
    widths = [
        step.high - step.low
        for step in (measured(gradients, RAGGED, level=q).interval for q in (0.1, 0.5, 0.9, 0.999))
    ]
    assert sorted(widths) == widths
    assert 4 == len(set(widths))


@pytest.mark.parametrize("loss", ["weighted", "mean"])
@pytest.mark.parametrize("unit", [1e-6, 8.0, 1e6])
@pytest.mark.parametrize("size", [40, 5000])
def test_the_losses_unit_does_not_change_the_interval(loss, unit, size):
    gradients = draw(4, size, seed=10) + 0.3
    expected = measured(gradients, RAGGED, loss=loss).interval
    actual = measured(gradients, RAGGED, loss=loss, unit=unit).interval
    assert pytest.approx(ends(expected), rel=1e-5) == ends(actual)  # sketches are float32


def test_weighted_and_mean_losses_have_one_interval_where_the_sizes_are_equal():
    gradients = draw(6, 3000, seed=11) + 0.1
    weighted, mean = (measured(gradients, [5] * 6, loss=loss) for loss in ("weighted", "mean"))
    assert pytest.approx(ends(weighted.interval), rel=1e-5) == ends(mean.interval)  # float32


def test_the_interval_encloses_the_measured_similarity_and_noise_scale():
    step = measured(draw(8, 40, seed=12) + 0.5, [4] * 8)
    low, high = step.similarity_interval
    assert low < step.similarity < high
    low, high = step.noise_scale_interval
    assert low < step.noise_scale < high


def test_two_meters_say_the_same_to_the_last_bit():
    gradients = draw(5, 20_000, seed=13, dtype=torch.float32)
    one, other = (measured(gradients, [4] * 5, dtype=torch.float32) for _ in range(2))
    assert one.interval == other.interval


def test_parameters_that_a_micro_batch_did_not_reach_count_as_zero():
    gradients = torch.zeros(4, 2, 30, dtype=torch.float64)
    reached = [(0, 1), (0,), (1,), (0, 1)]
    pair = [nn.Parameter(torch.zeros(30, dtype=torch.float64)) for _ in range(2)]
    with GradientMeter(pair, loss="mean", confidence=0.9) as meter:
        for d, which in enumerate(reached):
            for p in which:
                gradients[d, p] = draw(30, seed=20 + 2 * d + p) + 0.5
            sum((pair[p] * gradients[d, p]).sum() for p in which).backward()
        actual = meter.read([4] * 4)
    whole = nn.Parameter(torch.zeros(2, 30, dtype=torch.float64))
    with GradientMeter([whole], loss="mean") as meter:
        for gradient in gradients:
            feed(whole, gradient)
        expected = meter.read([4] * 4)
    x = math.log1p(16 * expected.grad_sqnorm / expected.grad_variance)
    assert pytest.approx(x) == (actual.interval.low + actual.interval.high) / 2
    assert 0 < actual.interval.high - actual.interval.low < math.inf


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, 90, math.nan])
def test_a_coverage_that_is_no_probability_is_refused(level):
    with pytest.raises(SettingError, match="confidence"):
        GradientMeter(nn.Linear(2, 2), confidence=level)
    with pytest.raises(SettingError, match="confidence"):
        NoiseAverage(100, confidence=level)


# where there is little to say


def test_no_gradient_at_all_says_nothing():
    step = measured(torch.zeros(4, 9, dtype=torch.float64), [4] * 4)
    assert math.isnan(step.similarity)
    low, high = step.similarity_interval
    assert not low > -1  # the whole range, or nan: not a certainty
    assert not high < 1


def test_equal_micro_batches_are_surely_similar():
    gradient = draw(9, seed=14)
    step = measured(gradient.expand(4, 9), [4] * 4)
    low, high = step.similarity_interval
    assert pytest.approx((1.0, 1.0)) == (low, high)
    assert pytest.approx((0.0, 0.0), abs=1e-3) == step.noise_scale_interval  # float32 sketches


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_leaves_everything_possible(bad):
    gradients = draw(4, 9, seed=15)
    gradients[2, 3] = bad
    with pytest.warns(UserWarning, match="micro-batch 3"):
        step = measured(gradients, [4] * 4)
    assert (-1.0, 1.0) == step.similarity_interval
    assert (0.0, math.inf) == step.noise_scale_interval


def test_the_ends_of_an_interval_are_read_as_similarity_and_noise_scale():
    one = Interval(math.log(2), math.log(5), 0.9, "step")  # 1 + N signal / noise from 2 to 5
    assert pytest.approx((1 / 3, 4 / 6)) == one.similarity
    assert pytest.approx((64 / 4, 64.0)) == one.noise_scale(64)


@pytest.mark.parametrize(
    ("low", "high", "similarity", "noise_scale"),
    [
        (-math.inf, math.inf, (-1.0, 1.0), (0.0, math.inf)),
        (-math.inf, -1.0, (-1.0, math.tanh(-0.5)), (math.inf, math.inf)),
        (0.0, 0.0, (0.0, 0.0), (math.inf, math.inf)),
        (800.0, 2000.0, (1.0, 1.0), (0.0, 0.0)),  # beyond what exp can hold
    ],
)
def test_ends_that_are_infinite_or_equal_stay_in_range(low, high, similarity, noise_scale):
    one = Interval(low, high, 0.9, "step")
    assert similarity == one.similarity
    assert noise_scale == one.noise_scale(64)


@given(low=st.floats(-50, 50), width=st.floats(0, 50))
@settings(deadline=None)
def test_both_intervals_are_in_order_and_in_range(low, width):
    one = Interval(low, low + width, 0.9, "step")
    bottom, top = one.similarity
    assert -1 <= bottom <= top <= 1
    bottom, top = one.noise_scale(64)
    assert 0 <= bottom <= top


# sketches


def sketch(gradients, first=0):
    """The sketch of some tensors; `first` is the place of the first among the parameters."""
    nothing = [torch.zeros(0) for _ in range(first)]  # each place has signs of its own
    parameters = [torch.zeros(g.shape, dtype=g.dtype) for g in gradients]
    sketches = RandomProjections(SingleProcessSource([*nothing, *parameters]))
    sketches.begin()
    sketches.micro_batch(1.0)
    sketches.gradients(MicroBatchGradients(parameters, gradients))
    sketches.end()
    return sketches.stack()[0]


def dense(seed):
    return [draw(300, 70, seed=seed, dtype=torch.float32)]


def rank_one(seed):
    return [torch.outer(*draw(2, 1024, seed=seed, dtype=torch.float32))]


def sparse(seed):
    whole = torch.zeros(50_000)
    at = torch.randint(50_000, (200,), generator=torch.Generator().manual_seed(seed))
    return [whole.index_fill(0, at, 1.0)]


def small_tensors(seed):
    return [*draw(80, 30, 3, seed=seed, dtype=torch.float32)]


@pytest.mark.parametrize("kind", [dense, rank_one, sparse, small_tensors])
def test_the_squared_norm_of_a_sketch_is_that_of_the_gradient_on_average(kind):
    gradients = kind(16)
    expected = float(sum(g.double().square().sum() for g in gradients))
    draws = 60
    seen = torch.stack(
        [sketch(gradients, i * len(gradients)).double().square().sum() for i in range(draws)]
    )
    error = float(seen.std()) / math.sqrt(draws)
    assert error < 0.1 * expected  # else the next line would say nothing
    assert pytest.approx(expected, abs=4 * error) == float(seen.mean())


def test_the_dot_product_of_sketches_is_that_of_the_gradients_on_average():
    a, b = dense(17)[0], dense(18)[0] + 0.5 * dense(17)[0]
    draws = 60
    seen = torch.stack([sketch([a], i) @ sketch([b], i) for i in range(draws)]).double()
    error = float(seen.std()) / math.sqrt(draws)
    assert pytest.approx(float(a.flatten() @ b.flatten()), abs=4 * error) == float(seen.mean())


def test_a_gradient_that_is_no_longer_than_a_sketch_keeps_its_norm():
    gradient = draw(1021, seed=19)
    expected = float(gradient.norm())
    assert pytest.approx(expected, rel=1e-6) == float(sketch([gradient]).norm())  # float32


def test_the_sketch_of_a_sum_is_the_sum_of_the_sketches():
    a, b = ([*dense(s), *small_tensors(s)] for s in (20, 21))
    total = [2 * x + y for x, y in zip(a, b, strict=True)]
    # float32 sums of 100 terms
    torch.testing.assert_close(2 * sketch(a) + sketch(b), sketch(total), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_are_projected_in_float32(dtype):
    narrow = [g.to(dtype) for g in rank_one(22)]
    assert torch.equal(sketch([g.float() for g in narrow]), sketch(narrow))


def test_a_transposed_gradient_is_read_in_the_order_of_its_elements():
    gradient = draw(70, 300, seed=23, dtype=torch.float32).t()
    assert torch.equal(sketch([gradient.contiguous()]), sketch([gradient]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_type_that_new_tensors_have_by_default_does_not_matter(dtype):
    gradients = draw(6, 3000, seed=24, dtype=torch.float32) + 0.1
    expected = measured(gradients, [4] * 6, dtype=torch.float32)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        actual = measured(gradients, [4] * 6, dtype=torch.float32)
    finally:
        torch.set_default_dtype(before)
    assert pytest.approx(ends(expected.interval), rel=1e-5) == ends(actual.interval)  # float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to be the default device")
def test_the_device_that_new_tensors_have_by_default_does_not_matter():
    gradients = draw(6, 3000, seed=24, dtype=torch.float32) + 0.1
    expected = measured(gradients, [4] * 6, dtype=torch.float32)
    torch.set_default_device("cuda")
    try:
        weight = nn.Parameter(torch.zeros(3000))
        with GradientMeter([weight], confidence=0.9) as meter:
            for gradient in gradients:
                feed(weight, gradient.cuda() / 6)
            actual = meter.read([4] * 6)
    finally:
        torch.set_default_device(None)
    assert pytest.approx(ends(expected.interval), rel=1e-3) == ends(actual.interval)


# a window


def steps_of(draws, sizes, *, signal=1.0, noise=50.0):
    """Independent steps with the scatter of real ones: that of the signal falls with N."""
    return [
        (signal + a * (0.3 + noise / n / 3), noise * (1 + 0.2 * b), n)
        for (a, b), n in zip(draws.tolist(), sizes, strict=True)
    ]


def last_of(average, steps):
    for signal, noise, n in steps:
        result = average.update(GradientStatistics(signal, noise, n, 8))
    return result


@pytest.mark.parametrize("sizes", [[64] * 40, [16, 16, 300, 64] * 10, [64, 64, 64]])
@pytest.mark.parametrize("seed", range(3))
def test_a_windows_interval_is_the_oracles(sizes, seed):
    steps = steps_of(draw(len(sizes), 2, seed=seed), sizes)
    actual = last_of(NoiseAverage(1000, confidence=0.9), steps).interval
    # the degrees of freedom are rounded to .1, which moves t by 1 % where there are two of them
    low, high = oracle.of_window(steps, 1000, 0.9)
    assert pytest.approx((low + high) / 2) == (actual.low + actual.high) / 2
    assert pytest.approx(high - low, rel=0.02) == actual.high - actual.low
    assert (0.9, "window") == (actual.level, actual.covers)


def test_an_average_without_interval_has_none():
    steps = steps_of(draw(5, 2, seed=0), [64] * 5)
    assert last_of(NoiseAverage(1000), steps).interval is None


def test_one_step_says_nothing_of_how_sure_the_window_is():
    steps = steps_of(draw(1, 2, seed=0), [64])
    actual = last_of(NoiseAverage(1000, confidence=0.9), steps)
    assert (-1.0, 1.0) == actual.similarity_interval


# where the batch jumps, the interval is wider than it need be: a difference holds both variances
@pytest.mark.parametrize(
    ("pattern", "most"), [([64], 0.985), ([32, 48, 64, 96, 128, 96, 64, 48], 0.99), ([32, 256], 1)]
)
@pytest.mark.parametrize("samples", [640, 3000])
def test_a_windows_interval_covers_the_truth_about_as_often_as_it_says(pattern, most, samples):
    covered, looks = 0, 0
    for seed in range(4):
        sizes = pattern * (2400 // len(pattern))
        average = NoiseAverage(samples, confidence=0.9)
        for t, (signal, noise, n) in enumerate(steps_of(draw(2400, 2, seed=seed), sizes)):
            step = average.update(GradientStatistics(signal, noise, n, 8))
            if t > 200 and t % 50 == 0:  # nearly independent looks
                looks += 1
                truth = math.log1p(n * 1.0 / 50.0)
                covered += step.interval.low <= truth <= step.interval.high
    # 0.9 nominal; 170 looks have a standard error of .023, and x is only nearly normal
    assert 0.8 <= covered / looks <= most


def test_a_slow_drift_is_no_noise():
    steady = NoiseAverage(1000, confidence=0.9)
    drifting = [(1.0 + 0.001 * t, 50.0, 64) for t in range(500)]
    actual = last_of(steady, drifting).interval
    assert actual.high - actual.low < 0.01  # against .5 by the scatter about the window's mean


@pytest.mark.thorough
def test_the_more_steps_a_window_holds_the_narrower_its_interval():
    steps = steps_of(draw(2000, 2, seed=3), [64] * 2000)
    widths = []
    for samples in (500, 5000, 50_000):
        one = last_of(NoiseAverage(samples, confidence=0.9), steps).interval
        widths.append(one.high - one.low)
    assert sorted(widths, reverse=True) == widths
    # a hundred times as many steps: 10 times as sure; a factor of 2 for 8 degrees of freedom
    assert 5 < widths[0] / widths[2] < 25


def test_a_step_that_is_not_finite_leaves_the_window_alone():
    steps = steps_of(draw(9, 2, seed=4), [64] * 9)
    broken = [*steps[:5], (math.nan, math.inf, 64), *steps[5:]]
    expected = last_of(NoiseAverage(1000, confidence=0.9), steps)
    assert expected == last_of(NoiseAverage(1000, confidence=0.9), broken)


@pytest.mark.parametrize("cut", [0, 1, 2, 7])
def test_a_saved_window_continues_to_the_last_bit(cut):
    steps = steps_of(draw(12, 2, seed=5), [64, 16, 256] * 4)
    expected = last_of(NoiseAverage(1000, confidence=0.9), steps)
    before, after = (NoiseAverage(1000, confidence=0.9) for _ in range(2))
    if cut:
        last_of(before, steps[:cut])
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after.load_state_dict(torch.load(file, weights_only=True))
    assert expected == last_of(after, steps[cut:])
