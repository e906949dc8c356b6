"""The linear regression of the VRGD paper: the experiment, its verdicts, its files."""

import json
import math

import pytest
import torch

from bigbatch.experiments.linear_regression import claims
from bigbatch.experiments.linear_regression.arms import Spread, first_below, study
from bigbatch.experiments.linear_regression.experiment import (
    BATCH,
    GROUPS,
    TRUTH,
    Draws,
    printed,
    sgd,
    train,
    widened,
)
from bigbatch.experiments.linear_regression.input_distributions import LAWS
from bigbatch.experiments.linear_regression.report import write
from bigbatch.experiments.linear_regression.tables import details_of, tables_of
from bigbatch.optim import VRSGD

by_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)


@by_law
@pytest.mark.parametrize("make", [printed, widened])
def test_steps_are_those_of_the_optimizer_with_real_backwards(law, make):
    arm = make(law.shown)
    trace = train(law, [arm], seeds=1, steps=5)[arm]
    weight = torch.nn.Parameter(torch.zeros(10, dtype=torch.float64))
    optimizer = VRSGD([weight], lr=arm.lr, gamma=arm.gamma, r_max=arm.r_max)
    draws = Draws(law, seeds=1)
    for step in range(5):
        optimizer.zero_grad()
        for x in draws.batch()[0].chunk(GROUPS):
            ((x @ weight - x @ TRUTH).square().mean() / GROUPS).backward()
        optimizer.step()
        # both in float64, summed in another order
        torch.testing.assert_close(
            weight.detach(), trace.weights[0, step + 1], rtol=1e-12, atol=1e-12
        )


@by_law
def test_the_loss_is_the_mean_squared_error_on_the_test_inputs(law):
    trace = train(law, [sgd(law.shown)], seeds=1, steps=3)[sgd(law.shown)]
    x = Draws(law, seeds=1).test[0]
    expected = [(x @ w - x @ TRUTH).square().mean() for w in trace.weights[0]]
    torch.testing.assert_close(torch.stack(expected), trace.losses[0], rtol=1e-12, atol=0)


def test_plain_sgd_is_the_arm_whose_r_is_one():
    trace = train(LAWS[0], [sgd(0.1)], seeds=1, steps=3)[sgd(0.1)]
    assert (trace.r == 1).all()


def test_a_run_is_made_again_by_its_seed_whatever_else_runs():
    arm = widened(0.2)
    alone = train(LAWS[2], [arm], seeds=1, steps=5)[arm]
    together = train(LAWS[2], [sgd(0.1), arm, printed(0.2, k=8)], seeds=2, steps=5)[arm]
    again = train(LAWS[2], [sgd(0.1), arm, printed(0.2, k=8)], seeds=2, steps=5)[arm]
    assert torch.equal(together.weights, again.weights)
    torch.testing.assert_close(alone.weights[0], together.weights[0], rtol=1e-12, atol=0)
    assert not torch.equal(together.weights[0], together.weights[1])


@by_law
def test_inputs_have_the_moments_that_the_law_names(law):
    x = Draws(law, seeds=1).batch()[0]
    error = 5 / math.sqrt(BATCH)  # five standard errors of a mean of BATCH draws
    std = torch.tensor(law.std, dtype=torch.float64)
    assert ((x.mean(0) - law.mean).abs() <= error * std).all()
    assert ((x.std(0) / std - 1).abs() <= error).all()


def test_sgd_diverges_just_above_two_over_the_curvature():
    law = LAWS[2]
    assert law.curvature == pytest.approx(31 / 6, rel=1e-12)  # 2 (1/12 + 10/4)
    arms = [sgd(factor / law.curvature) for factor in (1.9, 2.1)]
    below, above = (trace.losses for trace in train(law, arms, seeds=1).values())
    assert below[0, -1] < below[0, 1]
    assert above[0, -1] > above[0, 1]


def test_the_first_step_below_a_goal_is_counted_from_the_start():
    losses = torch.tensor([[4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 3.0, 3.0]])
    assert [2.0, math.inf] == first_below(losses, torch.tensor([[2.0], [1.0]])).tolist()


def test_a_run_that_diverged_is_the_worst_of_its_seeds():
    spread = Spread.of(torch.tensor([2.0, math.nan, 1.0]))
    assert Spread(median=2.0, least=1.0, most=math.inf) == spread


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [
        (50, claims.HOLDS),
        (60, claims.HOLDS),
        (61, claims.PARTLY),
        (36, claims.PARTLY),
        (100, claims.FAILS),
        (math.inf, claims.FAILS),
    ],
)
def test_about_half_the_steps(steps, verdict):
    assert verdict == claims.half_the_steps(steps)


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ([2.0, 1.0, 1.0, 2.0], claims.HOLDS),
        ([1.05, 1.0, 1.0, 2.0], claims.PARTLY),  # one end ties within 10 %
        ([1.0, 1.05, 1.3, 2.0], claims.PARTLY),  # best outside, a tie inside
        ([1.0, 1.0, 1.0, 1.0], claims.FAILS),  # flat: no optimum
        ([4.0, 3.0, 2.0, 1.0], claims.FAILS),
        ([2e-28, 1e-28, 1e-28, 2e-28], claims.FAILS),  # rounding has no optimum
    ],
)
def test_an_optimum_inside_a_range(losses, verdict):
    found, best, plateau = claims.optimum([1, 2, 3, 4], losses, inside=(2, 3), ends=(1, 4))
    assert verdict == found
    assert min(losses) == losses[best - 1]
    assert plateau[0] <= best <= plateau[1]


def test_a_weight_arrives_when_it_stays_near_its_value():
    weights = TRUTH.repeat(1, 5, 1)  # right at all five moments
    weights[0, 2, 0] = 1.6  # w1 leaves at step 2, by more than 0.5
    weights[0, 0, 9] = 0.0
    weights[0, 4, 4] = 9.0  # w5 is away at the end: never
    assert [3, 0, 0, 0, 5, 0, 0, 0, 0, 1] == claims.arrivals(weights)[0].tolist()


def test_r_is_averaged_over_five_steps_and_fewer_at_the_ends():
    r = torch.zeros(30, 1)
    r[4], r[29] = 5.0, 3.0
    smooth = claims.smoothed(r)
    assert [0, 1, 1, 1, 1, 1, 0] == smooth[1:8, 0].round(decimals=6).tolist()
    assert 1.0 == smooth[29, 0]  # over the last three


# steps of w1 .. w10
IN_ORDER = [90, 50, 20, 9, 2, 1, 8, 21, 50, 95]


def test_the_order_of_the_weights():
    assert claims.HOLDS == claims.order_of_weights(IN_ORDER)
    assert claims.PARTLY == claims.order_of_weights([15, *IN_ORDER[1:]])  # w1 before w3 and w8
    assert claims.FAILS == claims.order_of_weights([*IN_ORDER[:4], 30, *IN_ORDER[5:]])
    assert claims.FAILS == claims.order_of_weights([101] * 10)  # nothing arrives


def bumps(at, width=5.0, floor=0.1):
    """r of ten weights over 100 steps, each with one peak."""
    steps = torch.arange(1, 101, dtype=torch.float64).unsqueeze(1)
    return floor + torch.exp(-(((steps - torch.tensor(at)) / width) ** 2))


def test_the_order_of_the_peaks_of_r():
    assert claims.HOLDS == claims.order_of_peaks(bumps(IN_ORDER))
    w8_first = bumps(IN_ORDER)
    w8_first[:, 7] = 0.5 * w8_first[:, 5]  # with w6, and too low to move the peak of its pair
    assert claims.PARTLY == claims.order_of_peaks(w8_first)
    too_soon = [55, *IN_ORDER[1:9], 55]
    assert claims.FAILS == claims.order_of_peaks(bumps(too_soon))
    assert claims.FAILS == claims.order_of_peaks(bumps(IN_ORDER[5:] + IN_ORDER[:5]))


def test_peaks_of_noise_have_no_order():
    r = 1 + 0.001 * bumps(IN_ORDER)  # in order, but no higher than the rest
    assert claims.FAILS == claims.order_of_peaks(r)


@pytest.fixture(scope="module")
def short():
    """A study of one law, a few steps long."""
    return [study(LAWS[4], seeds=2, steps=6)]


def test_verdicts_are_told_with_what_was_measured(short):
    rows = details_of(short).rows
    assert len(LAWS[4].lrs) * (4 * 2 + 3) == len(rows)
    assert {row[4] for row in rows} <= {claims.HOLDS, claims.PARTLY, claims.FAILS}
    assert all(row[5] for row in rows)
    counted = tables_of(short)[-1].rows
    for claim, method, *counts, _ in counted:
        own = [row[4] for row in rows if (row[0], row[3]) == (claim, method)]
        verdicts = (claims.HOLDS, claims.PARTLY, claims.FAILS)
        assert [f"{own.count(verdict)} of {len(own)}" for verdict in verdicts] == counts


def test_the_control_runs_at_the_rate_that_r_leaves_on_average(short):
    found, arm = short[0], printed(LAWS[4].shown)
    lr = arm.lr * found.mean_r(arm).median
    expected = train(LAWS[4], [sgd(lr)], seeds=2, steps=6)[sgd(lr)]
    torch.testing.assert_close(
        expected.weights, found.controls[arm].weights, rtol=1e-12, atol=1e-15
    )


def test_everything_is_written_and_the_page_needs_no_network(short, tmp_path):
    write(short, tmp_path, "short")
    assert (tmp_path / "figure1.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "figure3.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert 2 == page.count("<svg ")
    for forbidden in ("<script", "<link", 'src="http', 'href="http'):
        assert forbidden not in page
    results = json.loads((tmp_path / "results.json").read_text())
    law = results["laws"][0]
    assert [0, 1] == results["settings"]["seeds"]
    assert "N, triangle" == law["name"]
    assert (2, 7) == (len(law["runs"][0]["losses"]), len(law["runs"][0]["losses"][0]))


@pytest.mark.parametrize(
    "option",
    [
        ("--policy", "fixed"),
        ("--target", "0.1"),
        ("--batch-size", "64"),
        ("--lr", "0.1"),
        ("--gamma", "0.5"),
        ("--epochs", "2"),
        ("--seed", "1"),
        ("--data", "."),
    ],
    ids=lambda option: option[0],
)
def test_settings_of_a_training_are_refused(bigbatch, tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    status, out, err = bigbatch("train", "linear-regression", *option)
    assert (2, "", 1) == (status, out, err.count("\n"))
    assert "recipe linear-regression" in err
    assert f"does not go together with {option[0]}" in err
    assert [] == list(tmp_path.iterdir())


def test_it_is_not_resumed(bigbatch):
    status, _, err = bigbatch("train", "linear-regression", "--resume", "x")
    assert 2 == status
    assert "--resume does not go together with --recipe" in err


def test_a_directory_in_use_is_left_alone(bigbatch, tmp_path):
    (tmp_path / "mine").write_text("precious")
    status, _, err = bigbatch("train", "linear-regression", "--run-dir", tmp_path / "mine")
    assert 2 == status
    assert "already in use; nothing was overwritten" in err
    assert "--resume" not in err
    assert ["mine"] == [path.name for path in tmp_path.iterdir()]


def test_the_recipe_is_listed(bigbatch):
    assert "linear-regression" in bigbatch("recipes")[1]


@pytest.mark.release
def test_the_command_leaves_its_directory_and_shows_its_tables(bigbatch, tmp_path):
    status, out, err = bigbatch(
        "train", "linear-regression", "--seeds", "1", "--runs-dir", tmp_path, "--quiet"
    )
    assert (0, "") == (status, err)
    place = tmp_path / "linear-regression-1"
    assert [place] == list(tmp_path.iterdir())
    assert {"report.html", "figure1.png", "figure3.png", "results.json"} == {
        path.name for path in place.iterdir()
    }
    results = json.loads((place / "results.json").read_text())
    for law in results["laws"]:
        assert law["name"] in out
    runs = {(run["lr"], run["method"]): run for run in results["laws"][3]["runs"]}
    goal = runs[0.05, "SGD"]["losses"][0][100]
    losses = runs[0.05, "r <= 1/gamma"]["losses"][0]
    needed = next(step for step, loss in enumerate(losses) if loss <= goal)
    assert [needed] == runs[0.05, "r <= 1/gamma"]["steps_for_sgd_loss"]
    assert 40 <= needed <= 60  # one seed, far from both bounds
