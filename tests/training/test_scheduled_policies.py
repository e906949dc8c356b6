"""Seesaw and the late switch in the loop, against a loop that is written out by hand."""

import math
import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LinearLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.training.scheduler import BaseBatchScheduler

BASE, TICKS, SAMPLES = 8, 30, 8192


def warm_cosine(o):
    parts = [LinearLR(o, 0.1, total_iters=10), CosineAnnealingLR(o, TICKS - 10, eta_min=1e-4)]
    return SequentialLR(o, parts, [10])


SCHEDULES = {
    "StepLR": lambda o: StepLR(o, 6, gamma=0.5),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, TICKS, eta_min=1e-4),
    "warm-up, cosine": warm_cosine,
    "OneCycleLR": lambda o: OneCycleLR(o, [0.05, 0.02], total_steps=TICKS),
    "warm restarts": lambda o: CosineAnnealingWarmRestarts(o, 9, eta_min=1e-3),
}
LAST_TICK = {"CosineAnnealingLR": TICKS, "warm-up, cosine": TICKS, "OneCycleLR": TICKS - 1}
every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def parts(kind=SGD, tensors=False):
    torch.manual_seed(3)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    rates = [0.05, 0.02]
    if tensors:
        rates = [torch.tensor(rate, dtype=torch.float64) for rate in rates]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), rates, strict=True)]
    return model, kind(groups, **{"momentum": 0.9} if kind is SGD else {})


def samples():
    return torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss_of(model, x):
    return (model(x) - x.sum(1, keepdim=True).sin()).square().mean()


def by_hand(name, steps, first=BASE, most=math.inf):
    """Seesaw in a plain loop: (batch, rates) of each step, and the weights after the last."""
    model, optimizer = parts()
    optimizer.step()  # torch's schedulers want one before theirs
    scheduler, data, last_tick = (
        SCHEDULES[name](optimizer),
        samples(),
        LAST_TICK.get(name, math.inf),
    )
    batch, seen, ticks, rows = first, 0, 0, []
    peak = max(group["lr"] for group in optimizer.param_groups)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, data[seen : seen + batch]).backward()
        scheduled = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= math.sqrt(batch / BASE)
        rows.append((batch, tuple(group["lr"] for group in optimizer.param_groups)))
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, scheduled, strict=True):
            group["lr"] = rate
        seen += batch
        while ticks < min(seen // BASE, last_tick):
            scheduler.step()
            ticks += 1
            rate = max(group["lr"] for group in optimizer.param_groups)
            peak = max(peak, rate)
        batch = min(round(first / (rate / peak)), most)
    return rows, model.state_dict()


def adaptive(build, policy, *, kind=SGD, tensors=False, wrap=lambda model: model, **options):
    model, optimizer = parts(kind, tensors)
    loader = torch.utils.data.DataLoader(samples(), BASE)
    options = {"batch_size": BASE, "base_batch": BASE, "micro_batch": 2048, "every": 0} | options
    train = bb.AdaptiveBatch(wrap(model), optimizer, loader, policy=policy, **options)
    train.scheduler = None if build is None else build(optimizer)
    return train


def walk(train, steps):
    """(batch, rates) of each of so many steps."""
    rows = []
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # ends of schedules
        for step in train:
            for x in step:
                step.backward(loss_of(train.model, x))
            record = step.update()
            rows.append((record.batch_size, record.lr))
            if len(rows) == steps:
                break
    return rows


@every_schedule
@pytest.mark.parametrize(("first", "most"), [(BASE, 200), (24, 100)])
def test_batches_and_rates_are_those_of_a_loop_by_hand(name, first, most):
    steps = 12 if first == 24 else 22
    expected, weights = by_hand(name, steps, first, most)
    train = adaptive(SCHEDULES[name], bb.Seesaw(max_batch=most), batch_size=first)
    assert expected == walk(train, steps)
    assert max(batch for batch, _ in expected) > 1.5 * first  # it did grow
    for name, value in train.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-11, atol=0)  # sums in float64


def test_a_cut_by_x_is_one_by_the_square_root_until_the_cap_and_all_of_it_after():
    rows = walk(adaptive(lambda o: StepLR(o, 12, gamma=0.25), bb.Seesaw(max_batch=32)), 26)
    phases = dict.fromkeys((batch, rates[0]) for batch, rates in rows)
    rates = [rate / 0.05 for _, rate in phases]
    assert [8, 32, 32] == [batch for batch, _ in phases][:3]
    assert pytest.approx([1, 1 / 2, 1 / 8]) == rates[:3]


def test_the_noise_scale_caps_the_growth():
    policy = bb.Controller(bb.Seesaw(cap=bb.NoiseScale()), BASE, BASE, smoothing="1K samples")
    model, optimizer = parts()
    loader = torch.utils.data.DataLoader(samples(), BASE)
    train = bb.AdaptiveBatch(
        model, optimizer, loader, policy=policy, scheduler=StepLR(optimizer, 6, 0.5), every=1
    )
    reasons = []
    for step in train:
        for x in step:
            step.backward(loss_of(model, x))
        record = step.update()
        wanted = round(BASE / (optimizer.param_groups[0]["lr"] / 0.05))
        reasons.append(record.decision.reason)
        assert BASE <= record.decision.batch_size <= wanted
        if "capped" in reasons[-1] and record.decision.batch_size > BASE:
            scale = float(reasons[-1].split("noise scale ")[1])
            assert pytest.approx(scale, abs=1) == record.decision.batch_size
        if train.steps == 40:
            break
    assert any("capped" in reason for reason in reasons)


@every_schedule
@pytest.mark.parametrize("stop", [7, 14])
def test_a_resumed_run_continues_bit_for_bit(name, stop):
    build, policy = SCHEDULES[name], bb.Seesaw(max_batch=500)
    unbroken, first = adaptive(build, policy), adaptive(build, policy)
    expected = walk(unbroken, 20)
    rows = walk(first, stop)
    resumed = adaptive(build, policy)
    resumed.model.load_state_dict(first.model.state_dict())
    resumed.optimizer.load_state_dict(first.optimizer.state_dict())
    resumed.load_state_dict(first.state_dict())
    assert expected == rows + walk(resumed, 20 - stop)
    for a, b in zip(unbroken.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_rate_that_is_a_tensor_decides_as_a_number_does():
    build = SCHEDULES["warm-up, cosine"]
    numbers, tensors = (
        walk(adaptive(build, bb.Seesaw(max_batch=500), kind=AdamW, tensors=kind), 22)
        for kind in (False, True)
    )
    assert [batch for batch, _ in numbers] == [batch for batch, _ in tensors]
    assert max(batch for batch, _ in numbers) > 4 * BASE


def test_a_late_switch_waits_for_the_cut():
    rows = walk(adaptive(SCHEDULES["StepLR"], bb.LateSwitch(0.5, bb.Fixed(64))), 10)
    assert [8] * 6 + [64] * 4 == [batch for batch, _ in rows]


def on_ranks(rank, ranks):
    train = adaptive(
        SCHEDULES["StepLR"], bb.Seesaw(max_batch=64), wrap=DistributedDataParallel, micro_batch=64
    )
    return walk(train, 30)


@pytest.mark.early
def test_all_ranks_decide_the_same(ranks):
    train = adaptive(SCHEDULES["StepLR"], bb.Seesaw(max_batch=64))
    first, second = ranks(2)(on_ranks)
    assert first == second == walk(train, 30)


def test_a_tick_that_no_step_had_the_rate_of_counts_for_the_peak():
    _, optimizer = parts()
    clock = BaseBatchScheduler(BASE, optimizer)
    clock.follows_rates = True
    clock.scheduler = OneCycleLR(optimizer, [0.05, 0.02], total_steps=11, pct_start=0.5)
    optimizer.step()
    clock.advance(9 * BASE)  # the largest rate, at tick 4.5, is not at a whole one
    assert 0.07 < clock.lr_decay < 0.09


def test_another_scheduler_has_a_peak_of_its_own():
    _, optimizer = parts()
    clock = BaseBatchScheduler(BASE, optimizer)
    clock.follows_rates = True
    clock.scheduler = StepLR(optimizer, 1, 0.5)
    optimizer.step()
    clock.advance(BASE)
    assert 0.5 == clock.lr_decay
    clock.scheduler = None
    clock.scheduler = StepLR(optimizer, 1, 0.25)
    clock.advance(BASE)
    assert 0.25 == clock.lr_decay


def test_without_a_scheduler_it_is_said_once_and_a_rate_set_by_hand_is_followed():
    train = adaptive(None, bb.Seesaw())
    steps = iter(train)
    batches = []

    def one():
        step = next(steps)
        for x in step:
            step.backward(loss_of(train.model, x))
        batches.append(step.update().batch_size)

    with pytest.warns(UserWarning, match=r"Seesaw follows .* pass AdaptiveBatch\(scheduler="):
        one()
    for group in train.optimizer.param_groups:
        group["lr"] /= 4
    with pytest.warns(UserWarning, match="was changed"):  # of the loop, as ever
        one()
    one()
    assert [8, 8, 32] == batches


@pytest.mark.parametrize("lr_scaling", ["linear", "adascale", None, lambda *_: 1.0])
@pytest.mark.parametrize("policy", [bb.Seesaw(), bb.LateSwitch(0.5, bb.Seesaw())], ids=str)
def test_another_scaling_of_the_rate_is_refused(policy, lr_scaling):
    with pytest.raises(SettingError, match=r"lr_scaling=.* with .*pass lr_scaling='sqrt'"):
        adaptive(SCHEDULES["StepLR"], policy, lr_scaling=lr_scaling, every=4)
