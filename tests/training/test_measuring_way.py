"""groups="auto": both ways of measuring are timed, and the faster is taken."""

import time

import pytest
import torch
from torch import nn
from torch.nn import functional

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.optim import VRSGD
from bigbatch.training.measuring_way import MeasuringWay
from clock import Clock

B = 16


def timed(way, seconds, steps, batch_size=B, must_cut=True):
    """The ways of so many steps, by groups or not, which take these seconds."""
    ways = []
    for _ in range(steps):
        by_groups = way.takes_groups(batch_size, must_cut=must_cut)
        ways.append(by_groups)
        way.end_step(batch_size, by_groups=by_groups, counts=True)
        way.add_seconds(seconds[by_groups])
    return ways


@pytest.mark.parametrize("groups_are_faster", [True, False])
def test_both_ways_are_timed_and_the_faster_is_taken(groups_are_faster):
    way = MeasuringWay("auto")
    ways = timed(way, {groups_are_faster: 1.0, not groups_are_faster: 2.0}, 20)
    assert 6 == ways[:12].count(True) == ways[:12].count(False)
    assert {groups_are_faster} == set(ways[12:])
    named = "groups are" if groups_are_faster else "micro-batches are"
    assert way.describe(B).startswith(named)


def test_a_slow_first_step_of_each_way_does_not_count():
    way = MeasuringWay("auto")
    timed(way, {True: 100.0, False: 1.0}, 1)
    assert {True} == set(timed(way, {True: 1.0, False: 2.0}, 20)[11:])


def test_each_size_is_timed_and_steps_with_enough_micro_batches_are_not():
    way = MeasuringWay("auto")
    timed(way, {True: 1.0, False: 2.0}, 12)
    assert way.takes_groups(B + 1, must_cut=True)
    assert {True, False} == set(timed(way, {True: 2.0, False: 1.0}, 12, batch_size=2 * B))
    assert not way.takes_groups(2 * B, must_cut=True)
    assert not way.takes_groups(B, must_cut=False)


def test_a_state_at_any_point_goes_the_same_way():
    for done in range(14):
        way, loaded = MeasuringWay("auto"), MeasuringWay("auto")
        timed(way, {True: 1.0, False: 2.0}, done)
        loaded.load_state_dict(way.state_dict())
        seconds = {True: 3.0, False: 1.0}
        assert timed(way, seconds, 14) == timed(loaded, seconds, 14)
        assert way.state_dict() == loaded.state_dict()


def test_without_auto_nothing_is_timed():
    assert {True} == set(timed(MeasuringWay(8), {True: 9.0, False: 1.0}, 20))
    assert {False} == set(timed(MeasuringWay(None), {True: 1.0, False: 9.0}, 20))
    assert not MeasuringWay(8).describe(B)


def training(model, optimizer=torch.optim.SGD, **options):
    data = [(torch.randn(B, 6), torch.randint(3, (B,))) for _ in range(16)]
    optimizer = optimizer(model.parameters(), lr=0.1)
    options = {"groups": "auto", "every": 1, "micro_batch": B} | options
    return bb.AdaptiveBatch(model, optimizer, data, policy=bb.Fixed(B), **options)


def records(train, **backward):
    found = []
    for step in train:
        for x, y in step:
            step.backward(functional.cross_entropy(train.model(x), y), **backward)
        found.append(step.update())
    return found


@pytest.mark.parametrize("seconds_of_a_backward", [1.0, -1.0])
def test_a_loop_measures_both_ways_and_then_the_faster(monkeypatch, seconds_of_a_backward):
    """Four small backwards are slower than one, or faster, as if they fitted in a cache."""
    clock, model = Clock(seconds_of_a_backward, sample=1.0), nn.Linear(6, 3)
    monkeypatch.setattr(time, "perf_counter", clock)
    model.register_forward_pre_hook(clock.spend)
    done = records(training(model))
    backwards = [record.micro_batches for record in done]
    assert [1] * 6 + [4] * 6 == sorted(backwards[:12])
    # the time of a step is known after the next one, so the 13th is of either way
    assert {1 if seconds_of_a_backward > 0 else 4} == set(backwards[13:])
    assert [8 if k == 1 else 4 for k in backwards] == [r.statistics.micro_batches for r in done]
    assert {"measuring by micro-batches and by groups is timed"} == {r.way for r in done[:12]}
    assert all("faster way" in r.way for r in done[12:])


@pytest.mark.parametrize("weight", [None, 5.0])
def test_what_has_no_groups_is_cut_and_the_log_says_why(weight):
    norm = nn.BatchNorm1d(6) if weight is None else nn.Identity()
    done = records(training(nn.Sequential(norm, nn.Linear(6, 3))), weight=weight)
    assert done[0].statistics is None
    assert all(record.statistics.micro_batches == 4 for record in done[1:])
    assert ("BatchNorm" if weight is None else "weight of each sample") in done[1].way


def test_sums_of_groups_that_do_not_add_up_are_cut_and_the_log_says_why():
    model = nn.Linear(6, 3)
    model.weight.register_hook(lambda gradient: 0.5 * gradient)
    done = records(training(model))
    assert done[0].statistics is None
    assert all(record.statistics.micro_batches == 4 for record in done[1:])
    assert "do not add up" in done[1].way


def test_optimizers_that_read_every_step_choose_themselves():
    with pytest.raises(SettingError, match=r"pass groups=8, or leave groups out"):
        training(nn.Linear(6, 3), VRSGD)
