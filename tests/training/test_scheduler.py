"""Schedulers that count base batches of samples: every one of torch's, its curve, its end."""

import io
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

import bigbatch as bb
from bigbatch.errors import LoopError, SettingError, StateError
from bigbatch.optim import VRSGD
from bigbatch.training.scheduler import BaseBatchScheduler
from property_tests import property_test

torch.set_num_threads(1)
BASE, END = 8, 24  # samples of a base batch; base batches until the schedules below end


def warm_cosine(o: Optimizer) -> SequentialLR:
    parts = [LinearLR(o, 0.1, total_iters=4), CosineAnnealingLR(o, END - 4, eta_min=1e-3)]
    return SequentialLR(o, parts, [4])


def chained_cosine(o: Optimizer) -> ChainedScheduler:
    return ChainedScheduler([LinearLR(o, 0.1, total_iters=4), CosineAnnealingLR(o, END)])


def cosine(tick: int, *, num_training_steps: int) -> float:
    """As transformers' get_cosine_schedule_with_warmup, which rises again after its end."""
    return 0.5 + 0.5 * math.cos(math.pi * tick / num_training_steps)


Schedule = Callable[[Optimizer], LRScheduler]
GOES_ON: dict[str, Schedule] = {
    "LambdaLR": lambda o: LambdaLR(o, lambda tick: 1 / (1 + tick)),
    "MultiplicativeLR": lambda o: MultiplicativeLR(o, lambda tick: 1 - 1 / (9 + tick)),
    "StepLR": lambda o: StepLR(o, 5, gamma=0.5),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.9),
    "CyclicLR": lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=5, mode="triangular2"),
    "CosineAnnealingWarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, 5, T_mult=2),
    "a sequence without end": lambda o: SequentialLR(
        o, [CosineAnnealingLR(o, 4), ExponentialLR(o, 0.9)], [9]
    ),
}
STAYS_BY_ITSELF: dict[str, Schedule] = {
    "MultiStepLR": lambda o: MultiStepLR(o, [3, 9, 20]),
    "ConstantLR": lambda o: ConstantLR(o, total_iters=END),
    "LinearLR": lambda o: LinearLR(o, 1.0, 0.05, total_iters=END),
    "SWALR": lambda o: SWALR(o, 0.01, anneal_epochs=END),
}
IS_HELD: dict[str, Schedule] = {
    "OneCycleLR": lambda o: OneCycleLR(o, [0.4, 0.2], total_steps=END),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, END, eta_min=1e-3),
    "PolynomialLR": lambda o: PolynomialLR(o, END, power=2),
    "Hugging Face's": lambda o: LambdaLR(o, partial(cosine, num_training_steps=END)),
    "SequentialLR": warm_cosine,
    "ChainedScheduler": chained_cosine,
    "a sequence of one": lambda o: SequentialLR(o, [CosineAnnealingLR(o, END)], []),
    "a chain of sequences": lambda o: ChainedScheduler([warm_cosine(o), ExponentialLR(o, 0.99)]),
    "a chain of chains": lambda o: ChainedScheduler([ExponentialLR(o, 0.99), chained_cosine(o)]),
}
SCHEDULES = {**GOES_ON, **STAYS_BY_ITSELF, **IS_HELD}
every_schedule = pytest.mark.parametrize("build", SCHEDULES.values(), ids=SCHEDULES)
may_end = pytest.mark.filterwarnings("ignore:.*reached its end")


def optimizer(lr: float | Tensor = 0.1, lr_2: float | Tensor = 0.02) -> Optimizer:
    groups = [
        {"params": [torch.torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (lr, lr_2)
    ]
    return SGD(groups, momentum=0.9)


def clock_of(scheduler: LRScheduler, base_batch: int = BASE) -> BaseBatchScheduler:
    scheduler.optimizer.step()  # torch's schedulers warn where none came before them
    clock = BaseBatchScheduler(base_batch, scheduler.optimizer)
    clock.scheduler = scheduler
    return clock


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def torchs_own(build: Schedule, ticks: int) -> list[list[float]]:
    """The rates of a plain loop that steps the scheduler after every step."""
    opt = optimizer()
    scheduler, curve = build(opt), [rates(opt)]
    for _ in range(ticks):
        opt.step()
        scheduler.step()
        curve.append(rates(opt))
    return curve


def test_every_scheduler_of_torch_is_classified_here():
    known = {getattr(lr_scheduler, name) for name in lr_scheduler.__all__} | {SWALR}
    built = {type(build(optimizer())) for build in SCHEDULES.values()}
    assert known - {LRScheduler, ReduceLROnPlateau} == built


# a function of the iteration number: a schedule by hand


def by_hand(tick: int) -> float:
    return 0.3 / (1 + tick)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=torch.float64)])
def test_a_function_gives_the_rate_of_every_group_at_each_tick(lr):
    opt = optimizer(lr)
    clock = BaseBatchScheduler(BASE, opt)
    clock.scheduler = by_hand
    for samples in range(0, 40 * BASE, 3 * BASE):
        assert [by_hand(samples // BASE)] * 2 == rates(opt)
        opt.step()
        clock.advance(3 * BASE)
    assert lr is opt.param_groups[0]["lr"] or not isinstance(lr, Tensor)
    again = BaseBatchScheduler(BASE, optimizer())
    again.scheduler = by_hand
    again.load_state_dict(clock.state_dict())
    assert clock.scheduler.last_epoch == again.scheduler.last_epoch
    assert rates(opt) == rates(again.scheduler.optimizer)


@pytest.mark.parametrize("rate", [None, math.nan, math.inf, -0.1, "0.1", torch.tensor(0.1)])
def test_a_function_that_gives_no_rate_is_refused(rate):
    clock = BaseBatchScheduler(BASE, optimizer())
    with pytest.raises(SettingError, match=r"what scheduler= gives for 0=.* must be a number"):
        clock.scheduler = lambda _: rate


def test_the_rate_and_the_base_step_of_a_loop_follow_the_samples_of_its_batches():
    train = adaptive(scheduler=by_hand, base_batch=BASE, lr_scaling=None)
    base_steps = []
    for record in records(train, 2):
        base_steps.append((record.samples - record.batch_size) // BASE)
        assert (by_hand(base_steps[-1]),) == record.lr
        assert record.samples // BASE == train.base_step
    assert any(later - step not in (0, 1) for step, later in itertools.pairwise(base_steps))


def test_a_table_of_rates_ends_with_the_last_step_and_a_longer_training_is_warned_of():
    table = [0.1 / (1 + tick) for tick in range(8)]
    opt = optimizer()
    clock = BaseBatchScheduler(BASE, opt)
    clock.scheduler = table.__getitem__
    with warnings.catch_warnings(action="error"):
        for _ in range(4):
            opt.step()
            clock.advance(2 * BASE)
    assert [table[-1]] * 2 == rates(opt)
    with pytest.warns(UserWarning, match="no rate from 8 on; the last one stays"):
        clock.advance(2 * BASE)
    assert [table[-1]] * 2 == rates(opt)


# ticks


@property_test(100)
@given(base=st.integers(1, 50), steps=st.lists(st.integers(1, 200), max_size=20))
def test_a_scheduler_ticks_once_for_every_base_batch_consumed(base, steps):
    scheduler = ExponentialLR(optimizer(), 0.9)
    clock = clock_of(scheduler, base)
    for number, samples in enumerate(steps, 1):
        clock.advance(samples)
        assert sum(steps[:number]) // base == scheduler.last_epoch


@every_schedule
def test_up_to_its_end_a_schedule_is_torchs_own(build):
    scheduler = build(optimizer())
    clock, curve = clock_of(scheduler), [rates(scheduler.optimizer)]
    for _ in range(END - 1):
        clock.advance(BASE)
        curve.append(rates(scheduler.optimizer))
    assert torchs_own(build, END - 1) == curve


def test_half_a_base_batch_is_remembered_by_the_state():
    first, second = (clock_of(StepLR(optimizer(), 1, 0.5)) for _ in range(2))
    first.advance(BASE + BASE // 2)
    second.load_state_dict(first.state_dict())
    second.advance(BASE // 2 - 1)
    assert 1 == second.scheduler.last_epoch
    second.advance(1)
    assert 2 == second.scheduler.last_epoch


def test_a_clock_without_a_scheduler_counts_for_one_that_is_set_later():
    opt = optimizer()
    clock = BaseBatchScheduler(10, opt)
    clock.advance(95)
    assert clock.scheduler is None
    clock.scheduler = StepLR(opt, 1)
    opt.step()
    clock.advance(4)
    assert 0 == clock.scheduler.last_epoch
    clock.advance(1)
    assert 1 == clock.scheduler.last_epoch


# the end


@pytest.mark.parametrize("build", IS_HELD.values(), ids=IS_HELD)
def test_a_schedule_that_would_leave_its_end_is_held_there_and_it_is_said_once(build):
    scheduler = build(optimizer())
    clock = clock_of(scheduler)
    with warnings.catch_warnings(action="error"):
        clock.advance(END * BASE)
    end = rates(scheduler.optimizer)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(2 * END):
            clock.advance(BASE)
            assert end == rates(scheduler.optimizer)
    assert 1 == len(caught)
    message = str(caught[0].message)
    assert f"{type(scheduler).__name__} reached its end and stays there, at lr={end}" in message
    assert "train.base_steps(epochs)" in message


def test_what_is_held_is_the_lowest_rate():
    # OneCycleLR's is max_lr / div_factor / final_div_factor; the last is chained with 0.99^24
    lowest = {"OneCycleLR": 0.4 / 25 / 1e4, "CosineAnnealingLR": 1e-3, "SequentialLR": 1e-3}
    for name, rate in {**lowest, "ChainedScheduler": 0.0, "a chain of chains": 0.0}.items():
        scheduler = IS_HELD[name](optimizer())
        clock_of(scheduler).advance(END * BASE)
        assert pytest.approx(rate, rel=1e-9, abs=1e-15) == rates(scheduler.optimizer)[0]


@pytest.mark.parametrize("build", STAYS_BY_ITSELF.values(), ids=STAYS_BY_ITSELF)
def test_a_schedule_that_stays_at_its_end_by_itself_does_so_in_silence(build):
    scheduler = build(optimizer())
    clock = clock_of(scheduler)
    clock.advance(END * BASE)
    end = rates(scheduler.optimizer)
    with warnings.catch_warnings(action="error"):
        clock.advance(2 * END * BASE)
    assert end == rates(scheduler.optimizer) == torchs_own(build, 3 * END)[-1]


@pytest.mark.parametrize("build", GOES_ON.values(), ids=GOES_ON)
def test_a_schedule_without_an_end_continues_in_silence(build):
    scheduler = build(optimizer())
    with warnings.catch_warnings(action="error"):
        clock_of(scheduler).advance(3 * END * BASE)
    assert torchs_own(build, 3 * END)[-1] == rates(scheduler.optimizer)


def test_the_end_of_the_next_scheduler_is_said_too():
    opt = optimizer()
    clock = BaseBatchScheduler(1, opt)
    for _ in range(2):
        clock.scheduler = CosineAnnealingLR(opt, 4)
        opt.step()
        with pytest.warns(UserWarning, match="reached its end"):
            clock.advance(6)


# what is refused


def test_a_plateau_scheduler_is_refused_by_name():
    opt = optimizer()
    clock = BaseBatchScheduler(10, opt)
    with pytest.raises(SettingError, match=r"ReduceLROnPlateau.*scheduler=None"):
        clock.scheduler = ReduceLROnPlateau(opt)


class AcceleratedScheduler:
    """As accelerate's own, which this library does without: no LRScheduler, it has one."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """As accelerate's own under DeepSpeed."""


@pytest.mark.parametrize("wrapper", [AcceleratedScheduler, DeepSpeedSchedulerWrapper])
def test_a_scheduler_that_accelerate_prepared_is_refused_and_the_one_inside_taken(wrapper):
    opt = optimizer()
    prepared, clock = wrapper(StepLR(opt, 1)), BaseBatchScheduler(10, opt)
    with pytest.raises(SettingError, match=r"accelerate.*each process.*scheduler\.scheduler"):
        clock.scheduler = prepared
    clock.scheduler = prepared.scheduler
    assert clock.scheduler is prepared.scheduler


def test_a_scheduler_of_another_optimizer_is_refused():
    with pytest.raises(SettingError, match="another optimizer"):
        BaseBatchScheduler(10, optimizer()).scheduler = StepLR(optimizer(), 1)


def test_what_is_no_scheduler_is_refused_with_its_value():
    with pytest.raises(SettingError, match=r"scheduler=0\.5"):
        BaseBatchScheduler(10, optimizer()).scheduler = 0.5


@pytest.mark.parametrize("build", [GOES_ON["StepLR"], chained_cosine, warm_cosine])
def test_a_scheduler_that_somebody_else_advances_too_is_an_error(build):
    scheduler = build(optimizer())
    clock = clock_of(scheduler)
    scheduler.step()  # before the first step: a head start
    clock.advance(BASE)
    scheduler.step()
    with pytest.raises(LoopError, match=r"left at tick 2 and is at 3.*leave scheduler\.step\(\)"):
        clock.require_ready()


def test_a_state_with_a_scheduler_is_refused_where_none_is_set():
    first, second = clock_of(StepLR(optimizer(), 1)), BaseBatchScheduler(BASE, optimizer())
    with pytest.raises(StateError, match=r"StepLR.*train\.scheduler"):
        second.load_state_dict(first.state_dict())


def test_a_scheduler_of_another_class_than_the_saved_one_is_refused():
    first, second = (clock_of(build(optimizer())) for build in (chained_cosine, warm_cosine))
    with pytest.raises(StateError, match="a ChainedScheduler, not a SequentialLR"):
        second.load_state_dict(first.state_dict())
    scheduler, second.scheduler = second.scheduler, None
    second.scheduler = scheduler
    second.advance(BASE)
    assert 1 == scheduler.last_epoch


# in the loop


class Walk:
    """A policy of one's own that walks through a list of batch sizes, over and over."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def decide(self, noise: bb.GradientStatistics, now: bb.TrainingState) -> bb.Decision:
        return bb.Decision(self.sizes[now.steps % len(self.sizes)], f"the {now.steps}. size")


def adaptive(
    samples: int = 64,
    *sizes: int,
    optimizer_of: Callable[..., Any] = SGD,
    loader: Any = None,
    **more: Any,
) -> bb.AdaptiveBatch:
    torch.manual_seed(5)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    data = torch.randn(samples, 3, dtype=torch.float64)
    loader = torch.utils.data.DataLoader(data, 4) if loader is None else loader
    opt = optimizer_of(model.parameters(), lr=0.1)
    policy = Walk(*sizes or (BASE, 24, 40, 12))
    return bb.AdaptiveBatch(
        model,
        opt,
        loader,
        **{"policy": policy, "batch_size": BASE, "micro_batch": 8, **more},
        every=1,
    )


def records(train: bb.AdaptiveBatch, epochs: int) -> Iterator[bb.StepRecord]:
    """Trains up to so many epochs."""
    for _ in train.epochs(epochs):
        for step in train:
            for x in step:
                step.backward(train.model(x).square().mean())
            yield step.update()


def two_groups(kind: str) -> Callable[..., Optimizer]:
    """An optimizer whose groups have rates of their own, numbers or tensors."""

    def build(parameters: Any, lr: float) -> Optimizer:
        # float64, so that a tensor is multiplied as a number is
        both = [lr, lr / 5] if kind == "number" else torch.tensor([lr, lr / 5]).double().unbind()
        weight, bias = parameters
        groups = [{"params": [weight], "lr": both[0]}, {"params": [bias], "lr": both[1]}]
        return (SGD if kind == "number" else AdamW)(groups)

    return build


kinds = pytest.mark.parametrize("kind", ["number", "tensor"])


def momenta(train: bb.AdaptiveBatch) -> list[list[Any]]:
    """Fills with the momenta that the optimizer steps with."""
    seen: list[list[Any]] = []

    def note(optimizer: Optimizer, *_: Any) -> None:
        seen.append([g.get("momentum", g.get("betas")) for g in optimizer.param_groups])

    train.optimizer.register_step_pre_hook(note)
    return seen


@pytest.mark.late
@may_end
@kinds
@every_schedule
@property_test(3)
@given(sizes=st.lists(st.integers(1, 64), min_size=1, max_size=6))
def test_the_rate_over_the_samples_is_that_of_the_base_batch_times_the_square_root(
    build, kind, sizes
):
    fixed = adaptive(64, BASE, optimizer_of=two_groups(kind))
    walking = adaptive(64, *sizes, optimizer_of=two_groups(kind))
    for train in (fixed, walking):
        train.scheduler = build(train.optimizer)
    expected_momenta, seen = momenta(fixed), momenta(walking)
    curve = [record.lr for record in records(fixed, 4)]  # beyond the end
    assert 4 * 64 // BASE == len(curve)
    for record in records(walking, 4):
        tick = (record.samples - record.batch_size) // BASE
        factor = math.sqrt(record.batch_size / BASE)
        assert tuple(lr * factor for lr in curve[tick]) == record.lr
        assert expected_momenta[tick] == seen[-1]


@pytest.mark.late
@may_end
@kinds
@every_schedule
def test_a_schedule_continues_where_it_was_saved(build, kind):
    def built() -> bb.AdaptiveBatch:
        return adaptive(64, optimizer_of=two_groups(kind))

    uninterrupted = built()
    uninterrupted.scheduler = build(uninterrupted.optimizer)
    whole_momenta, files, expected = momenta(uninterrupted), [], []
    for record in records(uninterrupted, 4):
        parts = {
            "optimizer": uninterrupted.optimizer,
            "train": uninterrupted,
            "model": uninterrupted.model,
        }
        torch.save({name: part.state_dict() for name, part in parts.items()}, file := io.BytesIO())
        expected.append(record.lr)
        files.append(file)
    for done, file in list(enumerate(files, 1))[::3]:
        file.seek(0)
        state, resumed = torch.load(file, weights_only=True), built()
        resumed.scheduler = build(resumed.optimizer)
        resumed.model.load_state_dict(state["model"])
        resumed.optimizer.load_state_dict(state["optimizer"])
        resumed.load_state_dict(state["train"])
        seen = momenta(resumed)
        assert expected[done:] == [record.lr for record in records(resumed, 4)]
        assert whole_momenta[done:] == seen


@every_schedule
def test_one_state_loads_twice_and_into_the_run_that_continued_too(build):
    train = clock_of(build(optimizer(torch.tensor(0.1), torch.tensor(0.02))))
    train.advance(5 * BASE)
    state, at = train.state_dict(), rates(train.scheduler.optimizer)
    train.advance(BASE)
    expected = rates(train.scheduler.optimizer)
    for clock in (clock_of(build(optimizer(torch.tensor(0.1), torch.tensor(0.02)))), train):
        tensors = [group["lr"] for group in clock.scheduler.optimizer.param_groups]
        clock.load_state_dict(state)
        assert at == rates(clock.scheduler.optimizer) == [float(tensor) for tensor in tensors]
        clock.advance(BASE)
        assert expected == rates(clock.scheduler.optimizer)


def test_a_rate_that_was_set_by_hand_is_not_undone_by_loading():
    train, resumed = adaptive(), adaptive()
    for each in (train, resumed):
        each.scheduler = StepLR(each.optimizer, 1000)
    list(records(train, 1))
    train.optimizer.param_groups[0]["lr"] = 0.03  # as a plateau scheduler of the user's own does
    resumed.optimizer.load_state_dict(train.optimizer.state_dict())
    resumed.load_state_dict(train.state_dict())
    assert [0.03] == rates(resumed.optimizer)


@pytest.mark.thorough
@property_test(60)
@given(
    samples=st.integers(24, 90),
    base=st.integers(4, 24),
    epochs=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=6),
)
def test_schedules_of_base_steps_end_with_the_training_whatever_the_batch_does(
    samples, base, epochs, sizes
):
    for build in (
        lambda o, total: OneCycleLR(o, 0.4, total_steps=total),
        lambda o, total: CosineAnnealingLR(o, total),
        lambda o, total: LinearLR(o, 1.0, 0.0, total_iters=total),
    ):
        policy = bb.Controller(Walk(*sizes), base, max_batch=samples)
        train = adaptive(samples, policy=policy, batch_size=None)
        total = train.base_steps(epochs)
        assert (total - 1) * base < epochs * samples <= total * base
        train.scheduler = build(train.optimizer, total)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a run of the stated length has nothing to be warned of
            list(records(train, epochs))
        assert epochs * samples == train.samples
        last = total - 1 if isinstance(train.scheduler, OneCycleLR) else total
        assert min(epochs * samples // base, last) == train.scheduler.last_epoch


def test_one_cycle_holds_in_the_epochs_after_its_end_and_says_so_once():
    train = adaptive()
    train.scheduler = OneCycleLR(train.optimizer, 0.4, total_steps=train.base_steps(2))
    with pytest.warns(UserWarning, match="OneCycleLR reached its end") as caught:
        list(records(train, 4))
    assert [__file__] == [each.filename for each in caught]  # the line of the loop
    assert pytest.approx(0.4 / 25 / 1e4, rel=1e-9) == rates(train.optimizer)[0]


def test_base_steps_without_a_known_length_are_refused():
    train = adaptive(loader=[torch.randn(8, 3)])
    with pytest.raises(SettingError, match="no known length"):
        train.base_steps(3)


def test_a_plateau_scheduler_is_refused_at_construction_too():
    model = torch.nn.Linear(3, 1)
    opt = SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(64, 3), 16)
    with pytest.raises(SettingError, match="ReduceLROnPlateau"):
        bb.AdaptiveBatch(
            model, opt, loader, policy=bb.Fixed(32), scheduler=ReduceLROnPlateau(opt), every=1
        )


def test_a_scheduler_of_another_optimizer_is_refused_by_the_loop_too():
    train = adaptive()
    with pytest.raises(SettingError, match="another optimizer"):
        train.scheduler = StepLR(optimizer(), 1)


def test_a_scheduler_step_in_the_loop_is_an_error():
    train = adaptive()
    train.scheduler = StepLR(train.optimizer, 1)
    steps = records(train, 1)
    next(steps)
    train.scheduler.step()
    with pytest.raises(LoopError, match=r"leave scheduler\.step\(\) out"):
        next(steps)


@pytest.mark.parametrize("whose", ["its own", "its base optimizer's"])
def test_a_scheduler_of_a_variance_reduced_optimizer_is_taken(whose):
    train = adaptive(128, optimizer_of=VRSGD)
    opt = train.optimizer if whose == "its own" else train.optimizer.base
    train.scheduler = ExponentialLR(opt, 0.5)
    list(records(train, 1))
    assert pytest.approx(0.1 * 0.5 ** (128 // BASE), rel=1e-12) == rates(train.optimizer)[0]


def test_a_schedule_that_counted_other_base_batches_is_refused_at_resume():
    def clock(base):
        parameter = torch.torch.nn.Parameter(torch.zeros(1))
        optimizer = SGD([parameter], lr=0.1)
        found = BaseBatchScheduler(base, optimizer)
        found.scheduler = lr_scheduler.StepLR(optimizer, 3)
        return found

    saved = clock(16).state_dict()
    with pytest.raises(StateError, match=r"base batches of 16 samples, these are of 4"):
        clock(4).load_state_dict(saved)
    clock(16).load_state_dict(saved)


def test_without_a_schedule_another_base_batch_may_continue():
    opt = optimizer()
    first, second = BaseBatchScheduler(16, opt), BaseBatchScheduler(4, opt)
    first.advance(18)
    second.load_state_dict(first.state_dict())
    second.scheduler = StepLR(opt, 1)
    opt.step()
    second.advance(1)
    assert 0 == second.scheduler.last_epoch
    second.advance(1)
    assert 1 == second.scheduler.last_epoch


def test_growth_in_place_of_decay_refuses_a_rate_that_follows_the_batch():
    schedule = bb.Schedule("16, x2 every 16 steps up to 32, then decay")
    model = torch.nn.Linear(2, 1)
    for rule in ("sqrt", "linear", None):
        build = lambda rule=rule: bb.AdaptiveBatch(  # noqa: E731
            model,
            SGD(model.parameters(), lr=0.1),
            [torch.randn(16, 2)] * 8,
            policy=schedule,
            micro_batch=4,
            lr_scaling=rule,
            every=1,
        )
        if rule is None:
            assert 16 == build().plan.batch_size
            continue
        with pytest.raises(SettingError, match="pass lr_scaling=None"):
            build()


def test_a_schedule_for_other_groups_is_refused_before_anything_is_loaded():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    one, two = SGD(weights, lr=0.1), SGD([{"params": [weight]} for weight in weights], lr=0.2)
    first, second = BaseBatchScheduler(BASE, one), BaseBatchScheduler(BASE, two)
    first.scheduler, second.scheduler = StepLR(one, 1), StepLR(two, 1)
    with pytest.raises(StateError, match="for 1 parameter groups, the optimizer has 2"):
        second.load_state_dict(first.state_dict())
    assert [0.2, 0.2] == [group["lr"] for group in two.param_groups]
