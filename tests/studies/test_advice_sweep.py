"""The sweep that judges advice: its trainings end as they should, and its verdict is arithmetic."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from typer import BadParameter

import bigbatch
from bigbatch.errors import RunError
from studies import commands
from studies.advice_results import (
    Advised,
    SizeResult,
    WorkloadResult,
    about,
    read_results,
    write_results,
)
from studies.advice_sweep import (
    Plan,
    begin,
    empty_results,
    run,
    seconds_of_steps,
    train_size,
    tuned,
    widen,
)
from studies.advice_verdict import Verdict, conclusion, verdicts
from studies.advice_workloads import FIRST, SECOND, WORKLOADS
from studies.target_training import Result, TargetTraining
from studies.timing import Times

TEACHER = WORKLOADS["teacher"]
EASY = replace(TEACHER, target=1e3)  # reached as soon as there are enough evaluations
IMPOSSIBLE = replace(TEACHER, target=-1.0, max_steps=30)
SHORT = Plan(
    sizes_used=(7,),
    max_sizes=2,
    rates=1,
    max_rates=1,
    tuning_seeds=(90,),
    fresh_seeds=(91,),
    advice_seeds=(92,),
    rounds=2,
)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_trains_and_has_no_noise_but_that_of_its_samples(name):
    training = TargetTraining(WORKLOADS[name], WORKLOADS[name].rate, seed=100)
    before = training.held_out_loss()
    assert before == training.held_out_loss()
    for _ in range(20):
        training.step(64)
    assert training.held_out_loss() < before
    noisy = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    layers = [layer for layer in training.model.modules() if isinstance(layer, noisy)]
    assert not [layer for layer in layers if getattr(layer, "p", 1.0) > 0]


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_present_size_is_one_of_a_sweep_whose_sizes_are_a_factor_of_sqrt_2_apart(name):
    sizes = WORKLOADS[name].sizes()
    assert WORKLOADS[name].present in sizes
    assert 128 == sizes[-1] / sizes[0]
    assert 15 == len(sizes)


def test_workloads_differ_in_network_and_optimizer():
    for names, optimizers in ((FIRST, 5), (SECOND, 3)):
        chosen = [WORKLOADS[name] for name in names]
        trainings = [TargetTraining(one, one.rate, seed=100) for one in chosen]
        assert optimizers == len({type(one.optimizer) for one in trainings})
        assert 5 == len({str(one.model) for one in trainings})


def test_a_training_is_the_same_again_with_its_seed_and_another_with_another_one():
    def loss(seed):
        training = TargetTraining(TEACHER, 0.01, seed)
        training.step(8)
        return training.held_out_loss()

    assert loss(100) == loss(100)
    assert loss(100) != loss(101)


def test_a_training_changes_nothing_of_torchs_random_numbers():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    TargetTraining(EASY, 0.001, 100).to_target(8)
    assert expected == torch.rand(1)


def test_a_training_ends_at_its_target_which_is_a_mean_of_five_evaluations():
    result = TargetTraining(EASY, 0.001, 100).to_target(8)
    assert Result(0.001, 100, 5, "target") == result


def test_a_training_that_does_not_reach_its_target_ends_at_the_cap_or_at_the_limit():
    assert Result(0.001, 100, 30, "cap") == TargetTraining(IMPOSSIBLE, 0.001, 100).to_target(8)
    limited = TargetTraining(IMPOSSIBLE, 0.001, 100).to_target(8, limit=9)
    assert Result(0.001, 100, 9, "given up") == limited


def test_the_cap_is_one_of_steps_and_one_of_samples():
    workload = replace(TEACHER, max_steps=100, max_samples=1000)
    assert [100, 100, 10] == [workload.step_limit(size) for size in (1, 10, 100)]


def test_a_training_ends_when_its_loss_is_not_finite():
    assert "diverged" == TargetTraining(WORKLOADS["digits-mlp"], 1e20, 100).to_target(8).end


def steps_by_rate(best, trained):
    """Trainings whose steps grow with the distance of the rate from the best one."""

    def train(rate, seed, limit):
        steps = round(100 * (1 + abs(math.log2(rate / best)))) + seed
        trained.append((rate, seed))
        if limit is not None and steps > limit:
            return Result(rate, seed, limit, "given up")
        return Result(rate, seed, steps, "target")

    return train


@pytest.mark.parametrize("best", [0.25, 1.0, 2**1.5, 8.0])
def test_the_best_rate_is_found_also_beyond_the_first_grid(best):
    rate, trained = tuned(1.0, Plan(), steps_by_rate(best, []))
    assert best == pytest.approx(rate)
    rates = {one.rate for one in trained}
    assert min(rates) < rate < max(rates)


def test_a_rate_that_can_no_longer_be_the_best_is_given_up():
    seeds = []
    _, trained = tuned(1.0, Plan(rates=3, max_rates=3), steps_by_rate(1.0, seeds))
    total = sum(one.steps for one in trained if one.rate == 1.0)
    for rate in (2**-0.5, 2**0.5):
        worse = [one for one in trained if one.rate == pytest.approx(rate)]
        assert ["target", "given up"] == [one.end for one in worse]
        assert total == sum(one.steps for one in worse)


def test_without_a_rate_that_reaches_the_target_there_is_none():
    def fail(rate, seed, limit):
        return Result(rate, seed, 10, "cap")

    rate, trained = tuned(1.0, Plan(), fail)
    assert rate is None
    assert 11 == len(trained)  # one seed each, at both edges
    assert 1.0 == pytest.approx(math.prod(one.rate for one in trained))


def test_a_size_whose_every_rate_fails_has_no_fresh_trainings_and_an_infinite_cost():
    result = train_size(IMPOSSIBLE, 8, SHORT)
    assert (None, []) == (result.rate, result.fresh)
    assert math.inf == result.mean_steps


def test_a_size_is_trained_with_fresh_seeds_at_the_tuned_rate():
    result = train_size(EASY, 16, SHORT)
    assert EASY.rate / 2 == result.rate  # a quarter of the samples that the rate is for
    assert [Result(result.rate, 91, 5, "target")] == result.fresh
    assert 5 == result.mean_steps


def size_result(batch_size, *steps, end="target"):
    fresh = [Result(0.1, seed, count, end) for seed, count in enumerate(steps)]
    return SizeResult(batch_size, 0.1, [], fresh)


def workload_result(steps, seconds, advice):
    """Costs 1, 2, ... of sizes 8, 16, ..., by steps and seconds of a step."""
    sizes = {8 * 2**n: size_result(8 * 2**n, *some) for n, some in enumerate(steps)}
    times = {size: Times(wall, wall / 2) for size, wall in zip(sizes, seconds, strict=True)}
    advised = [Advised(20 + n, size, 50.0) for n, size in enumerate(advice)]
    return WorkloadResult("teacher", 8, list(sizes), sizes, advised, times)


EXAMPLE = workload_result([(100, 100), (50, 70), (40, 40), (38, 42)], [1.0, 1.0, 1.6, 4.0], [32])


def test_the_cost_is_the_mean_number_of_steps_times_the_seconds_of_a_step():
    assert {8: 100, 16: 60, 32: 64, 64: 160} == Verdict(EXAMPLE).costs
    assert {8: 50, 16: 30, 32: 32, 64: 80} == Verdict(EXAMPLE, "cpu").costs


def test_the_verdict_compares_the_advised_size_with_the_best_one():
    verdict = Verdict(EXAMPLE)
    assert 16 == verdict.best
    assert 64 / 60 == pytest.approx(verdict.regret(32))
    assert (16, 32) == verdict.bracket()
    assert verdict.passes
    row = verdict.row()
    assert "32 (32)" == row["advised"]
    assert "1.07 ± 0.18" == row["advised / best"]  # 10 of 60 steps is the standard error
    assert "1.67 ± 0.28" == row["present / best"]
    assert "passes on 1 of 1; 4 of 5 are required" == conclusion([verdict])


@pytest.mark.parametrize(("advice", "passes"), [([64], False), ([None], False), ([16], True)])
def test_advice_passes_within_15_percent_of_the_best(advice, passes):
    assert passes == Verdict(replace(EXAMPLE, advice=[Advised(20, advice[0], None)])).passes


def test_a_failed_training_makes_the_cost_of_its_size_infinite():
    failed = replace(EXAMPLE, sizes=EXAMPLE.sizes | {16: size_result(16, 50, 70, end="cap")})
    verdict = Verdict(failed)
    assert math.inf == verdict.costs[16]
    assert 32 == verdict.best
    assert "1 of 4" == verdict.row()["sizes that failed"]


def test_the_judged_advice_is_the_median_and_none_if_most_trainings_have_none():
    def advised(*sizes):
        return replace(EXAMPLE, advice=[Advised(n, size, 1.0) for n, size in enumerate(sizes)])

    assert 40 == advised(64, 8, 40).advised
    assert 8 == advised(64, None, 8).advised
    assert advised(64, None, None).advised is None


def test_a_sweep_whose_best_size_is_at_its_edge_is_widened_within_the_limit():
    result = workload_result([(100,), (40,), (16,)], [1.0] * 3, [])
    widen(result, Plan(max_sizes=4))
    assert [8, 16, 32] == result.sweep
    widen(result, Plan())
    assert [8, 16, 32, 45, 64] == result.sweep
    result = workload_result([(10,), (40,), (160,)], [1.0] * 3, [])
    widen(result, Plan())
    assert [4, 6, 8, 16, 32] == result.sweep


def test_a_sweep_whose_best_size_is_inside_stays_as_it_is():
    result = replace(EXAMPLE, sweep=list(EXAMPLE.sweep))
    widen(result, Plan())
    assert EXAMPLE.sweep == result.sweep


def test_results_are_read_as_they_were_written(tmp_path):
    path, plan = tmp_path / "advice.json", about(asdict(Plan()))
    write_results(path, plan, {"teacher": EXAMPLE})
    assert (plan, {"teacher": EXAMPLE}) == read_results(path)


def test_a_file_is_continued_with_its_plan_and_refused_with_another(tmp_path):
    path = tmp_path / "advice.json"
    write_results(path, about(asdict(SHORT)), {"teacher": EXAMPLE})
    _, results = begin(["clicks", "teacher"], SHORT, path)
    assert EXAMPLE == results["teacher"]
    assert {} == results["clicks"].sizes
    with pytest.raises(RunError, match="another plan; give another name"):
        begin(["teacher"], Plan(), path)


@pytest.mark.parametrize("content", ["", "[]", '{"format": "other"}', "{}"])
def test_a_file_of_another_program_is_refused(tmp_path, content):
    path = tmp_path / "advice.json"
    path.write_text(content)
    with pytest.raises(RunError, match="left as it is"):
        read_results(path)


def test_steps_of_every_size_are_timed_by_both_clocks():
    seconds = seconds_of_steps(TEACHER, [8, 64], rounds=2)
    assert [8, 64] == list(seconds)
    assert all(0 < one.cpu and 0 < one.wall for one in seconds.values())


def test_a_workload_that_is_not_there_is_refused():
    with pytest.raises(BadParameter, match="one of digits-mlp, digits-cnn"):
        commands.advice_(workloads="teacher,nonsense")


def test_a_table_is_shown_again_from_a_file(tmp_path, capsys):
    path = tmp_path / "advice.json"
    write_results(path, about(asdict(Plan())), {"teacher": EXAMPLE})
    commands.advice_(source=path)
    shown = capsys.readouterr().out
    assert 2 == shown.count("passes on 1 of 1")  # by either clock
    assert "1.07 ± 0.18" in shown


def test_a_workload_that_is_not_measured_to_its_end_is_not_judged():
    assert [] == list(verdicts(empty_results(["teacher"], Plan()).values()))


@pytest.mark.thorough
@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.release)])
def test_the_sweep_measures_everything_that_the_verdict_needs(jobs):
    if not hasattr(bigbatch, "advise"):
        pytest.skip("bigbatch.advise is not there yet")
    results = empty_results(["digits-mlp"], SHORT)
    lines = list(run(results, SHORT, jobs))
    assert "digits-mlp: 16" in lines
    assert 1 == len(list(verdicts(results.values())))
    assert [] == list(run(results, SHORT, jobs))  # nothing is missing
