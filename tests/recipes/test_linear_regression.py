"""The linear regression of the VRGD paper: the experiment, its table, its files."""

import math
from xml.etree import ElementTree

import pytest
import torch

from bigbatch.log.chart_svg import svg
from bigbatch.optim import VRSGD
from bigbatch_recipes.heat_map import HeatMap
from bigbatch_recipes.linear_regression import (
    BATCH,
    COLUMNS,
    DISTRIBUTIONS,
    GROUPS,
    TRUTH,
    Draws,
    Spread,
    first_below,
    loss_text,
    lr_grid,
    rows_of,
    sgd,
    steps_text,
    study,
    train,
    vr_sgd,
    vr_sgd_wide,
    write,
)

INPUTS = DISTRIBUTIONS[4]
by_inputs = pytest.mark.parametrize("inputs", DISTRIBUTIONS, ids=lambda inputs: inputs.name)


@by_inputs
@pytest.mark.parametrize("make", [vr_sgd, vr_sgd_wide])
def test_steps_are_those_of_the_optimizer_with_real_backwards(inputs, make):
    arm = make(inputs.shown)
    trace = train(inputs, [arm], seeds=1, steps=5)[arm]
    weight = torch.nn.Parameter(torch.zeros(10, dtype=torch.float64))
    optimizer = VRSGD([weight], lr=arm.lr, gamma=arm.gamma, r_max=arm.r_max)
    draws = Draws(inputs, seeds=1)
    for step in range(5):
        optimizer.zero_grad()
        for x in draws.batch()[0].chunk(GROUPS):
            ((x @ weight - x @ TRUTH).square().mean() / GROUPS).backward()
        optimizer.step()
        # both in float64, summed in another order
        torch.testing.assert_close(
            weight.detach(), trace.weights[0, step + 1], rtol=1e-12, atol=1e-12
        )


@by_inputs
def test_the_loss_is_the_mean_squared_error_on_the_test_inputs(inputs):
    trace = train(inputs, [sgd(inputs.shown)], seeds=1, steps=3)[sgd(inputs.shown)]
    x = Draws(inputs, seeds=1).test[0]
    expected = [(x @ w - x @ TRUTH).square().mean() for w in trace.weights[0]]
    torch.testing.assert_close(torch.stack(expected), trace.losses[0], rtol=1e-12, atol=0)


def test_plain_sgd_is_the_arm_whose_r_is_one():
    trace = train(DISTRIBUTIONS[0], [sgd(0.1)], seeds=1, steps=3)[sgd(0.1)]
    assert (trace.r == 1).all()


def test_a_run_is_made_again_by_its_seed_whatever_else_runs():
    arm = vr_sgd_wide(0.2)
    alone = train(DISTRIBUTIONS[2], [arm], seeds=1, steps=5)[arm]
    together = train(DISTRIBUTIONS[2], [sgd(0.1), arm, vr_sgd(0.2, k=8)], seeds=2, steps=5)[arm]
    again = train(DISTRIBUTIONS[2], [sgd(0.1), arm, vr_sgd(0.2, k=8)], seeds=2, steps=5)[arm]
    assert torch.equal(together.weights, again.weights)
    torch.testing.assert_close(alone.weights[0], together.weights[0], rtol=1e-12, atol=0)
    assert not torch.equal(together.weights[0], together.weights[1])


@by_inputs
def test_inputs_have_the_moments_that_the_distribution_names(inputs):
    x = Draws(inputs, seeds=1).batch()[0]
    error = 5 / math.sqrt(BATCH)  # five standard errors of a mean of BATCH draws
    std = torch.tensor(inputs.std, dtype=torch.float64)
    assert ((x.mean(0) - inputs.mean).abs() <= error * std).all()
    assert ((x.std(0) / std - 1).abs() <= error).all()


def test_sgd_diverges_just_above_two_over_the_curvature():
    inputs = DISTRIBUTIONS[2]
    assert inputs.curvature == pytest.approx(31 / 6, rel=1e-12)  # 2 (1/12 + 10/4)
    arms = [sgd(factor / inputs.curvature) for factor in (1.9, 2.1)]
    below, above = (trace.losses for trace in train(inputs, arms, seeds=1).values())
    assert below[0, -1] < below[0, 1]
    assert above[0, -1] > above[0, 1]


def test_the_first_step_below_a_goal_is_counted_from_the_start():
    losses = torch.tensor([[4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 3.0, 3.0]])
    assert [2.0, math.inf] == first_below(losses, torch.tensor([[2.0], [1.0]])).tolist()


def test_a_run_that_diverged_is_the_worst_of_its_seeds():
    spread = Spread.of(torch.tensor([2.0, math.nan, 1.0]))
    assert Spread(median=2.0, least=1.0, most=math.inf) == spread


@pytest.fixture(scope="module")
def short():
    """A study of one distribution, a few steps long."""
    return [study(INPUTS, seeds=2, steps=6)]


def test_the_table_has_every_rate_and_each_ones_best(short):
    rows = list(rows_of(short[0]))
    assert 2 * (len(INPUTS.lrs) + 1) == len(rows)
    assert {len(COLUMNS)} == {len(row) for row in rows}
    arm, plain = vr_sgd(INPUTS.shown), sgd(INPUTS.shown)
    row = next(row for row in rows if row[1:3] == (f"{INPUTS.shown:g}", "r <= 1"))
    expected = short[0].final(plain), short[0].final(arm), short[0].control(arm)
    assert tuple(map(loss_text, expected)) == row[4:7]
    grids = [[make(lr) for lr in lr_grid(INPUTS)] for make in (sgd, vr_sgd_wide)]
    best = [min(arms, key=lambda arm: short[0].final(arm).most).lr for arms in grids]
    assert f"best: {best[0]:.3g}, {best[1]:.3g}" == rows[-1][1]


def test_texts_of_losses_and_steps():
    assert "2 [1, diverged]" == loss_text(Spread(2.0, 1.0, math.inf))
    assert "rounding" == loss_text(Spread(1e-28, 1e-28, 1e-28))
    assert "50 [48, never]" == steps_text(Spread(50.0, 48.0, math.inf))


def test_the_control_runs_at_the_rate_that_r_leaves_on_average(short):
    found, arm = short[0], vr_sgd(INPUTS.shown)
    lr = arm.lr * found.mean_r(arm).median
    expected = train(INPUTS, [sgd(lr)], seeds=2, steps=6)[sgd(lr)]
    torch.testing.assert_close(
        expected.weights, found.controls[arm].weights, rtol=1e-12, atol=1e-15
    )


def test_table_and_figures_are_written(short, tmp_path):
    write(short, tmp_path)
    for name in ("figure1.svg", "figure3.svg"):
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")
    head, rule, *rows = (tmp_path / "table.md").read_text().splitlines()
    assert [*COLUMNS] == [cell.strip() for cell in head.strip("|").split("|")]
    assert set(rule) == set("|- ")
    assert len(rows) == len(list(rows_of(short[0])))
    assert all("N, triangle" in row for row in rows)


def test_cells_of_a_heat_map_darken_with_their_value():
    values = [[1, 1, 100], [500, math.nan, 10]]
    shades = HeatMap(
        "r", ["first", "second"], values, x_label="step", x_range=(0, 3), low=1, high=100, width=330
    )
    element = ElementTree.fromstring(svg([shades]))
    paths = {path.get("d"): float(path.get("fill-opacity")) for path in element.iter("path")}
    lightest, middle, darkest = sorted(paths, key=paths.__getitem__)
    assert lightest == "M0 0h2v1h-2z"
    assert middle == "M2 1h1v1h-1z"
    assert darkest == "M2 0h1v1h-1zM0 1h1v1h-1z"


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
    assert "linear-regression" in bigbatch("list")[1]


@pytest.mark.release
def test_the_command_leaves_its_directory_and_shows_its_table(bigbatch, tmp_path):
    status, out, err = bigbatch(
        "train", "linear-regression", "--seeds", "1", "--runs-dir", tmp_path, "--quiet"
    )
    assert (0, "") == (status, err)
    place = tmp_path / "linear-regression-1"
    assert [place] == list(tmp_path.iterdir())
    assert {"table.md", "figure1.svg", "figure3.svg"} == {path.name for path in place.iterdir()}
    assert all(len(line) <= 80 or str(tmp_path) in line for line in out.splitlines())
    table = (place / "table.md").read_text()
    assert "U(0, 1)" in out
    for inputs in DISTRIBUTIONS:
        assert inputs.name in table
    row = next(
        one for one in table.splitlines() if "N, sine" in one and "0.05 " in one and "/g" in one
    )
    assert 40 <= float(row.split("|")[-2]) <= 60  # one seed, far from both bounds
