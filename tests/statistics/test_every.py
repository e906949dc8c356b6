"""Measuring only each so-manieth step, by hand and inside a loop."""

import copy
import io
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from bigbatch import AdaptiveBatch, Decision, Fixed, GradientMeter, SimiGrad
from bigbatch.errors import GradientError, SettingError
from bigbatch.optim import VRSGD
from loop_steps import trained as timed
from oracles import noise as oracle

torch.set_num_threads(1)  # small tensors: a second thread only waits
SIZES = [3, 9, 1, 6]
ALL = {
    "confidence": 0.9,
    "per_layer": True,
    "half_batch_cosine": True,
}  # everything that can be asked for


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def samples(n, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (n,), generator=generator))


def data():
    x, y = samples(sum(SIZES)).tensors
    return list(zip(x.split(SIZES), y.split(SIZES), strict=True))


def accumulate(model):
    for x, y in data():
        (cross_entropy(model(x), y) * len(y) / sum(SIZES)).backward()


def expected_of(model):
    model = copy.deepcopy(model)
    rows = []
    for x, y in data():
        parts = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
        rows.append(torch.cat([part.flatten() for part in parts]))
    return oracle.weighted(torch.stack(rows), SIZES)


def same(expected, actual):
    seen = (actual.grad_sqnorm, actual.grad_variance, actual.similarity, actual.noise_scale)
    return pytest.approx(tuple(expected), rel=1e-9) == seen  # float64 sums in another order


def hooks_on(model):
    return sum(len(p._backward_hooks or ()) for p in model.parameters())  # torch has no public way


# by hand


@pytest.mark.parametrize("every", [1, 2, 3, 7])
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_the_first_step_and_each_so_manieth_after_it_are_measured(every, options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with GradientMeter(model, every=every, **options) as meter:
        for step in range(9):
            expected, due = expected_of(model), step % every == 0
            assert due == meter.due
            accumulate(model)
            noise = meter.read(SIZES)
            assert due == (noise is not None)
            assert noise is None or same(expected, noise)
            optimizer.step()
            optimizer.zero_grad()


def test_no_hook_is_on_where_nothing_is_measured():
    model = network()
    with GradientMeter(model, every=3, **ALL) as meter:
        seen = []
        for _ in range(7):
            before = hooks_on(model)
            accumulate(model)
            seen.append((before, hooks_on(model)))
            meter.read(SIZES)
            model.zero_grad()
    assert [(4, 4), (0, 0), (0, 0)] * 2 + [(4, 4)] == seen
    assert 0 == hooks_on(model)


def test_what_is_done_to_gradients_between_is_nobodys_business():
    model = network()
    with GradientMeter(model, every=2) as meter:
        accumulate(model)
        meter.read(SIZES)
        accumulate(model)  # on a dirty gradient
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        accumulate(model)
        assert meter.read(SIZES) is None
        model.zero_grad()
        expected = expected_of(model)
        accumulate(model)
        assert same(expected, meter.read(SIZES))


def test_a_dirty_gradient_from_a_step_between_is_refused_where_it_is_measured():
    model = network()
    meter = GradientMeter(model, every=2)
    for _ in range(2):
        model.zero_grad()
        accumulate(model)
        meter.read(SIZES)
    with pytest.raises(GradientError, match="not empty"):
        accumulate(model)


@pytest.mark.parametrize("zero", [True, False])
def test_marked_micro_batches_may_be_marked_between_too(zero):
    model = network()
    with GradientMeter(model, every=3, **ALL) as meter:
        for step in range(7):
            expected = expected_of(model)
            for x, y in data():
                with meter.micro_batch():
                    (cross_entropy(model(x), y) * len(y) / sum(SIZES)).backward()
            noise = meter.read(SIZES)
            assert (step % 3 == 0) == (noise is not None)
            assert noise is None or same(expected, noise)
            model.zero_grad(set_to_none=zero)


def test_parameters_that_are_added_between_have_a_hook_where_it_is_measured_only():
    model, extra = network(), nn.Linear(2, 2)
    with GradientMeter(model, every=2) as meter:
        accumulate(model)
        meter.read(SIZES)
        meter.select([*meter.source.parameters, *extra.parameters()])
        assert (0, 0) == (hooks_on(model), hooks_on(extra))
        meter.read(SIZES)
        assert (4, 2) == (hooks_on(model), hooks_on(extra))


@pytest.mark.parametrize("every", [1, 2])
def test_a_closed_meter_puts_no_hook_back(every):
    model = network()
    with GradientMeter(model, every=every) as meter:
        accumulate(model)
    assert same(expected_of(model), meter.read(SIZES))
    meter.select([*meter.source.parameters, *nn.Linear(2, 2).parameters()])
    if every > 1:
        meter.read(SIZES)
    assert 0 == hooks_on(model)


def test_a_step_can_be_named():
    model = network()
    with GradientMeter(model, every=4) as meter:
        due = []
        for number in (0, 3, 4, 9, 12):
            meter.at_step(number)
            due.append((meter.due, hooks_on(model)))
    assert [(True, 4), (False, 0), (True, 4), (False, 0), (True, 4)] == due


@pytest.mark.parametrize("every", [0, -3, 1.5])
def test_each_so_manieth_is_a_whole_number_of_at_least_one(every):
    with pytest.raises(SettingError, match="every"):
        GradientMeter(network(), every=every)


# inside a loop


class Counting:
    """A policy that grows by two a step and keeps what it was asked."""

    def __init__(self):
        self.asked = []

    def decide(self, noise, now):
        self.asked.append((now.steps, noise))
        return Decision(now.target_batch_size + 2, "grows", lr_factor=0.5)


def adaptive(*, every=3, policy=None, optimizer=torch.optim.SGD, n=400, options=ALL, **settings):
    model = network()
    own = optimizer(model.parameters(), lr=0.1)
    loader = DataLoader(samples(n), 8, shuffle=True)
    meter = GradientMeter(model, **options)
    policy = SimiGrad(target=0.3) if policy is None else policy
    return AdaptiveBatch(model, own, loader, policy=policy, meter=meter, **settings, every=every)


def trained(train, *arguments, **options):
    """The records of the steps, without times."""
    records = timed(train, *arguments, **options)
    return [replace(record, elapsed_seconds=0.0) for record in records]


def test_a_loop_measures_and_decides_on_each_so_manieth_step():
    policy = Counting()
    records = trained(adaptive(policy=policy, batch_size=8), 10)
    assert [1, 4, 7, 10] == [r.step for r in records if r.statistics is not None]
    assert [1, 4, 7, 10] == [steps for steps, _ in policy.asked]
    assert [r.statistics for r in records if r.statistics] == [noise for _, noise in policy.asked]
    assert ["grows", *["not measured; one step in 3 is"] * 2] == [
        r.decision.reason for r in records[:3]
    ]
    assert [8, 10, 10, 10, 12, 12, 12, 14, 14, 14] == [r.target_batch_size for r in records]
    factors = [r.decision.lr_factor for r in records]
    assert [0.5] * 10 == factors  # the factor too stays between
    assert math.isnan(records[1].similarity)
    assert math.isnan(records[1].noise_scale)


def test_a_step_that_nobody_measures_may_be_one_backward():
    records = trained(adaptive(policy=Fixed(8), min_micro_batches=4), 7)
    assert [4, 1, 1, 4, 1, 1, 4] == [r.micro_batches for r in records]
    assert [8] * 7 == [r.batch_size for r in records]


def test_a_variance_reduced_optimizer_needs_its_micro_batches_at_every_step():
    def vr_sgd(parameters, lr):
        return VRSGD(parameters, lr=lr)

    records = trained(adaptive(policy=Fixed(16), optimizer=vr_sgd), 6)
    assert all(r.micro_batches >= 8 for r in records)
    assert [1, 4] == [r.step for r in records if r.statistics is not None]


def test_a_variance_reduced_optimizer_takes_the_same_steps_however_rarely_noise_is_measured():
    def vr_sgd(parameters, lr):
        return VRSGD(parameters, lr=lr)

    runs = [adaptive(every=every, policy=Fixed(16), optimizer=vr_sgd) for every in (1, 3)]
    weights = []
    for train in runs:
        torch.manual_seed(5)
        trained(train, 7)
        weights.append([p.detach() for p in train.model.parameters()])
    assert all(map(torch.equal, *weights))


def test_measuring_rarely_changes_no_weight_but_by_rounding_and_no_measurement():
    records, weights = [], []
    for every in (1, 3):
        torch.manual_seed(5)
        train = adaptive(every=every, policy=Fixed(16))
        records.append(trained(train, 10))
        weights.append([p.detach() for p in train.model.parameters()])
    for often, rarely in zip(records[0][::3], records[1][::3], strict=True):
        # one backward of 16 or four of 4 between: float64 sums in another order
        assert (
            pytest.approx(often.statistics.grad_sqnorm, rel=1e-9) == rarely.statistics.grad_sqnorm
        )
        assert (
            pytest.approx(often.statistics.grad_variance, rel=1e-9)
            == rarely.statistics.grad_variance
        )
    for often, rarely in zip(*weights, strict=True):
        torch.testing.assert_close(often, rarely)
    assert [r.loss for r in records[0]] == pytest.approx([r.loss for r in records[1]])


@pytest.mark.parametrize("bad", [0, 1, 3])  # measured, not measured, measured
def test_a_gradient_that_is_not_finite_skips_the_step_whether_it_is_measured_or_not(bad):
    train = adaptive(policy=Fixed(16))
    if bad:
        trained(train, bad)
    before = [p.detach().clone() for p in train.model.parameters()]
    if bad % 3 == 0:
        with pytest.warns(UserWarning, match="micro-batch 1 "):
            (record,) = trained(train, 1, spoiled=[bad])
    else:
        (record,) = trained(train, 1, spoiled=[bad])
    assert (True, None) == (record.skipped, record.statistics)
    assert "not finite" in record.decision.reason
    assert all(map(torch.equal, before, train.model.parameters()))
    after = trained(train, 6)
    assert not any(r.skipped for r in after)
    # a measured step that is skipped is followed by another one
    expected = {0: [2, 4, 7], 1: [4, 7], 3: [5, 7, 10]}[bad]
    assert expected == [r.step for r in after if r.statistics]


def test_edits_of_the_gradient_between_two_micro_batches_are_refused_where_nothing_is_measured():
    train = adaptive(policy=Fixed(16), micro_batch=4)
    trained(train, 1)

    def spoiled():
        for step in train:
            for number, (x, y) in enumerate(step):
                step.backward(cross_entropy(train.model(x), y))
                if number == 1:
                    nn.utils.clip_grad_norm_(train.model.parameters(), 1e-3)

    with pytest.raises(GradientError, match="changed between"):
        spoiled()


@pytest.mark.parametrize("measured", [True, False])
def test_a_backward_of_ones_own_after_the_last_micro_batch_is_refused(measured):
    train = adaptive(policy=Fixed(16))
    trained(train, 3 if measured else 1)
    step = next(iter(train))
    for x, y in step:
        step.backward(cross_entropy(train.model(x), y))
    cross_entropy(train.model(x), y).backward()
    with pytest.raises(GradientError):
        step.update()


@pytest.mark.parametrize("scaling", ["sqrt", "adascale", None])
def test_every_rule_for_the_learning_rate_works_where_nothing_is_measured(scaling):
    records = trained(adaptive(policy=Counting(), batch_size=8, lr_scaling=scaling), 7)
    assert all(0 < r.lr[0] < 0.2 for r in records)


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_killed_run_continues_with_the_same_steps(cut):
    def start():
        torch.manual_seed(5)
        return adaptive(batch_size=12, n=120)

    def rest(train, epochs=2):
        return [record for _ in train.epochs(epochs) for record in trained(train)]

    unbroken = rest(start())
    broken = start()
    head = trained(broken, cut)
    file = io.BytesIO()
    states = {part: getattr(broken, part).state_dict() for part in ("model", "optimizer")}
    torch.save({**states, "train": broken.state_dict()}, file)
    file.seek(0)
    torch.manual_seed(99)
    resumed, state = adaptive(batch_size=12, n=120), torch.load(file, weights_only=True)
    resumed.model.load_state_dict(state["model"])
    resumed.optimizer.load_state_dict(state["optimizer"])
    resumed.load_state_dict(state["train"])
    assert unbroken == [*head, *rest(resumed)]
    assert len(unbroken) > 12
    assert {True, False} == {record.statistics is None for record in unbroken[cut:]}
