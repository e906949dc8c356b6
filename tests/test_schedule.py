"""Schedulers that count base batches of samples: the ticks, the fractions, the end."""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import bigbatch as bb
from bigbatch.act.progress import BaseBatchClock
from bigbatch.errors import SettingError
from bigbatch.optim import VRSGD

torch.set_num_threads(1)


def optimizer(lr: float = 1.0) -> Optimizer:
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)


def clock_of(scheduler: LRScheduler, base_batch: int = 10) -> BaseBatchClock:
    scheduler.optimizer.step()  # torch's schedulers warn where none came before them
    clock = BaseBatchClock(base_batch, scheduler.optimizer)
    clock.scheduler = scheduler
    return clock


def rate(scheduler: LRScheduler) -> float:
    return float(scheduler.optimizer.param_groups[0]["lr"])


# ticks


@settings(deadline=None, derandomize=True, max_examples=100)
@given(base=st.integers(1, 50), steps=st.lists(st.integers(1, 200), max_size=20))
def test_a_scheduler_ticks_once_for_every_base_batch_consumed(base, steps):
    scheduler = ExponentialLR(optimizer(), 0.9)
    clock = clock_of(scheduler, base)
    for number, samples in enumerate(steps, 1):
        clock.advance(samples)
        assert sum(steps[:number]) // base == scheduler.last_epoch


def test_the_schedule_is_that_of_the_base_batch_size():
    plain = StepLR(optimizer(), step_size=2, gamma=0.5)
    ours = clock_of(StepLR(optimizer(), step_size=2, gamma=0.5), base_batch=10)
    for samples in (25, 25, 10, 40):
        for _ in range(samples // 5):
            ours.advance(5)
    plain.optimizer.step()
    for _ in range(10):
        plain.step()
    assert rate(plain) == rate(ours.scheduler)


def test_half_a_base_batch_is_remembered_by_the_state():
    first = clock_of(StepLR(optimizer(), 1, 0.5))
    first.advance(15)
    second = clock_of(StepLR(optimizer(), 1, 0.5))
    second.load_state_dict(first.state_dict())
    second.advance(4)
    assert 1 == second.scheduler.last_epoch
    second.advance(1)
    assert 2 == second.scheduler.last_epoch


def test_a_clock_without_a_scheduler_runs_all_the_same():
    clock = BaseBatchClock(10, optimizer())
    clock.advance(95)
    assert clock.scheduler is None


# the end


def test_one_cycle_stays_at_its_end_and_says_so_once():
    scheduler = OneCycleLR(optimizer(), max_lr=0.4, total_steps=8)
    clock = clock_of(scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clock.advance(70)
    lowest = 0.4 / 25 / 1e4  # torch's div_factor and final_div_factor
    assert pytest.approx(lowest, rel=1e-9) == rate(scheduler)
    with pytest.warns(UserWarning, match=r"OneCycleLR reached its end.*base_steps") as said:
        clock.advance(300)
    assert 1 == len(said)
    assert pytest.approx(lowest, rel=1e-9) == rate(scheduler)


def test_cosine_annealing_stays_at_its_lowest_rate():
    scheduler = CosineAnnealingLR(optimizer(), T_max=8, eta_min=0.1)
    clock = clock_of(scheduler)
    clock.advance(40)
    assert pytest.approx((1.0 + 0.1) / 2, rel=1e-9) == rate(scheduler)
    clock.advance(40)
    assert pytest.approx(0.1, rel=1e-9) == rate(scheduler)
    with pytest.warns(UserWarning, match="CosineAnnealingLR reached its end"):
        clock.advance(80)
    assert pytest.approx(0.1, rel=1e-9) == rate(scheduler)


def test_warm_up_and_then_cosine_annealing_stays_at_its_lowest_rate():
    own = optimizer()
    parts = [LinearLR(own, 0.1, total_iters=2), CosineAnnealingLR(own, T_max=6, eta_min=0.1)]
    scheduler = SequentialLR(own, parts, milestones=[2])
    clock = clock_of(scheduler)
    clock.advance(80)
    assert pytest.approx(0.1, rel=1e-9) == rate(scheduler)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        clock.advance(30)
    assert pytest.approx(0.1, rel=1e-9) == rate(scheduler)
    assert 1 == len(said)


def test_a_schedule_that_never_ends_goes_on_in_silence():
    scheduler = ExponentialLR(optimizer(), 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clock_of(scheduler).advance(500)
    assert pytest.approx(0.5**50, rel=1e-9) == rate(scheduler)


# what is refused


def test_a_plateau_scheduler_is_refused_by_name():
    own = optimizer()
    clock = BaseBatchClock(10, own)
    with pytest.raises(SettingError, match=r"ReduceLROnPlateau.*scheduler=None"):
        clock.scheduler = ReduceLROnPlateau(own)


def test_a_scheduler_of_another_optimizer_is_refused():
    with pytest.raises(SettingError, match="another optimizer"):
        BaseBatchClock(10, optimizer()).scheduler = StepLR(optimizer(), 1)


def test_what_is_no_scheduler_is_refused_with_its_value():
    with pytest.raises(SettingError, match=r"scheduler=0\.5"):
        BaseBatchClock(10, optimizer()).scheduler = 0.5


# in the loop


def adaptive(
    samples: int = 64, *, lr: float = 0.1, optimizer_of: Any = SGD, loader: Any = None, **more: Any
) -> bb.AdaptiveBatch:
    torch.manual_seed(5)
    model = torch.nn.Linear(3, 1)
    data = torch.randn(samples, 3)
    loader = torch.utils.data.DataLoader(data, 16) if loader is None else loader
    own = optimizer_of(model.parameters(), lr=lr)
    return bb.AdaptiveBatch(model, own, loader, **{"policy": bb.SimiGrad(0.99), **more})


def records(train: bb.AdaptiveBatch, epochs: int) -> Iterator[bb.StepRecord]:
    """Trains for so many epochs more."""
    for _ in range(epochs):
        for step in train:
            for x in step:
                step.backward(train.model(x).square().mean())
            yield step.update()


def test_the_rate_of_a_step_is_the_schedule_over_the_data_times_the_square_root():
    train = adaptive(base_batch=8)
    train.scheduler = LambdaLR(train.optimizer, lambda tick: 1 / (1 + tick))
    before = largest = 0
    for record in records(train, 3):
        expected = 0.1 / (1 + before // 8) * math.sqrt(record.batch_size / 8)
        assert pytest.approx(expected, rel=1e-12) == record.lr[0]
        before, largest = record.samples, max(largest, record.batch_size)
    assert 16 < largest  # the batch did grow


@pytest.mark.parametrize(("samples", "base"), [(64, 16), (60, 16), (64, 24)])
def test_one_cycle_of_base_steps_ends_with_the_training(samples, base):
    train = adaptive(samples, base_batch=base)
    total = train.base_steps(3)
    assert math.ceil(3 * samples / base) == total
    train.scheduler = OneCycleLR(train.optimizer, 0.4, total_steps=total)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a run of the stated length has nothing to be told
        list(records(train, 3))
    assert total - 1 == train.scheduler.last_epoch
    lowest = 0.4 / 25 / 1e4  # torch's div_factor and final_div_factor
    assert pytest.approx(lowest, rel=1e-9) == rate(train.scheduler)


def test_one_cycle_holds_in_the_epochs_after_its_end_and_says_so_once():
    train = adaptive(base_batch=16)
    train.scheduler = OneCycleLR(train.optimizer, 0.4, total_steps=train.base_steps(2))
    with pytest.warns(UserWarning, match="OneCycleLR reached its end") as said:
        list(records(train, 4))
    assert 1 == len(said)
    assert pytest.approx(0.4 / 25 / 1e4, rel=1e-9) == rate(train.scheduler)


def test_base_steps_without_a_known_length_are_refused():
    train = adaptive(loader=[torch.randn(8, 3)], batch_size=8, micro_batch=8)
    with pytest.raises(SettingError, match="no known length"):
        train.base_steps(3)


def test_a_plateau_scheduler_is_refused_at_construction_too():
    own = optimizer()
    with pytest.raises(SettingError, match="ReduceLROnPlateau"):
        adaptive(optimizer_of=lambda *_, **__: own, scheduler=ReduceLROnPlateau(own))


def test_a_scheduler_of_another_optimizer_is_refused_by_the_loop_too():
    train = adaptive()
    with pytest.raises(SettingError, match="another optimizer"):
        train.scheduler = StepLR(optimizer(), 1)


def test_a_scheduler_of_a_variance_reduced_optimizer_is_taken():
    train = adaptive(128, optimizer_of=VRSGD, base_batch=16)
    train.scheduler = StepLR(train.optimizer, 1, gamma=0.5)
    list(records(train, 1))
    assert pytest.approx(0.1 * 0.5**8, rel=1e-12) == rate(train.scheduler)
