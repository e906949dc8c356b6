"""Goodput in the loop: a made-up clock says what each backward costs."""

import itertools
import re
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.errors import SettingError
from clock import Clock
from loop_steps import trained as trained_in_passes
from numbered_samples import build, steps_of

torch.set_num_threads(1)
BACKWARD, SAMPLE = 128.0, 0.5  # seconds: an overhead of 256 samples
KNOWN = re.compile(r"sqrt\(256 x noise scale (\d+)\)")

trained = partial(trained_in_passes, passes=100)


@pytest.fixture
def clock(monkeypatch):
    made_up = Clock(BACKWARD, SAMPLE)
    monkeypatch.setattr(time, "perf_counter", made_up)
    return made_up


def adaptive(clock, policy, **settings):
    """A linear classifier of noisy labels, 64 a step."""
    own = torch.Generator().manual_seed(1)
    x = torch.randn(8192, 4, generator=own, dtype=torch.float64)
    y = (
        (x @ torch.ones(4, dtype=torch.float64) > 0) ^ (torch.rand(8192, generator=own) < 0.2)
    ).long()
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    model.register_forward_pre_hook(clock.spend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    settings = {"micro_batch": 4096} | settings
    return bb.AdaptiveBatch(
        model, optimizer, DataLoader(TensorDataset(x, y), 64), policy=policy, **settings
    )


def test_it_tries_two_sizes_then_knows_the_overhead_of_a_step_of_one_backward(clock):
    records = trained(adaptive(clock, bb.Goodput()), 180)
    reasons = [record.decision.reason for record in records]
    first = next(n for n, reason in enumerate(reasons) if reason.startswith("sqrt"))
    tried = {record.batch_size for record in records[:first]}
    assert tried >= {64, 128}
    assert any("the time of a step of 128 is needed, that of 64 is known" in r for r in reasons)
    assert all(record.decision.trial for record in records if "is needed" in record.decision.reason)
    assert "is needed" not in " ".join(reasons[first:])  # where ever fewer steps are measured
    assert sum(KNOWN.match(reason) is not None for reason in reasons[first:]) > 20
    free = [(KNOWN.fullmatch(record.decision.reason), record.decision) for record in records]
    sizes = [(int(match[1]), decision.batch_size) for match, decision in free if match]
    assert len(sizes) > 3
    for scale, size in sizes:  # the reason has whole samples
        assert size == pytest.approx((256 * scale) ** 0.5, rel=0.01, abs=0.5)


def test_the_batch_never_moves_by_more_than_a_tenth_or_beyond_twice_the_timed_sizes(clock):
    records = trained(adaptive(clock, bb.Goodput()), 150)
    largest = 64
    for one, other in itertools.pairwise(records):
        largest = max(largest, one.batch_size)
        assert other.target_batch_size <= max(
            1.1 * one.target_batch_size, one.target_batch_size + 1
        )
        assert other.target_batch_size <= 2.2 * largest


def test_where_every_step_is_measured_their_backwards_are_its_overhead(clock):
    records = trained(adaptive(clock, bb.Goodput(), every=1), 60)
    assert "sqrt(1024 x noise scale" in records[-1].decision.reason  # four backwards


def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(clock):
    whole, first = adaptive(clock, bb.Goodput()), adaptive(clock, bb.Goodput())
    expected = trained(whole, 70)
    trained(first, 33)
    state, weights = first.state_dict(), first.model.state_dict()
    second = adaptive(clock, bb.Goodput())
    second.model.load_state_dict(weights)
    second.load_state_dict(state)
    actual = trained(second, 37)
    assert [r.decision for r in expected[33:]] == [r.decision for r in actual]
    assert [r.loss for r in expected[33:]] == [r.loss for r in actual]


def test_a_given_overhead_makes_the_decisions_of_any_machine(clock):
    slow = Clock(3.0, 7.0)
    policy = bb.Goodput(overhead=256)
    decisions = [r.decision for r in trained(adaptive(clock, policy, every=2), 60)]
    fast = adaptive(clock, policy, every=2)
    clock.backward, clock.sample = slow.backward, slow.sample
    assert decisions == [r.decision for r in trained(fast, 60)]
    assert any(decision.batch_size > 100 for decision in decisions)


def test_a_shadow_advises_only_with_a_given_overhead(clock):
    records = trained(adaptive(clock, bb.Shadow(bb.Goodput())), 40)
    assert {64} == {record.batch_size for record in records}
    assert {None} == {record.decision.advice for record in records}
    assert "no advice: the time of a step of 128 is needed" in records[-1].decision.reason
    advised = trained(adaptive(clock, bb.Shadow(bb.Goodput(overhead=256))), 20)
    assert {64} == {record.batch_size for record in advised}
    assert max(record.decision.advice or 0 for record in advised) > 64


def test_it_needs_measured_steps(clock):
    with pytest.raises(SettingError, match="policy=Goodput needs measured steps"):
        adaptive(clock, bb.Goodput(), every=0)


def on_ranks(rank, ranks):
    """Decisions of a rank whose backwards take longer the higher its number is."""
    clock = Clock(128.0 + 64.0 * rank, 0.5)
    time.perf_counter = clock  # in this process, which ends with the test
    controller = bb.Controller(bb.Goodput(min_batch=32, max_batch=400), 64)
    train = build(
        rank, ranks, "ddp", 2, policy=controller, batch_size=None, every=2, micro_batch=200
    )
    train.model.module.register_forward_pre_hook(clock.spend)
    return [record.decision for _, record in steps_of(train, 10**9, 60)]


def test_ranks_decide_alike_by_the_mean_of_their_times(ranks):
    one, other = ranks(2)(on_ranks)
    assert one == other
    assert any(decision.reason.startswith("sqrt(") for decision in one)
