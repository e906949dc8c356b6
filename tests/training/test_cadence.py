"""Which steps are measured, in the loop; a made-up clock says what each backward costs."""

import itertools
import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.optim import VRSGD
from bigbatch.statistics.averages import AdaptiveAverage
from clock import Clock
from loop_steps import trained
from numbered_samples import build, steps_of
from single_steps import by_single_steps
from tensors import through_a_file

torch.set_num_threads(1)
BACKWARD, SAMPLE = 1.0, 0.125  # seconds of a backward, and of each of its samples


@pytest.fixture
def clock(monkeypatch):
    made_up = Clock(BACKWARD, SAMPLE)
    monkeypatch.setattr(time, "perf_counter", made_up)
    return made_up


def samples(n):
    own = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=own, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (n,), generator=own))


def adaptive(
    clock, n=4096, *, policy=None, optimizer=torch.optim.SGD, meter=None, averages=False, **settings
):
    """A classifier on n samples, 64 a step.

    Args:
        clock: the made-up clock.
        n: samples.
        policy: the policy, or a controller; None for a batch of 64.
        optimizer: makes an optimizer of the parameters.
        meter: options of a meter of one's own.
        averages: whether a policy sees averages, as by default, or single steps.
        settings: other settings of AdaptiveBatch.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model.register_forward_pre_hook(clock.spend)
    settings["policy"] = bb.Fixed(64) if policy is None else policy
    if not averages:
        settings = by_single_steps(settings, 64)
    return bb.AdaptiveBatch(
        model,
        optimizer(model.parameters(), lr=0.1),
        DataLoader(samples(n), 64),
        meter=None if meter is None else bb.GradientMeter(model, **meter),
        **settings,
    )


def measured(records):
    return [record.step for record in records if record.statistics is not None]


def test_by_default_ever_fewer_steps_are_cut_and_measured(clock):
    train = adaptive(clock, 64 * 600)
    records = trained(train)
    n = {1: 64, 2: 128, 4: 256, 8: 512, 16: 600}  # for the steps before so many
    expected = [1 + t for t in range(600) if t % next(k for k, end in n.items() if t < end) == 0]
    assert expected == measured(records)
    assert [64, 96, 128, 160] == [sum(step <= t for step in expected) for t in (64, 128, 256, 512)]
    assert all(r.micro_batches == (1 if r.statistics is None else 4) for r in records)
    assert [1] * 63 + [2] * 64 + [4] * 128 + [8] * 256 + [16] * 89 == [r.every for r in records]
    assert 16 == train.every


@pytest.mark.parametrize("policy", [bb.SimiGrad(0.4), bb.NoiseScale(0.5, min_batch=8)])
def test_the_same_seed_gives_the_same_run_however_long_steps_take(clock, policy):
    runs = []
    for backward, sample in ((1.0, 0.125), (50.0, 0.0), (0.0, 0.0)):
        clock.backward, clock.sample = backward, sample
        runs.append(trained(adaptive(clock, policy=policy, averages=True), 200))
    found = [
        [(r.batch_size, r.loss, r.statistics, r.decision) for r in records] for records in runs
    ]
    assert found[0] == found[1] == found[2]
    assert len({record.batch_size for record in runs[0]}) > 5


def test_every_fixes_the_interval(clock):
    records = trained(adaptive(clock, every=5), 40)
    assert [*range(1, 41, 5)] == measured(records)
    assert {5} == {record.every for record in records}
    assert [*range(1, 41)] == measured(trained(adaptive(clock, every=1), 40))


def test_a_meter_with_options_measures_as_often(clock):
    bounds = {"min_batch": 48, "max_batch": 80}
    policy = bb.Controller(bb.SimiGrad(0.3), 64, smoothing=None, **bounds)
    train = adaptive(clock, policy=policy, meter={"confidence": 0.9, "per_layer": True})
    records = trained(train)
    assert 40 < len(measured(records)) == len(records)
    for record in records:
        if record.statistics is not None:
            assert 0.9 == record.statistics.interval.level
            assert ["0", "2"] == list(record.statistics.layers)


def test_the_log_says_why_a_step_was_not_measured(clock):
    records = trained(adaptive(clock, policy=bb.SimiGrad(0.3), every=3), 2)
    assert records[0].decision.reason.startswith("similarity")
    assert "not measured; one step in 3 is" == records[1].decision.reason


def test_a_step_that_is_not_measured_costs_what_a_plain_one_does(clock):
    train = adaptive(clock, every=0)
    records = trained(train)
    assert [] == measured(records)
    assert 9.0 * len(records) == clock.now
    # one hook shows backwards of the user's own; torch has no public way to count them
    assert 1 == sum(len(p._backward_hooks or ()) for p in train.model.parameters())
    assert train.every is None
    assert {"fixed"} == {record.decision.reason for record in records}


def test_weights_are_those_of_a_plain_loop_where_nothing_is_measured(clock):
    train, other = adaptive(clock, 640, every=0), adaptive(clock, 640, every=1)
    trained(train)
    trained(other)
    for one, two in zip(train.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=0)  # sums in another order


def test_a_variance_reduced_optimizer_is_cut_at_every_step_and_measured_at_some(clock):
    def vr_sgd(parameters, lr):
        return VRSGD(parameters, lr=lr)

    records = trained(adaptive(clock, optimizer=vr_sgd))
    assert {8} == {record.micro_batches for record in records}
    assert [64] == measured(records)[63:64]


# policies


@pytest.mark.parametrize("options", [{}, {"every": 7}, {"every": 0}, {"every": 1}])
@pytest.mark.parametrize("text", ["64, 96 from 5 steps", "32 to 128 over 12 steps in steps of 8"])
def test_a_schedule_acts_on_time_whether_steps_are_measured_or_not(clock, options, text):
    schedule = bb.Schedule(text)
    records = trained(adaptive(clock, policy=schedule, **options), 30)
    expected = [r.target_batch_size for r in trained(adaptive(clock, policy=schedule, every=1), 30)]
    assert expected == [record.target_batch_size for record in records]
    assert len(set(expected)) > 1
    assert all(r.decision.reason.startswith("schedule") for r in records)


class Ramp:
    """A policy of one's own that needs no statistics."""

    needs = bb.Needs(statistics=False)

    def __init__(self):
        self.seen = []

    def decide(self, statistics, now):
        self.seen.append(statistics)
        return bb.Decision(now.target_batch_size + 1, "ramp")


def test_a_policy_of_ones_own_may_declare_that_it_needs_none(clock):
    policy = Ramp()
    records = trained(adaptive(clock, policy=policy, batch_size=64, every=4), 9)
    assert [*range(64, 73)] == [record.target_batch_size for record in records]
    assert [r.statistics for r in records] == policy.seen
    assert [1, 5, 9] == measured(records)


def test_a_measuring_policy_without_averages_decides_at_measured_steps_only(clock):
    records = trained(adaptive(clock, policy=bb.SimiGrad(0.9, max_batch=4096), every=4), 13)
    assert [64] + [70] * 4 + [77] * 4 + [84] * 4 == [r.target_batch_size for r in records]


def test_with_averages_it_decides_at_every_step_once_four_are_measured(clock):
    policy = bb.SimiGrad(0.9, max_batch=4096)
    records = trained(adaptive(clock, policy=policy, every=8, averages=True), 30)
    assert [1, 9, 17, 25] == measured(records)
    assert [64] * 25 + [70, 77, 84, 92, 101] == [r.target_batch_size for r in records]
    reasons = [record.decision.reason for record in records]
    filling = ["held: the average fills", *["not measured; one step in 8 is"] * 7] * 3
    assert filling == reasons[:24]
    assert all(reason.startswith("similarity") for reason in reasons[24:])


def test_an_unmeasured_step_decides_by_the_average_at_its_own_size(clock):
    policy = bb.SimiGrad(0.9, max_batch=4096)
    records = trained(adaptive(clock, policy=policy, every=8, averages=True), 32)
    average = AdaptiveAverage()
    for record in records:
        if record.statistics is not None:
            average.update(record.statistics)
    for record in records[25:]:
        sized = bb.GradientStatistics(math.nan, math.nan, record.batch_size, 0)
        similarity = average.at(sized).similarity
        assert f"similarity {similarity:.3f} < 0.9" == record.decision.reason


def test_the_end_of_an_epoch_and_a_skipped_step_are_measured_again(clock):
    policy = bb.SimiGrad(0.9, max_batch=4096)
    train = adaptive(clock, 64 * 4 + 40, policy=policy, batch_size=64, every=3)
    records = trained(train) + trained(train)
    assert "the end of an epoch does not decide" == records[3].decision.reason
    assert [1, 4, 5, 7] == measured(records)[:4]
    train = adaptive(clock, policy=policy, every=5)
    with pytest.warns(UserWarning, match="not finite"):
        records = trained(train, 12, spoiled=[0])
    assert [2, 6, 11] == measured(records)  # the first was skipped
    assert records[0].skipped


# settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"meter": {"every": 3}}, r"every=1\), and AdaptiveBatch\(every=n"),
        ({"every": -1}, "every=-1 must be a whole number of at least 0"),
        (
            {"every": 0, "policy": bb.SimiGrad()},
            "policy=SimiGrad needs measured steps, and every=0 measures none; leave every= out",
        ),
        ({"every": 0, "policy": bb.Shadow(bb.SimiGrad()), "batch_size": 8}, "policy=Shadow"),
        ({"every": 0, "lr_scaling": "adascale"}, 'lr_scaling="adascale" needs measured steps'),
    ],
)
def test_settings_that_contradict_each_other_are_refused(clock, settings, message):
    with pytest.raises(SettingError, match=message):
        adaptive(clock, **settings)


def test_none_is_the_default(clock):
    assert [1, 2, 3] == measured(trained(adaptive(clock, every=None), 3))


# states


@pytest.mark.late
@pytest.mark.parametrize("cut", [1, 33, 64, 65, 66, 127, 129])  # where n changes, and elsewhere
@pytest.mark.parametrize(
    "options", [{}, {"every": 4}, {"every": 0}, {"averages": True}, {"every": 4, "averages": True}]
)
def test_a_killed_run_continues_with_the_same_steps(clock, cut, options):
    def start():
        policy = bb.Fixed(64) if options.get("every") == 0 else bb.SimiGrad(0.4, max_batch=500)
        return adaptive(clock, policy=policy, **options)

    def rest(train, steps):
        records = []
        while len(records) < steps:
            records += trained(train, steps - len(records))
        # elapsed: the two clocks began at other times
        return [replace(record, elapsed_seconds=0.0) for record in records]

    whole = rest(start(), 140)
    killed = start()
    head = rest(killed, cut)
    parts = killed.model, killed.optimizer, killed
    model, optimizer, state = through_a_file([part.state_dict() for part in parts])
    clock.now += 1000.0  # until it is started again
    resumed = start()
    resumed.model.load_state_dict(model)
    resumed.optimizer.load_state_dict(optimizer)
    resumed.load_state_dict(state)
    assert whole == head + rest(resumed, 140 - cut)


def test_a_failed_measurement_is_made_up_for_after_resuming_too(clock):
    train = adaptive(clock, 64 * 80)
    with pytest.warns(UserWarning, match="not finite"):  # n is 2 from step 65 on
        trained(train, 65, spoiled=[64])
    resumed = adaptive(clock, 64 * 80)
    resumed.load_state_dict(train.state_dict())
    assert [66, 67, 69] == measured(trained(resumed, 5))


def test_a_resumed_run_names_another_interval(clock):
    train = adaptive(clock)
    trained(train, 20)
    state = train.state_dict()
    other = adaptive(clock, every=5)
    with pytest.warns(UserWarning, match=r"every was None, is 5: the new one is used"):
        other.load_state_dict(state)
    assert 21 in measured(trained(other, 1))


# ranks


def with_averages(rank, ranks):
    """Records of a loop that decides at every step by averages."""
    policy = bb.Controller(bb.SimiGrad(0.5, min_batch=32, max_batch=300), 64)
    train = build(rank, ranks, "ddp", 2, policy=policy, batch_size=None, every=4)
    records = [record for _, record in steps_of(train, 10**9, 40)]
    found = [(record.target_batch_size, record.decision, record.similarity) for record in records]
    return found, repr(train.controller.facts())


def test_ranks_decide_alike_by_averages_at_steps_that_are_not_measured(ranks):
    answers = ranks(2)(with_averages)
    (found, digest), (other, other_digest) = answers
    assert repr(found) == repr(other)  # nan where a step was not measured
    assert digest == other_digest
    sizes = [size for size, *_ in found]
    assert sum(a != b for a, b in itertools.pairwise(sizes[14:])) > 15


def on_ranks(rank, ranks, engine):
    """Records of a loop whose ranks are unequally fast, and its state."""
    clock = Clock(BACKWARD + 3.0 * rank, SAMPLE)
    time.perf_counter = clock  # in this process, which ends with the test
    policy = bb.SimiGrad(0.3, max_batch=200)
    more = {"micro_batch": 64, "min_micro_batches": 4 * ranks, "every": None}
    train = build(rank, ranks, engine, None, policy=policy, **more)
    train.model.register_forward_pre_hook(clock.spend)
    records = [replace(record, elapsed_seconds=0.0) for _, record in steps_of(train, 10**9, 80)]
    return records, train.state_dict()["shared"]


@pytest.mark.early
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_ranks_measure_the_same_steps_however_fast_each_is(ranks, engine):
    one, two = ranks(2)(on_ranks, engine)
    assert repr(one) == repr(two)
    records, _ = one
    assert [*range(1, 65)] == measured(records)[:64]
    assert 64 + 8 <= len(measured(records)) < 80
    assert len({record.target_batch_size for record in records}) > 1
