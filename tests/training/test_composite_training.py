"""AdaptiveBatch with several optimizers: rates, schedules, skipped steps, resumption, refusals."""

import copy
import json
import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adafactor, AdamW, Muon
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau

import bigbatch as bb
from bigbatch.errors import LoopError, SettingError, StateError
from bigbatch.optim import VarianceReduced
from optimizer_container import Container
from tensors import same

STEPS, SIZE = 29, 8


def decay(tick):
    return 1 / (1 + tick / 7)


def data():
    draw = torch.Generator("cpu").manual_seed(5)
    x = torch.randn(STEPS, SIZE, 4, generator=draw, device="cpu")
    y = torch.arange(STEPS * SIZE, device="cpu").view(STEPS, SIZE) % 3
    device = torch.get_default_device()
    return [(a.to(device), b.to(device)) for a, b in zip(x, y, strict=True)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def parts(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return Muon(matrices, lr=0.05), AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.01)


def composite(model):
    return bb.Composite(*parts(model))


def training(make=composite, schedule=None, **options):
    model = network()
    optimizer = make(model)
    settings = {"policy": bb.Fixed(SIZE), "micro_batch": SIZE, "every": 0, **options}
    scheduler = None if schedule is None else schedule(optimizer)
    return bb.AdaptiveBatch(model, optimizer, data(), scheduler=scheduler, **settings)


def trained(train, steps=STEPS, spoiled=()):
    records = []
    for number, step in enumerate(train):
        for x, y in step:
            loss = cross_entropy(train.model(x), y)
            step.backward(loss * math.inf if number in spoiled else loss)
        records.append(step.update())
        if len(records) == steps:
            break
    return records


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def by_hand(factor=1.0, schedules=(decay, decay), steps=STEPS):
    """The rates of each step, and the weights, of two optimizers that are stepped one by one."""
    model = network()
    both = parts(model)
    lambdas = [LambdaLR(each, f) for each, f in zip(both, schedules, strict=True)]
    rates = []
    for x, y in data()[:steps]:
        cross_entropy(model(x), y).backward()
        groups = [group for each in both for group in each.param_groups]
        scheduled = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] *= factor
        rates.append(tuple(group["lr"] for group in groups))
        for each in both:
            each.step()
            each.zero_grad()
        for group, lr in zip(groups, scheduled, strict=True):
            group["lr"] = lr
        for each in lambdas:
            each.step()
    return rates, weights(model)


# schedules


@pytest.mark.parametrize("base", [SIZE, 2 * SIZE])
def test_29_updates_of_a_schedule_are_those_of_both_by_hand(tmp_path, base):
    train = training(schedule=lambda o: LambdaLR(o, decay), base_batch=base, log=tmp_path / "run")
    train.scheduler_batch = SIZE
    records = trained(train)
    rates, expected = by_hand(math.sqrt(SIZE / base))
    assert rates == [record.lr for record in records]
    assert same(expected, weights(train.model))
    train.run_log.flush()
    (file,) = (tmp_path / "run").glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rates == [tuple(row["lr"]) for row in rows if "lr" in row]
    assert "Composite of Muon and AdamW" in file.read_text() + "".join(
        other.read_text() for other in (tmp_path / "run").glob("*.json")
    )


def of_each(optimizer, schedules=(decay, lambda tick: 0.5**tick)):
    return [LambdaLR(o, f) for o, f in zip(optimizer.optimizers, schedules, strict=True)]


class SchedulersContainer:
    """As torchtitan's LRSchedulersContainer: a list of LambdaLR, which is no LRScheduler."""

    def __init__(self, schedulers):
        self.schedulers = schedulers


@pytest.mark.parametrize(
    "schedule",
    [
        of_each,
        lambda o: SchedulersContainer(of_each(o)),
        lambda o: [lambda tick: 0.05 * decay(tick), lambda tick: 0.01 * 0.5**tick],
    ],
)
def test_each_optimizer_may_have_a_schedule_of_its_own(schedule):
    train = training(schedule=schedule)
    rates, expected = by_hand(schedules=(decay, lambda tick: 0.5**tick))
    assert [*map(pytest.approx, rates)] == [record.lr for record in trained(train)]
    torch.testing.assert_close(expected, weights(train.model), rtol=1e-3, atol=1e-4)


def ending(optimizer):
    first, second = optimizer.optimizers
    return [CosineAnnealingLR(first, 5), CosineAnnealingLR(second, 9)]


def test_each_schedule_stays_at_its_own_end():
    train = training(schedule=ending)
    with pytest.warns(UserWarning, match="CosineAnnealingLR reached its end and stays there"):
        records = trained(train)
    assert [5, 9] == [each.last_epoch for each in train.scheduler]
    assert all(record.lr == pytest.approx((0, 0), abs=1e-12) for record in records[9:])
    assert records[6].lr[1] > 1e-3


@pytest.mark.parametrize("schedule", [of_each, lambda o: LambdaLR(o, decay)])
def test_a_training_resumes_exactly_with_its_schedules(schedule):
    train = training(schedule=schedule)
    trained(train, 10)
    saved = copy.deepcopy((train.optimizer.state_dict(), train.state_dict()))
    kept = weights(train.model)
    expected = [record.lr for record in trained(train)]
    other = training(schedule=schedule)
    for p, value in zip(other.model.parameters(), kept, strict=True):
        p.data.copy_(value)
    other.optimizer.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert expected == [record.lr for record in trained(other)]
    assert same(weights(train.model), weights(other.model))
    with pytest.raises(StateError, match="the saved scheduler is a LambdaLR"):
        training(schedule=ending).load_state_dict(saved[1])


def test_a_schedule_that_somebody_else_advances_is_an_error():
    train = training(schedule=of_each)
    trained(train, 2)
    train.scheduler[1].step()
    with pytest.raises(LoopError, match="left at tick 2 and is at 3"):
        trained(train, 1)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda o: LambdaLR(o.optimizers[0], decay), "over one part of it; pass one over the Com"),
        (lambda o: of_each(o)[:1], "has 1 schedulers, and the optimizers are Muon and AdamW"),
        (lambda o: of_each(o)[::-1], "scheduler 0, for Muon: the scheduler belongs to another"),
        (lambda o: [*map(ReduceLROnPlateau, o.optimizers)], "scheduler 0, for Muon: ReduceLROnP"),
        (ReduceLROnPlateau, "ReduceLROnPlateau needs a metric"),
        (lambda o: ["cosine", "cosine"], "'cosine' is not a torch LRScheduler"),
        (lambda o: "cosine", "'cosine' is not a torch LRScheduler"),
    ],
)
def test_a_schedule_of_something_else_is_refused(schedule, message):
    with pytest.raises(SettingError, match=message):
        training(schedule=schedule)


# containers of other packages


def container(model):
    return Container([*parts(model)], [*model.parameters()])


def test_a_container_trains_by_the_rates_of_its_optimizers():
    seen = []
    train = training(
        lambda model: seen.append(container(model)) or seen[0],
        lambda o: SchedulersContainer(of_each(o, (decay, decay))),
    )
    seen[0].register_step_post_hook(lambda *_: seen.append("stepped"))
    rates, expected = by_hand()
    assert rates == [record.lr for record in trained(train)]
    assert same(expected, weights(train.model))
    assert ["stepped"] * STEPS == seen[1:]


def test_a_schedule_over_a_containers_own_groups_is_refused():
    with pytest.raises(SettingError, match="belongs to another optimizer"):
        training(container, lambda o: LambdaLR(o, decay))


class InBackward(Container):
    """As torchtitan's OptimizersInBackwardContainer: hooks of the parameters step."""

    def __init__(self, model):
        each = {p: SGD([p], lr=0.1) for p in model.parameters()}
        super().__init__([*each.values()], [*each])
        for p, optimizer in each.items():
            p.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())

    def step(self):
        """Does nothing."""


def test_a_container_that_steps_in_the_backward_is_an_error():
    with pytest.raises(LoopError, match=r"optimizer\.step\(\) was called inside a step"):
        trained(training(InBackward), 1)


# steps that are skipped


def fused(model):
    first, last = model[0].parameters(), model[2].parameters()
    return bb.Composite(
        SGD(first, lr=0.1, momentum=0.9, fused=True), AdamW(last, lr=0.01, fused=True)
    )


def half_fused(model):
    first, last = model[0].parameters(), model[2].parameters()
    return bb.Composite(SGD(first, lr=0.1, momentum=0.9), AdamW(last, lr=0.01, fused=True))


@pytest.mark.parametrize("make", [fused, half_fused, composite, container])
@pytest.mark.parametrize("first", [0, 3])
def test_a_step_that_is_not_finite_changes_no_part(make, first):
    train, kept = training(make), []
    spoiled = (first, first + 1)
    for number, step in enumerate(train):
        for x, y in step:
            loss = cross_entropy(train.model(x), y)
            step.backward(loss * math.inf if number in spoiled else loss)
        before = weights(train.model)
        step.update()
        kept.append(same(before, weights(train.model)))
        if number == 6:
            break
    assert [number in spoiled for number in range(7)] == kept
    assert (5, 2) == (train.steps, train.skipped)
    assert all(p.isfinite().all() for p in train.model.parameters())


@pytest.mark.parametrize(
    ("make", "skips"), [(fused, True), (half_fused, False), (composite, False), (container, False)]
)
def test_only_fused_parts_alone_skip_on_the_device(make, skips):
    train = training(make)
    trained(train, 2)
    assert skips == train._parts.skips_on_device
    assert not any(hasattr(part, "found_inf") for part in train._parts.stepping)


@pytest.mark.cpu
@pytest.mark.parametrize("make", [composite, fused, container])
def test_a_scaler_steps_all_of_them(make):
    plain, scaled = training(make), training(make, scaler=GradScaler("cpu", init_scale=1024.0))
    trained(plain, 6)
    for step in scaled:
        for x, y in step:
            step.backward(cross_entropy(scaled.model(x), y))
        step.clip_grad_norm_(1e9)
        step.update()
        if scaled.steps == 6:
            break
    torch.testing.assert_close(weights(plain.model), weights(scaled.model), rtol=1e-2, atol=1e-3)
    before = weights(scaled.model)
    assert trained(scaled, 1, spoiled=(0,))[0].skipped
    assert same(before, weights(scaled.model))
    assert 512.0 == scaled.scaler.get_scale()


@pytest.mark.cpu
def test_a_scaler_that_is_not_enabled_changes_nothing():
    train = training(schedule=lambda o: LambdaLR(o, decay), scaler=GradScaler("cpu", enabled=False))
    trained(train, 5)
    assert same(by_hand(steps=5)[1], weights(train.model))


@pytest.mark.cpu
@pytest.mark.parametrize("make", [composite, container])
def test_a_part_that_was_unscaled_by_itself_is_an_error(make):
    scaler, seen = GradScaler("cpu", init_scale=1024.0), []
    train = training(lambda model: seen.append(make(model)) or seen[0], scaler=scaler)

    def step_after(unscaled):
        step = next(iter(train))
        for x, y in step:
            step.backward(cross_entropy(train.model(x), y))
        scaler.unscale_(unscaled)
        return step.update()

    assert not step_after(train.optimizer).skipped
    (given,) = seen
    with pytest.raises(LoopError, match=r"call scaler\.unscale_\(train\.optimizer\)"):
        step_after(given.optimizers[1] if make is composite else given)


# trials


def test_a_trial_leaves_all_of_them_as_they_were():
    model = network()
    optimizer = composite(model)
    for x, y in data()[:3]:
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    groups = [*optimizer.param_groups]
    before = copy.deepcopy((weights(model), optimizer.state_dict()))
    largest = bb.largest_micro_batch(
        model, optimizer, data(), lambda batch: cross_entropy(model(batch[0]), batch[1]), most=16
    )
    assert 16 == largest
    assert same(before[0], weights(model))
    assert repr(before[1]) == repr(optimizer.state_dict())
    assert all(map(lambda one, other: one is other, groups, optimizer.param_groups))


def test_a_branch_test_trains_branches_of_all_of_them():
    train = training(every=None, min_micro_batches=2, policy=bb.Fixed(4))
    trained(train, 2)
    before = copy.deepcopy((weights(train.model), train.optimizer.state_dict()))
    result = train.branch_test(
        lambda batch: cross_entropy(train.model(batch[0]), batch[1]),
        [1, 2],
        samples=40,
        repeats=2,
        held_aside=8,
    )
    assert (1, 2) == result.batch_sizes
    assert same(before[0], weights(train.model))
    assert repr(before[1]) == repr(train.optimizer.state_dict())


# what a loop refuses, and what it warns of


def test_one_part_stepped_inside_a_step_is_an_error():
    train = training()
    for step in train:
        for x, y in step:
            step.backward(cross_entropy(train.model(x), y))
        train.optimizer.optimizers[0].step()
        with pytest.raises(LoopError, match=r"optimizer\.step\(\) was called inside a step"):
            step.update()
        break


def test_rates_set_by_hand_between_updates_warn_once_and_are_used():
    train = training()
    seen = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in train:
            for x, y in step:
                step.backward(cross_entropy(train.model(x), y))
            seen.append(step.update().lr)
            train.optimizer.optimizers[1].param_groups[0]["lr"] *= 0.5
            if train.steps == 3:
                break
    assert [(0.05, 0.01), (0.05, 0.005), (0.05, 0.0025)] == seen
    changed = [w for w in caught if "parameter group 1 was changed from 0.01" in str(w.message)]
    assert len(changed) == 1


def test_transport_needs_betas_in_all_of_them():
    with pytest.raises(SettingError, match="parameter group 0 of Composite has no betas"):
        training(transport=True)


def test_a_part_without_a_rate_is_logged_without_one():
    def make(model):
        first, last = model[0].parameters(), model[2].parameters()
        return bb.Composite(Adafactor(first), RateFree(last))

    class RateFree(SGD):
        """One that makes its own step sizes."""

        def __init__(self, parameters):
            super().__init__(parameters, lr=0.1)
            self.defaults["lr"] = self.param_groups[0]["lr"] = None

        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.data.sub_(0.1 * p.grad)

    train = training(make, lr_scaling=None)
    (record,) = trained(train, 1)
    assert 0.01 == record.lr[0]
    assert math.isnan(record.lr[1])
    train.optimizer.param_groups[0]["lr"] = None
    with pytest.raises(SettingError, match="learning rate of parameter group 0 was set to None"):
        trained(train, 1)


def reduced(model, gamma):
    return VarianceReduced(composite(model), gamma=gamma)


@pytest.mark.filterwarnings("ignore:k = :UserWarning")
def test_a_variance_reduced_composite_shares_the_measurement():
    """With r = 1 everywhere it is the composite; with r it moves less."""
    options = {"policy": bb.Fixed(4 * SIZE), "micro_batch": SIZE, "every": 1}
    ends = {gamma: training(partial(reduced, gamma=gamma), **options) for gamma in (0.1, 1.0)}
    plain = training(**options)
    for train in (*ends.values(), plain):
        assert all(record.statistics is not None for record in trained(train, 5))
    torch.testing.assert_close(weights(plain.model), weights(ends[1.0].model), rtol=1e-2, atol=1e-3)
    assert not torch.allclose(plain.model[2].bias, ends[0.1].model[2].bias, rtol=0.02)
