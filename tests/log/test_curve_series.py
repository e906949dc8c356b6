"""The curves of a report: lines and bands over seeds, last steps of epochs, gaps."""

import math
from statistics import fmean

import pytest

from bigbatch.log.chart_svg import svg
from bigbatch.log.curve_series import AXES, chosen_rows, panels_of
from bigbatch.log.history import History
from log_rows import row

LOSS, SCORE, BATCH = "training loss", "test accuracy, %", "batch size, samples"
NOISE, RATE = "noise scale, samples", "learning rate"


def run(tmp_path, rows, seed=0, arm="a", epochs=1, **settings):
    settings = {"arm": arm, "seed": seed, "epochs": epochs, **settings}
    return History(tmp_path / f"{arm}{seed}", settings, rows)


def one_of(histories, title, x="samples"):
    (panel,) = [panel for panel in panels_of(histories, x) if panel.title == title]
    return panel.series[0]


def points_of(line):
    """Place, center, least and largest value of each point."""
    ends = zip(line.low, line.high, strict=True) if line.low else [(None, None)] * len(line.x)
    return [(x, y, *end) for x, y, end in zip(line.x, line.y, ends, strict=True)]


@pytest.fixture
def three(tmp_path):
    """Three seeds of 20 steps, whose losses, times and scores differ."""
    return [
        run(
            tmp_path,
            [
                row(
                    s,
                    loss=1 + seed + s,
                    elapsed_seconds=s * (1.0 + seed),
                    accuracy=0.5 + seed / 10 if s % 10 == 0 else None,
                )
                for s in range(1, 21)
            ],
            seed,
        )
        for seed in range(3)
    ]


def test_a_line_is_the_mean_over_seeds_and_its_band_their_range(three):
    points = points_of(one_of(three, LOSS))
    assert 20 == len(points)
    for step, (_, *values) in enumerate(points, start=1):
        assert (2 + step, 1 + step, 3 + step) == pytest.approx(values)
    scores = points_of(one_of(three, SCORE))
    assert [(60, 50, 70)] * 2 == [pytest.approx(values) for _, *values in scores]


def test_seeds_are_compared_at_the_same_samples_whatever_the_axis(three):
    for x, expected in {"samples": 640, "step": 20, "elapsed_seconds": fmean((20, 40, 60))}.items():
        line = one_of(three, LOSS, x)
        assert (expected, 22) == pytest.approx((line.x[-1], line.y[-1]))


def test_a_long_run_is_averaged_by_parts_of_an_epoch(tmp_path):
    rows = [row(s, epoch=(s - 1) // 100, loss=float(s)) for s in range(1, 2001)]
    line = one_of([run(tmp_path, rows, epochs=20)], LOSS)
    assert 60 == len(line.x)
    assert 100 == rows[round(line.x[2] / 32) - 1]["step"]  # three points an epoch
    assert fmean(range(1, 34)) == line.y[0]


def test_a_loss_counts_by_its_samples(tmp_path):
    rows = [row(1, batch=30, loss=1.0), row(2, batch=10, loss=5.0, samples=40)]
    many = [row(n + 3, batch=1, samples=41 + n, loss=1.0) for n in range(4000)]
    first = one_of([run(tmp_path, rows + many)], LOSS).y[0]
    samples = [30, 10] + [1] * (4040 // 60 + 1 - 40)
    losses = [1.0, 5.0] + [1.0] * (len(samples) - 2)
    expected = sum(n * loss for n, loss in zip(samples, losses, strict=True)) / sum(samples)
    assert expected == pytest.approx(first, rel=0.01)


def test_the_last_step_of_an_epoch_is_in_no_batch_size_or_rate(tmp_path):
    sizes = [512, 512, 323] * 5
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    rows = [
        row(n + 1, batch=size, samples=end, epoch=n // 3, lr=[size / 1000])
        for n, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    history = run(tmp_path, rows, epochs=5)
    assert {512} == {*one_of([history], BATCH).y}
    assert {0.512} == {round(rate, 9) for rate in one_of([history], RATE).y}
    assert 10 == len(chosen_rows(rows))


def test_the_only_step_of_an_epoch_counts():
    rows = [row(1, epoch=0), row(2, epoch=1), row(3, epoch=1)]
    assert [1, 2] == [one["step"] for one in chosen_rows(rows)]
    assert [] == chosen_rows([])


def test_a_seed_without_a_step_in_a_bin_has_a_value_between_its_neighbours(tmp_path):
    few = [row(1, batch=320, loss=10.0), row(2, batch=320, loss=20.0)]
    many = [row(s, batch=32, loss=5.0) for s in range(1, 21)]
    line = one_of([run(tmp_path, few), run(tmp_path, many, 1)], LOSS)
    highs = line.high[9:]  # in the bins before there is one run
    assert 10 == pytest.approx(highs[0], abs=1)
    assert 20 == highs[-1]
    assert highs == sorted(highs)


def test_noise_is_averaged_over_runs_before_the_noise_scale_is_computed(tmp_path):
    def noisy(seed, signal):
        rows = [row(s, grad_sqnorm=signal, grad_variance=100.0) for s in range(1, 9)]
        return run(tmp_path, rows, seed)

    (_, *values), *_ = points_of(one_of([noisy(0, 1.0), noisy(1, 3.0)], NOISE))
    assert (50, 100 / 3, 100) == pytest.approx(values)
    (_, *values), *_ = points_of(one_of([noisy(0, -1.0), noisy(1, 3.0)], NOISE))
    assert (100, 100 / 3, math.inf) == pytest.approx(values)


def test_an_infinite_noise_scale_leaves_a_gap(tmp_path):
    signals = [1.0, 1.0, -1.0, 1.0, 1.0]
    rows = [row(s, grad_sqnorm=signal) for s, signal in enumerate(signals, start=1)]
    line = one_of([run(tmp_path, rows)], NOISE)
    assert [True, True, False, True, True] == [math.isfinite(y) for y in line.y]
    assert [] == line.low  # one run has no range


@pytest.mark.parametrize("x", AXES)
@pytest.mark.parametrize("huge", [1e308, -1e308, 0.0, None])
def test_every_number_of_a_log_can_be_drawn(tmp_path, x, huge):
    odd = {"loss": huge, "grad_sqnorm": huge, "lr": [huge or 0.0]}
    odd["metrics"] = {"score": huge}
    runs = [run(tmp_path, [row(1), row(2), row(3, **odd), row(4, **odd)], seed) for seed in (0, 1)]
    for panel in panels_of(runs, x):
        assert "nan" not in svg([panel])
        assert "inf" not in svg([panel])


def test_a_run_that_ended_early_never_turns_a_line_back(tmp_path):
    slow = [row(s, elapsed_seconds=10.0 * s) for s in range(1, 11)]
    fast = [row(s, elapsed_seconds=1.0 * s) for s in range(1, 21)]
    xs = one_of([run(tmp_path, slow), run(tmp_path, fast, 1)], LOSS, "elapsed_seconds").x
    assert sorted(xs) == xs


def test_a_quantity_without_a_value_has_no_panel(tmp_path):
    unmeasured = {"grad_sqnorm": None, "grad_variance": None}
    plain = run(tmp_path, [row(s, **unmeasured) for s in range(1, 9)])
    assert [LOSS, BATCH, RATE] == [panel.title for panel in panels_of([plain], "step")]


def scored(tmp_path, values, name, **settings):
    """A run with a score after each of its steps."""
    rows = [row(step, metrics={name: y}) for step, y in enumerate(values, start=1)]
    return run(tmp_path, rows, **settings)


RISING = [0.1, 0.5, 0.9, 0.95, 0.96, 0.97, 0.97, 0.98]


@pytest.mark.parametrize(
    ("name", "title", "factor"),
    [
        ("test_accuracy", "test accuracy, %", 100),
        ("val/acc", "val acc, %", 100),
        ("test accuracy, %", "test accuracy, %", 1),
        ("BLEU", "BLEU", 1),
    ],
)
def test_the_axis_of_a_score_is_that_of_the_last_values_in_its_unit(tmp_path, name, title, factor):
    (panel,) = [
        panel
        for panel in panels_of([scored(tmp_path, RISING, name)], "step")
        if panel.title not in (LOSS, BATCH, NOISE, "gradient similarity", RATE)
    ]
    low, high = panel.y_ends
    assert title == panel.title
    assert 0.85 * factor < low < 0.95 * factor  # a tenth of all values, about the last ones
    assert 0.98 * factor <= high <= 1.0 * factor
    (line,) = panel.series
    shown = [y for y in line.y if not math.isnan(y)]
    assert pytest.approx([factor * y for y in RISING[3:]]) == shown


def test_percentages_below_one_are_no_shares_where_another_run_has_larger_ones(tmp_path):
    runs = [scored(tmp_path, [0.9, y], "accuracy", arm=arm) for arm, y in (("a", 1), ("b", 90.0))]
    assert ["accuracy"] == [p.title for p in panels_of(runs, "step") if "accuracy" in p.title]


@pytest.mark.parametrize("order", [1, -1])
def test_each_of_two_main_scores_is_in_its_own_unit(tmp_path, order):
    runs = [
        scored(tmp_path, [0.5, 0.9], "accuracy", arm="a"),
        scored(tmp_path, [9.0, 8.0], "perplexity", arm="b"),
    ]
    _, panel, *_ = panels_of(runs[::order], "step")
    assert {"a": [50.0, 90.0], "b": [9.0, 8.0]} == {line.name: line.y for line in panel.series}
    assert {"accuracy, %", "perplexity"} == {*panel.title.split(" or ")}


def test_the_axis_of_a_constant_score_has_room_on_both_sides(tmp_path):
    panels = panels_of([scored(tmp_path, [0.5, 0.5, 0.5], "accuracy")], "step")
    (panel,) = [panel for panel in panels if panel.title == "accuracy, %"]
    assert pytest.approx((49.5, 50.5)) == panel.y_ends
