"""AdaptiveBatch around a loop of one's own: gradients, records, decisions, refusals."""

import copy
import gc
import io
import math
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.errors import GradientError, LoopError, SettingError, StateError
from bigbatch.optim import LAMB, VRSGD, VarianceReduced, VRAdam
from property_tests import property_test
from single_steps import by_single_steps
from stateful_policy import Patient

torch.set_num_threads(1)
SEED = 7
GROW, SHRINK = bb.SimiGrad(target=0.999), bb.SimiGrad(target=-0.999, min_batch=1)


pytestmark = pytest.mark.filterwarnings("ignore:batch_size=.* is out of bounds")


def classifier(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def data(n: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    torch.manual_seed(SEED + 1)
    return TensorDataset(torch.randn(n, 5, dtype=dtype), torch.randint(3, (n,)))


def adaptive(
    n: int = 96,
    *,
    dtype: torch.dtype = torch.float64,
    optimizer: Callable[..., Any] = SGD,
    loader: Any = None,
    **more: Any,
) -> bb.AdaptiveBatch:
    """A small classifier on n random samples, in batches of 16, every setting open."""
    model = classifier(dtype)
    opt = optimizer(model.parameters(), lr=0.1)
    loader = DataLoader(data(n, dtype), 16) if loader is None else loader
    settings = {"policy": GROW, "every": 1, **more}
    settings = by_single_steps(settings, getattr(loader, "batch_size", None))
    return bb.AdaptiveBatch(model, opt, loader, **settings)


def loss_of(train: bb.AdaptiveBatch, batch: Any) -> Tensor:
    x, y = batch
    return cross_entropy(train.model(x), y)


def one_step(train: bb.AdaptiveBatch, step: bb.Step) -> bb.StepRecord:
    for batch in step:
        step.backward(loss_of(train, batch))
    return step.update()


def records(train: bb.AdaptiveBatch) -> Iterator[bb.StepRecord]:
    """One pass, or the rest of it."""
    for step in train:
        yield one_step(train, step)


def first_step(train: bb.AdaptiveBatch) -> bb.Step:
    return next(iter(train))


def complete_first_step(train: bb.AdaptiveBatch) -> bb.Step:
    """The first step with all its backwards, not yet updated."""
    step = first_step(train)
    for batch in step:
        step.backward(loss_of(train, batch))
    return step


def weights(train: bb.AdaptiveBatch) -> list[Tensor]:
    return [p.detach().clone() for p in train.model.parameters()]


def gradients(train: bb.AdaptiveBatch) -> list[Tensor]:
    return [p.grad.clone() for p in train.model.parameters()]


def same(expected: list[Tensor], actual: list[Tensor]) -> bool:
    return all(torch.equal(e, a) for e, a in zip(expected, actual, strict=True))


def untimed(some: list[bb.StepRecord]) -> list[bb.StepRecord]:
    return [replace(record, elapsed_seconds=0.0) for record in some]


class Target:
    """A policy of one's own that walks through a list of batch sizes."""

    def __init__(self, *sizes: int, lr_factor: float = 1.0) -> None:
        self.sizes, self.lr_factor = sizes, lr_factor

    def decide(self, noise: bb.GradientStatistics, now: bb.TrainingState) -> bb.Decision:
        size = self.sizes[min(now.steps, len(self.sizes)) - 1]
        return bb.Decision(size, f"the {now.steps}. size", self.lr_factor)


# the gradient


def handed_over(train: bb.AdaptiveBatch) -> list[list[Tensor]]:
    """Fills with the gradients that the optimizer steps with, one list a step."""
    seen: list[list[Tensor]] = []
    train.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(train)))
    return seen


@property_test(60)
@given(
    loader_sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8).filter(
        lambda loader_sizes: sum(loader_sizes) >= 4
    ),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    micro=st.integers(1, 12),
)
def test_the_optimizer_is_handed_the_mean_gradient_of_the_batch(loader_sizes, sizes, micro):
    x, y = data(sum(loader_sizes)).tensors
    loader = list(zip(x.split(loader_sizes), y.split(loader_sizes), strict=True))
    train = adaptive(loader=loader, policy=Target(*sizes), batch_size=sizes[0], micro_batch=micro)
    seen = handed_over(train)
    for _ in range(2):
        start = 0
        for step in train:
            replica = copy.deepcopy(train.model)
            record = one_step(train, step)
            stop = start + record.batch_size
            loss = cross_entropy(replica(x[start:stop]), y[start:stop])
            expected = torch.autograd.grad(loss, list(replica.parameters()))
            # float64: only the order of the sum differs
            torch.testing.assert_close(list(expected), seen[-1], rtol=1e-10, atol=1e-13)
            assert pytest.approx(loss.item(), rel=1e-12) == record.loss
            start = stop
        assert sum(loader_sizes) == start


@pytest.mark.parametrize(("scaling", "factor"), [(None, 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_a_fixed_policy_is_plain_gradient_accumulation_bit_for_bit(scaling, factor):
    def loader() -> DataLoader:
        return DataLoader(data(96, torch.float32), 24)

    train = adaptive(
        dtype=torch.float32,
        optimizer=lambda parameters, lr: SGD(parameters, lr, momentum=0.9),
        loader=loader(),
        policy=bb.Fixed(24),
        base_batch=6,
        micro_batch=6,
        lr_scaling=scaling,
    )
    model = classifier(torch.float32)
    optimizer = SGD(model.parameters(), 0.1 * factor, momentum=0.9)
    for _ in range(2):
        list(records(train))
        for x, y in loader():
            for some_x, some_y in zip(x.split(6), y.split(6), strict=True):
                (cross_entropy(model(some_x), some_y) * (6 / 24)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same([p.detach() for p in model.parameters()], weights(train))


def padded(n: int, empty: int) -> TensorDataset:
    """Sequences of 4 tokens, 0 to 3 of them padding; micro-batch `empty` of 4 samples is all so."""
    torch.manual_seed(SEED + 2)
    x, y = torch.randn(n, 4, 5, dtype=torch.float64), torch.randint(3, (n, 4))
    for row, length in enumerate(torch.randint(1, 5, (n,)).tolist()):
        y[row, length:] = -100
    y[4 * empty : 4 * empty + 4] = -100
    return TensorDataset(x, y)


def token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean over the tokens that are not padding; nan where all are."""
    return cross_entropy(model(x).flatten(0, 1), y.flatten())


@pytest.mark.parametrize("empty", [0, 2, 3])
def test_token_weights_give_the_mean_over_the_tokens_and_empty_micro_batches_none(empty):
    train = adaptive(loader=DataLoader(padded(16, empty), 16), policy=bb.Fixed(16))
    seen = handed_over(train)
    replica, meter_replica = copy.deepcopy(train.model), copy.deepcopy(train.model)
    step, parts = first_step(train), []
    for x, y in step:
        parts.append((x, y))
        step.backward(token_loss(train.model, x, y), weight=(y != -100).sum())
    record = step.update()

    x, y = (torch.cat(leaves) for leaves in zip(*parts, strict=True))
    loss = token_loss(replica, x, y)
    expected = torch.autograd.grad(loss, list(replica.parameters()))
    # float64: only the order of the sum differs
    torch.testing.assert_close(list(expected), seen[0], rtol=1e-10, atol=1e-13)
    assert pytest.approx(loss.item(), rel=1e-12) == record.loss

    tokens = [int((y != -100).sum()) for _, y in parts]
    assert 0 == tokens[empty]
    counted = [(part, n) for part, n in zip(parts, tokens, strict=True) if n]
    with bb.GradientMeter(meter_replica) as meter:
        for (x, y), n in counted:
            (token_loss(meter_replica, x, y) * n / sum(tokens)).backward()
        noise = meter.read(samples=[16 * n / sum(tokens) for _, n in counted])
    assert_same_noise(noise, record.statistics)
    assert (16, 16, 3) == (record.batch_size, noise.samples, noise.micro_batches)


# the measurement


def assert_same_noise(
    expected: bb.GradientStatistics, actual: bb.GradientStatistics | None
) -> None:
    """Equal but for the order of float64 sums."""
    assert actual is not None
    assert (expected.samples, expected.micro_batches) == (actual.samples, actual.micro_batches)
    assert pytest.approx(expected.grad_sqnorm, rel=1e-9, abs=1e-12) == actual.grad_sqnorm
    assert pytest.approx(expected.grad_variance, rel=1e-9, abs=1e-12) == actual.grad_variance


def metered(model: nn.Module, parts: list[Any]) -> bb.GradientStatistics:
    """What a GradientMeter says of these micro-batches in a loop of its own."""
    sizes = [len(y) for _, y in parts]
    with bb.GradientMeter(model) as meter:
        for x, y in parts:
            (cross_entropy(model(x), y) * len(y) / sum(sizes)).backward()
        return meter.read(samples=sizes)


@pytest.mark.parametrize(
    "policy", [GROW, SHRINK, Target(40, 7, 64, 16)], ids=["up", "down", "jump"]
)
def test_the_record_holds_what_a_meter_says_of_the_same_micro_batches(policy):
    train = adaptive(150, policy=policy)
    for step in train:
        replica, parts = copy.deepcopy(train.model), []
        for batch in step:
            parts.append(batch)
            step.backward(loss_of(train, batch))
        record = step.update()
        expected = metered(replica, parts)
        assert_same_noise(expected, record.statistics)
        assert record.similarity == record.statistics.similarity
        assert record.noise_scale == record.statistics.noise_scale
        assert (len(parts), sum(len(y) for _, y in parts)) == (
            record.micro_batches,
            record.batch_size,
        )


def test_a_trainer_may_make_the_two_halves_of_an_update_itself():
    torch.manual_seed(0)
    model, data = nn.Linear(3, 1), torch.randn(16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = bb.AdaptiveBatch(model, optimizer, [data], policy=bb.Fixed(16), micro_batch=4, every=1)
    before, expected = model.weight.detach().clone(), model(data).square().mean().item()
    for step in train:
        with pytest.raises(LoopError, match="before every micro-batch"):
            _ = step.loss
        for x in step:
            step.backward(model(x).square().mean())
        assert expected == pytest.approx(step.loss)
        with step.optimizer_step() as finite:
            step.step_optimizer(finite)
            assert not torch.equal(before, model.weight)
            assert model.weight.grad is not None
        assert model.weight.grad is None
    assert 1 == train.steps


def test_parameters_of_the_optimizer_outside_the_model_are_measured_stepped_and_zeroed():
    temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
    train = adaptive(
        optimizer=lambda parameters, lr: SGD([*parameters, temperature], lr), policy=bb.Fixed(16)
    )
    replica, step, parts = copy.deepcopy(train.model), first_step(train), []
    replica_temperature = nn.Parameter(temperature.detach().clone())
    for x, y in step:
        parts.append((x, y))
        step.backward(cross_entropy(train.model(x) / temperature, y))
    record = step.update()
    with bb.GradientMeter([*replica.parameters(), replica_temperature]) as meter:
        for x, y in parts:
            (cross_entropy(replica(x) / replica_temperature, y) / len(parts)).backward()
        assert_same_noise(meter.read(samples=[4] * 4), record.statistics)
    assert (1 - 0.1 * replica_temperature.grad).item() == pytest.approx(
        temperature.item(), rel=1e-12
    )
    assert temperature.grad is None


def test_parameters_of_the_model_outside_the_optimizer_are_zeroed_and_not_measured():
    model = classifier()
    opt = SGD(model[2].parameters(), lr=0.1)
    train = bb.AdaptiveBatch(model, opt, DataLoader(data(96), 16), policy=bb.Fixed(16), every=1)
    for step in train:
        replica, parts = copy.deepcopy(model), []
        replica[0].requires_grad_(False)
        for batch in step:
            parts.append(batch)
            step.backward(loss_of(train, batch))
        assert_same_noise(metered(replica, parts), step.update().statistics)
        assert [None] * 4 == [p.grad for p in model.parameters()]


def test_a_layer_that_is_thawed_on_the_way_is_measured_from_then_on():
    train = adaptive(policy=bb.Fixed(16))
    train.model[0].requires_grad_(False)
    one_step(train, first_step(train))
    train.model[0].requires_grad_(True)
    for step in train:
        replica, parts = copy.deepcopy(train.model), []
        for batch in step:
            parts.append(batch)
            step.backward(loss_of(train, batch))
        assert_same_noise(metered(replica, parts), step.update().statistics)


def test_a_meter_of_ones_own_is_the_one_that_measures():
    model = classifier()
    with bb.GradientMeter(model) as meter:
        opt = SGD(model.parameters(), 0.1)
        loader = DataLoader(data(96), 16)
        train = bb.AdaptiveBatch(model, opt, loader, policy=GROW, meter=meter, every=1)
        assert train.meter is meter
        assert not math.isnan(one_step(train, first_step(train)).similarity)


# the record


def test_a_record_says_where_the_training_stands():
    train = adaptive(80, policy=bb.Fixed(16))
    step_records = [record for _ in range(2) for record in records(train)]
    assert list(range(1, 11)) == [record.step for record in step_records]
    assert [0] * 5 + [1] * 5 == [record.epoch for record in step_records]
    assert list(range(16, 161, 16)) == [record.samples for record in step_records]
    assert [16] * 10 == [record.batch_size for record in step_records]
    assert [4] * 10 == [record.micro_batches for record in step_records]
    assert not any(record.skipped for record in step_records)
    assert (10, 160, 2, 0) == (train.steps, train.samples, train.epoch, train.skipped)


def test_a_record_holds_the_decision_on_the_next_step():
    train = adaptive(500, policy=Target(24, 40, 20, 64))
    step_records = list(records(train))
    assert [24, 40, 20, 64, 64] == [record.decision.batch_size for record in step_records[:5]]
    assert [16, 24, 40, 20, 64] == [record.batch_size for record in step_records[:5]]
    assert "the 1. size" == step_records[0].decision.reason


def test_the_rate_used_follows_the_batch_that_was_realised_and_comes_back():
    train = adaptive(150, policy=GROW, base_batch=12)
    used: list[float] = []
    train.optimizer.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["lr"]))
    for record in records(train):
        assert (0.1 * math.sqrt(record.batch_size / 12),) == record.lr == (used[-1],)
        assert 0.1 == train.optimizer.param_groups[0]["lr"]
    assert 16 != record.batch_size  # the remainder has its own rate


def test_the_rate_of_every_group_is_recorded():
    def groups(parameters: Iterator[nn.Parameter], lr: float) -> SGD:
        first, *rest = parameters
        return SGD([{"params": [first], "lr": 3 * lr}, {"params": rest}], lr)

    record = one_step(train := adaptive(optimizer=groups), first_step(train))
    assert (3 * 0.1, 0.1) == record.lr


def test_the_factor_of_a_decision_multiplies_the_rate_of_the_step_it_decides():
    train = adaptive(96, policy=Target(16, lr_factor=0.5), lr_scaling=None)
    assert [(0.1,)] + [(0.05,)] * 5 == [record.lr for record in records(train)]


# the decision


def rule(target: float, start: int, steps: int, **bounds: int) -> list[int]:
    """The paper's rule, iterated on its own un-rounded numbers."""
    sizes = [start]
    for _ in range(steps):
        grown = max(sizes[-1] + 1, sizes[-1] * 11 // 10)
        shrunk = max(1, min(sizes[-1] - 1, sizes[-1] * 9 // 10))
        sizes.append(grown if target > 0 else shrunk)
    return sizes[1:]


@pytest.mark.parametrize("least", [2, 4, 8])
def test_the_target_is_remembered_before_rounding_so_growth_does_not_stall(least):
    train = adaptive(1000, policy=GROW, batch_size=24, min_micro_batches=least)
    step_records = [record for _, record in zip(range(12), records(train), strict=False)]
    assert rule(0.999, 24, 12) == [record.decision.batch_size for record in step_records]
    assert 24 < step_records[-1].batch_size


@pytest.mark.parametrize("least", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_the_batch_shrinks_although_the_accumulation_is_as_low_as_it_may_be(least):
    train = adaptive(2000, policy=SHRINK, batch_size=64, micro_batch=64, min_micro_batches=least)
    step_records = list(records(train))
    assert least == train.plan.accumulation
    assert rule(-0.999, 64, 12) == [record.decision.batch_size for record in step_records[:12]]
    assert least == step_records[-2].batch_size  # the smallest step that can be compared


@pytest.mark.filterwarnings("ignore:min_batch=:UserWarning")
@property_test(60)
@given(
    start=st.integers(1, 300),
    micro=st.integers(1, 40),
    low=st.integers(8, 20),
    n=st.integers(20, 150),
    policy=st.sampled_from([0.999, -0.999]),
)
def test_the_bounds_hold_from_the_first_step_to_the_remainder(start, micro, low, n, policy):
    high = 2 * low + 4  # what is left of an epoch can then always be shared
    train = adaptive(
        n,
        policy=bb.SimiGrad(policy, min_batch=low, max_batch=high),
        batch_size=start,
        micro_batch=micro,
    )
    for record in [record for _ in range(2) for record in records(train)]:
        assert low <= record.batch_size <= high
        assert 4 <= record.micro_batches
        assert low <= record.decision.batch_size <= high


def test_the_bounds_of_a_policy_of_ones_own_hold_whatever_it_decides():
    class Greedy(Target):
        needs = bb.Needs(min_batch=20, max_batch=50)

    train = adaptive(400, policy=Greedy(1, 10_000, 3, 700))
    sizes = [record.batch_size for record in records(train)]
    assert [20, 20, 48, 20, 48] == sizes[:5]  # 48 is the largest multiple of 4 up to 50
    assert all(20 <= size <= 50 for size in sizes)


def test_no_step_is_larger_than_the_data_set():
    train = adaptive(40, policy=Target(10_000))
    step_records = [record for _ in range(3) for record in records(train)]
    assert 40 == max(record.batch_size for record in step_records)
    assert 40 == step_records[0].decision.batch_size


def test_a_start_outside_the_bounds_is_moved_to_them():
    assert 32 == adaptive(policy=bb.SimiGrad(min_batch=32)).plan.batch_size
    assert 8 == adaptive(policy=bb.SimiGrad(max_batch=8)).plan.batch_size


def test_a_lower_bound_below_the_smallest_step_is_raised_and_said_once():
    with pytest.warns(UserWarning, match="min_batch=2 is raised to 4") as caught:
        train = adaptive(policy=bb.SimiGrad(-0.999, min_batch=2))
    assert 1 == len(caught)
    with warnings.catch_warnings(action="error"):
        assert 4 == min(record.batch_size for _ in range(5) for record in records(train))


def test_a_policy_learns_where_the_training_stands():
    states: list[bb.TrainingState] = []

    class Recording:
        needs = bb.Needs(min_batch=1)

        def decide(self, noise: bb.GradientStatistics, now: bb.TrainingState) -> bb.Decision:
            states.append(now)
            return bb.Decision(21, "21 is no multiple of 4")

    train = adaptive(84, policy=Recording(), base_batch=8)
    step_records = list(records(train))
    assert [16, 20, 20, 20, 8] == [record.batch_size for record in step_records]
    assert [16, 20, 20, 20] == [
        now.batch_size for now in states
    ]  # the remainder is not asked about
    assert [16, 21, 21, 21] == [now.target_batch_size for now in states]
    assert [16, 36, 56, 76] == [now.samples for now in states]
    assert [1, 2, 3, 4] == [now.steps for now in states]
    assert {0} == {now.epoch for now in states}


@pytest.mark.parametrize("policy", [GROW, SHRINK], ids=["up", "down"])
@pytest.mark.parametrize("n", [50, 77, 101])
def test_a_remainder_never_decides(policy, n):
    train = adaptive(n, policy=policy)
    tails = 0
    for _ in range(3):
        for step in train:
            target, planned = train.controller.decision.batch_size, train.plan.batch_size
            record = one_step(train, step)
            if record.batch_size != planned:
                tails += 1
                assert target == record.decision.batch_size == train.controller.decision.batch_size
                assert "the end of an epoch does not decide" == record.decision.reason
            else:
                assert "similarity" in record.decision.reason
    assert 0 < tails


def test_a_variance_reduced_optimizer_has_eight_micro_batches_by_default():
    train = adaptive(97, optimizer=VRSGD, policy=SHRINK)
    assert 8 == train.plan.micro_batches
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # too few micro-batches would be warned of
        step_records = [record for _ in range(3) for record in records(train)]
    assert 8 == min(record.micro_batches for record in step_records)
    assert 8 == min(record.statistics.micro_batches for record in step_records)


# going through the data


def test_after_a_break_a_new_for_continues_with_the_rest():
    seen: list[Tensor] = []
    train = adaptive(96, policy=bb.Fixed(16))

    def some_steps(most: int) -> None:
        for number, step in enumerate(train, 1):
            for x, y in step:
                seen.append(x)
                step.backward(loss_of(train, (x, y)))
            step.update()
            if number == most:
                break

    some_steps(2)
    assert 0 == train.epoch
    some_steps(100)
    assert 1 == train.epoch
    assert torch.equal(data(96).tensors[0], torch.cat(seen))


def test_range_and_epochs_train_the_same():
    by_range, by_epochs = adaptive(100), adaptive(100)
    first = [record for _ in range(3) for record in records(by_range)]
    second = [record for _ in by_epochs.epochs(3) for record in records(by_epochs)]
    assert untimed(first) == untimed(second)
    assert same(weights(by_range), weights(by_epochs))


def test_epochs_after_a_resumption_begin_with_the_one_that_was_broken_off():
    first = adaptive(96, policy=bb.Fixed(16))
    list(records(first))
    one_step(first, first_step(first))
    second = adaptive(96, policy=bb.Fixed(16))
    second.load_state_dict(first.state_dict())
    assert [(1, 5), (2, 6)] == [(epoch, len(list(records(second)))) for epoch in second.epochs(3)]
    assert [] == list(second.epochs(3))


# clipping


def test_clipping_returns_the_norm_of_the_mean_gradient_and_leaves_the_measurement_alone():
    plain, clipped = adaptive(), adaptive()
    expected, step = one_step(plain, first_step(plain)), complete_first_step(clipped)
    norm = torch.cat([g.flatten() for g in gradients(clipped)]).norm()
    assert pytest.approx(norm.item(), rel=1e-12) == step.clip_grad_norm_(0.01).item()
    assert pytest.approx(0.01, rel=1e-5) == (  # torch divides by norm + 1e-6
        torch.cat([g.flatten() for g in gradients(clipped)]).norm().item()
    )
    assert expected.statistics == step.update().statistics


@pytest.mark.parametrize("max_norm", [0.01, 1e6], ids=["active", "inactive"])
def test_torchs_own_clipping_after_the_last_backward_does_the_same(max_norm):
    ours, torchs = adaptive(), adaptive()
    for one, other in zip(ours, torchs, strict=True):
        for batch, again in zip(one, other, strict=True):
            one.backward(loss_of(ours, batch))
            other.backward(loss_of(torchs, again))
        one.clip_grad_norm_(max_norm)
        nn.utils.clip_grad_norm_(torchs.model.parameters(), max_norm)
        assert untimed([one.update()]) == untimed([other.update()])
    assert same(weights(ours), weights(torchs))


# gradients of the user's own


def test_what_autograd_grad_computes_inside_a_step_does_not_count():
    plain, curious = adaptive(), adaptive()
    expected = list(records(plain))
    step_records = []
    for step in curious:
        for batch in step:
            loss = loss_of(curious, batch)
            torch.autograd.grad(loss, list(curious.model.parameters()), retain_graph=True)
            step.backward(loss)
        step_records.append(step.update())
    assert untimed(expected) == untimed(step_records)
    assert same(weights(plain), weights(curious))


def test_a_penalty_by_autograd_grad_is_part_of_the_loss():
    train = adaptive(policy=bb.Fixed(16))

    def penalized(model: nn.Module, batch: Any) -> Tensor:
        loss = cross_entropy(model(batch[0]), batch[1])
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(slope.square().sum() for slope in slopes)

    replica, step, parts = copy.deepcopy(train.model), first_step(train), []
    for batch in step:
        parts.append(batch)
        step.backward(penalized(train.model, batch))
    for batch in parts:
        (penalized(replica, batch) / len(parts)).backward()
    assert same([p.grad for p in replica.parameters()], gradients(train))
    assert len(parts) == step.update().statistics.micro_batches


def test_autograd_grad_and_torchs_own_clipping_go_together():
    train = adaptive()
    step = first_step(train)
    for batch in step:
        loss = loss_of(train, batch)
        torch.autograd.grad(loss, list(train.model.parameters()), retain_graph=True)
        step.backward(loss)
    nn.utils.clip_grad_norm_(train.model.parameters(), 0.01)
    assert not step.update().skipped


def test_a_dirty_gradient_before_the_first_backward_raises():
    train = adaptive()
    loss_of(train, data(4).tensors).backward()
    step = first_step(train)
    with pytest.raises(GradientError, match="not empty before the first backward"):
        step.backward(loss_of(train, next(iter(step))))


def test_a_gradient_of_zeros_before_the_first_backward_is_clean():
    train = adaptive()
    for parameter in train.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert not one_step(train, first_step(train)).skipped


def test_a_backward_of_ones_own_between_two_micro_batches_raises():
    train = adaptive()
    step = first_step(train)
    batches = iter(step)
    step.backward(loss_of(train, next(batches)))
    loss_of(train, data(4).tensors).backward()
    with pytest.raises(GradientError, match=r"\.grad was changed"):
        step.backward(loss_of(train, next(batches)))


def test_a_backward_of_ones_own_after_the_last_micro_batch_raises():
    train = adaptive()
    step = complete_first_step(train)
    loss_of(train, data(4).tensors).backward()
    with pytest.raises(GradientError, match=r"changed \.grad.*step\.update"):
        step.update()


def test_zeroed_gradients_in_the_middle_of_a_step_raise():
    train = adaptive()

    def zero_on_the_way() -> None:
        step = first_step(train)
        for number, batch in enumerate(step):
            if number == 2:
                train.optimizer.zero_grad()
            step.backward(loss_of(train, batch))
        step.update()

    with pytest.raises(GradientError):
        zero_on_the_way()


def test_gradients_that_are_gone_before_the_update_raise():
    train = adaptive()
    step = complete_first_step(train)
    train.optimizer.zero_grad()
    with pytest.raises(GradientError):
        step.update()


# loops that are not followed


def test_a_micro_batch_without_backward_raises():
    step = first_step(adaptive())
    with pytest.raises(LoopError, match=r"without step\.backward"):
        for _ in step:
            pass


def test_the_last_micro_batch_without_backward_raises():
    train = adaptive()
    step = first_step(train)
    batches = iter(step)
    for _ in range(3):
        step.backward(loss_of(train, next(batches)))
    next(batches)
    with pytest.raises(LoopError, match=r"without step\.backward"):
        next(batches)


def test_a_second_backward_on_one_micro_batch_raises():
    train = adaptive()
    step = first_step(train)
    batch = next(iter(step))
    step.backward(loss_of(train, batch))
    with pytest.raises(LoopError, match="called twice"):
        step.backward(loss_of(train, batch))


def test_a_backward_outside_the_micro_batches_raises():
    train = adaptive()
    with pytest.raises(LoopError, match="outside"):
        first_step(train).backward(loss_of(train, data(4).tensors))


def test_a_forgotten_update_raises_at_the_next_step():
    train = adaptive()
    steps = iter(train)
    step = next(steps)
    for batch in step:
        step.backward(loss_of(train, batch))
    with pytest.raises(LoopError, match=r"step\.update\(\) was not called"):
        next(steps)


def test_a_forgotten_update_raises_in_a_new_for_too():
    train = adaptive()
    complete_first_step(train)
    with pytest.raises(LoopError, match=r"step\.update\(\) was not called"):
        first_step(train)


@pytest.mark.cpu  # workers of the loader
def test_a_training_that_is_dropped_in_mid_epoch_is_gone_at_once_with_its_workers():
    train = adaptive(loader=DataLoader(data(96), 16, num_workers=1))
    step, workers = complete_first_step(train), multiprocessing.active_children()
    gc.disable()
    try:
        del train
        step.update()
        del step
        assert workers
        assert not set(workers) & set(multiprocessing.active_children())
    finally:
        gc.enable()


update_or_clip = pytest.mark.parametrize(
    "call", [bb.Step.update, lambda step: step.clip_grad_norm_(1.0)], ids=["update", "clipping"]
)


@update_or_clip
def test_a_second_update_and_clipping_after_the_first_raise(call):
    train = adaptive()
    step = complete_first_step(train)
    step.update()
    with pytest.raises(LoopError, match=r"after step\.update\(\)"):
        call(step)


@update_or_clip
@pytest.mark.parametrize("backwards", [0, 1, 3])
def test_update_and_clipping_before_the_last_micro_batch_raise(call, backwards):
    train = adaptive()
    step = first_step(train)
    for _, batch in zip(range(backwards), step, strict=False):
        step.backward(loss_of(train, batch))
    with pytest.raises(LoopError, match="before every micro-batch"):
        call(step)


def test_a_loss_that_is_no_single_number_raises_with_its_shape():
    train = adaptive()
    step = first_step(train)
    x, y = next(iter(step))
    with pytest.raises(LoopError, match=r"shape \(4,\)"):
        step.backward(cross_entropy(train.model(x), y, reduction="none"))


def test_a_loss_of_one_element_is_a_number():
    train = adaptive()
    step = first_step(train)
    for batch in step:
        step.backward(loss_of(train, batch).reshape(1))
    assert not step.update().skipped


@pytest.mark.parametrize("first", [None, 4.0])
def test_weights_for_some_micro_batches_only_raise(first):
    train = adaptive()
    step = first_step(train)
    batches = iter(step)
    step.backward(loss_of(train, next(batches)), weight=first)
    with pytest.raises(LoopError, match="weight="):
        step.backward(loss_of(train, next(batches)), weight=4.0 if first is None else None)


def weighted(weight, groups=None):
    train = adaptive(micro_batch=16, batch_size=16, min_micro_batches=2, groups=groups)
    step = first_step(train)
    for batch in step:
        step.backward(loss_of(train, batch), weight=weight)
    return step.update()


@pytest.mark.parametrize("groups", [None, 2])
def test_the_weights_of_samples_add_up_to_that_of_the_micro_batch(groups):
    samples = 8 if groups is None else 16
    by_sample = weighted(torch.arange(samples), groups)
    one = weighted(torch.arange(samples).sum()[None])
    assert pytest.approx(one.loss, rel=1e-12) == by_sample.loss
    assert (16, 2) == (by_sample.batch_size, by_sample.statistics.micro_batches)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("shape", [(3,), (8, 1), (16, 2), (0,)])
def test_a_weight_of_another_shape_is_refused(shape, groups):
    samples = 8 if groups is None else 16
    with pytest.raises(SettingError, match=rf"shape \({shape[0]}.*; pass one.* {samples} numbers"):
        weighted(torch.ones(shape), groups)


@pytest.mark.parametrize("weight", [4.0, torch.tensor(4), torch.ones(1)])
def test_groups_need_the_weight_of_each_sample(weight):
    with pytest.raises(SettingError, match=r"weight of each sample: .* 16 numbers"):
        weighted(weight, groups=2)
    with pytest.raises(LoopError, match="every micro-batch of the step has weight 0"):
        weighted(0, groups=2)


@pytest.mark.parametrize("number", [-1.0, math.nan, math.inf])
def test_a_sample_whose_weight_is_no_count_is_refused(number):
    with pytest.raises(SettingError, match="weight=tensor"):
        weighted(torch.tensor([1.0] * 7 + [number]))


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_no_count_raises_with_its_value(weight):
    train = adaptive()
    step = first_step(train)
    with pytest.raises(SettingError, match=f"weight={weight}"):
        step.backward(loss_of(train, next(iter(step))), weight=weight)


def test_a_state_inside_a_step_is_refused():
    train = adaptive()
    step = first_step(train)
    assert 6 == train.state_dict()["version"]  # nothing was given out yet
    for batch in step:
        with pytest.raises(LoopError, match=r"step\.update\(\).*load an earlier checkpoint"):
            train.state_dict()
        step.backward(loss_of(train, batch))
    with pytest.raises(LoopError, match=r"step\.update\(\)"):
        train.state_dict()
    step.update()
    assert 6 == train.state_dict()["version"]


def test_a_state_of_another_version_is_refused_with_its_number():
    train = adaptive()
    with pytest.raises(StateError, match="version 99"):
        train.load_state_dict({**train.state_dict(), "version": 99})


# settings that cannot work


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"min_micro_batches": 0}, "min_micro_batches=0"),
        ({"min_micro_batches": 2.5}, r"min_micro_batches=2\.5"),
        ({"lr_scaling": "cubic"}, "lr_scaling='cubic'"),
        ({"loader": [data(8).tensors]}, "does not say its batch size; pass micro_batch="),
        ({"loader": [data(8).tensors], "micro_batch": 4}, "pass batch_size="),
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"batch_size": -4}, "batch_size=-4"),
        ({"base_batch": 0}, "base_batch=0"),
        ({"policy": bb.SimiGrad(min_batch=97)}, "min_batch=97 exceeds the 96 samples"),
        ({"policy": bb.SimiGrad(max_batch=3)}, "max_batch=3"),
        ({"policy": 0.3}, r"policy=0\.3 has no method decide"),
        ({"meter": bb.GradientMeter(classifier(), loss="mean")}, 'loss="weighted"'),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_value(settings_, message):
    with pytest.raises(SettingError, match=message):
        adaptive(96, **settings_)


def test_crossed_bounds_are_refused_with_both_values():
    with pytest.raises(SettingError, match="min_batch=512 exceeds max_batch=256"):
        bb.SimiGrad(min_batch=512, max_batch=256)


def test_a_policy_that_returns_no_decision_is_refused_with_what_it_returned():
    class Number(Target):
        def decide(self, noise: bb.GradientStatistics, now: bb.TrainingState) -> Any:
            return 32

    train = adaptive(policy=Number())
    step = complete_first_step(train)
    with pytest.raises(SettingError, match="returned 32"):
        step.update()


# steps that are skipped


def poisoned(n: int, sample: int, value: float) -> DataLoader:
    x, y = data(n, torch.float32).tensors
    x[sample] = value
    return DataLoader(TensorDataset(x, y), 16)


def saved(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@pytest.mark.parametrize("scaled", [False, True], ids=["no scaler", "scaler"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "optimizer",
    [lambda p, lr: SGD(p, lr, momentum=0.9), AdamW, VRAdam],
    ids=["momentum", "AdamW", "VRAdam"],
)
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(optimizer, value, scaled):
    train = adaptive(
        dtype=torch.float32,
        loader=poisoned(160, 60, value),
        optimizer=optimizer,
        scaler=GradScaler("cpu", init_scale=1024.0) if scaled else None,
        lr_scaling="adascale",
    )
    train.scheduler = StepLR(train.optimizer, 1, gamma=0.99)
    skipped = []
    state = train.state_dict()
    for step in train:
        before, optimizer_before = weights(train), saved(train.optimizer.state_dict())
        record = one_step(train, step)
        state, state_before = train.state_dict(), state
        if not record.skipped:
            assert not same(before, weights(train))
            continue
        skipped.append(record)
        assert same(before, weights(train))
        assert optimizer_before == saved(train.optimizer.state_dict())
        for part in ("controller", "clock", "scaling"):
            assert saved(state_before["shared"][part]) == saved(state["shared"][part])
        assert train.controller.decision.batch_size == record.decision.batch_size
        assert "skipped" in record.decision.reason
        assert record.statistics is None
        assert math.isnan(record.similarity)
    assert 1 == len(skipped) == train.skipped
    assert train.steps + 1 == record.step
    assert 160 == train.samples
    assert all(torch.isfinite(weight).all() for weight in weights(train))
    if scaled:
        assert 512.0 == train.scaler.get_scale()


@pytest.mark.parametrize("exponent", [10, 70])
def test_with_a_scaler_too_a_skipped_step_is_one_that_changed_no_weight(exponent):
    # at 2^70 the gradients are finite in float32, their squares are not
    scaler = GradScaler("cpu", init_scale=2.0**exponent)
    train = adaptive(dtype=torch.float32, scaler=scaler)
    for step in train:
        before = weights(train)
        record = one_step(train, step)
        assert same(before, weights(train)) == record.skipped


def test_a_scaler_changes_neither_the_measurement_nor_the_weights():
    plain = adaptive(160, dtype=torch.float32)
    # the scale doubles after every third step, so the unit of the gradients changes on the way
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=3)
    scaled = adaptive(160, dtype=torch.float32, scaler=scaler)
    # powers of two scale exactly: float32 differs by nothing but underflow
    for expected, actual in zip(records(plain), records(scaled), strict=True):
        assert (
            pytest.approx(expected.statistics.grad_sqnorm, rel=1e-6)
            == actual.statistics.grad_sqnorm
        )
        assert (
            pytest.approx(expected.statistics.grad_variance, rel=1e-6)
            == actual.statistics.grad_variance
        )
        assert expected.batch_size == actual.batch_size
        assert pytest.approx(expected.loss, rel=1e-6) == actual.loss
    torch.testing.assert_close(weights(plain), weights(scaled), rtol=1e-6, atol=1e-7)
    assert 256.0 < scaler.get_scale()


def test_clipping_with_a_scaler_clips_the_true_gradient():
    plain = adaptive(dtype=torch.float32)
    scaled = adaptive(dtype=torch.float32, scaler=GradScaler("cpu", init_scale=1024.0))
    one, other = complete_first_step(plain), complete_first_step(scaled)
    # a power of two scales exactly
    assert one.clip_grad_norm_(0.01).item() == other.clip_grad_norm_(0.01).item()
    assert one.update().statistics == other.update().statistics
    assert same(weights(plain), weights(scaled))


def test_a_batch_that_spans_the_epoch_still_decides():
    train = adaptive(96, policy=bb.SimiGrad(-0.9, min_batch=8, max_batch=96), batch_size=96)
    batches = [record.batch_size for _ in range(12) for record in records(train)]
    assert batches[0] == 96
    assert max(batches[-4:]) < 48  # similarity is above -.9, so the batch shrinks step by step


def test_a_micro_batch_of_an_inner_loop_that_was_left_raises():
    train = adaptive()
    step = first_step(train)
    for _ in step:
        break
    with pytest.raises(LoopError, match=r"left without step\.backward"):
        next(iter(step))


@pytest.mark.parametrize("optimizer", [SGD, partial(SGD, fused=True), AdamW, VRSGD])
def test_an_optimizer_step_of_ones_own_inside_a_step_raises(optimizer):
    train = adaptive(optimizer=optimizer)
    step = complete_first_step(train)
    train.optimizer.step()
    with pytest.raises(LoopError, match=r"optimizer\.step\(\) was called inside a step"):
        step.update()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_zeroed_before_the_update_raise(set_to_none):
    train = adaptive()
    step = complete_first_step(train)
    train.optimizer.zero_grad(set_to_none)
    with pytest.raises(GradientError, match="zeroed inside the step"):
        step.update()


@pytest.mark.parametrize("every", [0, 1])
def test_a_backward_that_failed_is_not_repeated_in_its_step(every):
    torch.manual_seed(0)
    model, batches = nn.Linear(6, 3), [(torch.randn(32, 6), torch.arange(32) % 3)]
    micro_batch = 32 if every == 0 else 8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = bb.AdaptiveBatch(
        model, optimizer, batches, policy=bb.Fixed(32), micro_batch=micro_batch, every=every
    )
    step = next(iter(train))
    x, y = next(iter(step))
    outputs = model(x)

    def fail(gradient):
        raise RuntimeError("a fault in a backward")

    outputs.register_hook(fail)
    with pytest.raises(RuntimeError, match="a fault in a backward"):
        step.backward(cross_entropy(outputs, y))
    with pytest.raises(GradientError, match="cannot be repeated in its step"):
        step.backward(cross_entropy(model(x), y))


def test_an_optimizer_of_another_model_is_refused():
    other = classifier()
    with pytest.raises(SettingError, match="no parameter of the model"):
        bb.AdaptiveBatch(
            classifier(),
            SGD(other.parameters(), lr=0.1),
            DataLoader(data(32), 8),
            policy=GROW,
            every=1,
        )


def test_a_start_out_of_bounds_is_said():
    with pytest.warns(UserWarning, match="batch_size=90 is out of bounds; .* starts with 32"):
        adaptive(policy=bb.SimiGrad(0.2, max_batch=32), batch_size=90)


def test_a_policy_that_fails_counts_no_step():
    class Fails:
        def decide(self, noise, now):
            raise KeyError("no")

    train = adaptive(policy=Fails())
    step = complete_first_step(train)
    before = weights(train)
    with pytest.raises(KeyError):
        step.update()
    assert (0, 0) == (train.samples, train.steps)
    assert same(before, weights(train))


def test_a_length_that_was_learned_is_known_after_a_resume():
    loader = [tuple(t[i : i + 32] for t in data(320).tensors) for i in range(0, 320, 32)]

    def build():
        return adaptive(loader=loader, policy=Target(64, 1000), batch_size=64, micro_batch=64)

    train, resumed = build(), build()
    list(records(train))
    resumed.model.load_state_dict(train.model.state_dict())
    resumed.load_state_dict(train.state_dict())
    assert 320 == train.controller.decision.batch_size == resumed.controller.decision.batch_size
    assert train.base_steps(2) == resumed.base_steps(2)
    assert train.plan == resumed.plan


def test_a_scheduler_that_is_built_after_the_optimizer_was_loaded_continues_at_its_rate():
    def build():
        return adaptive(policy=bb.Fixed(16), micro_batch=16)

    def warmup(train):
        return torch.optim.lr_scheduler.LinearLR(train.optimizer, 0.1, total_iters=12)

    train, resumed = build(), build()
    train.scheduler = warmup(train)
    list(records(train))
    resumed.optimizer.load_state_dict(train.optimizer.state_dict())
    resumed.scheduler = warmup(resumed)
    resumed.load_state_dict(train.state_dict())
    expected = [record.lr for record in records(train)]
    assert expected == [record.lr for record in records(resumed)]


# a controller of one's own, and a micro-batch of one size


def test_a_controller_brings_its_own_start_and_options():
    controller = bb.Controller(
        GROW, 32, base_batch=16, max_change=1.05, decide_every=2, smoothing=None
    )
    train = adaptive(400, policy=controller)
    assert controller is train.controller
    complete_first_step = list(records(train))
    assert 32 == complete_first_step[0].batch_size
    assert pytest.approx(0.1 * math.sqrt(2)) == complete_first_step[0].lr[0]
    assert "held: decides every 2 steps" == complete_first_step[0].decision.reason
    assert 33 == complete_first_step[1].decision.batch_size  # not the 35 of the rule
    for again in ({"batch_size": 32}, {"base_batch": 32}):
        with pytest.raises(SettingError, match="the controller has batch_size and base_batch"):
            adaptive(policy=bb.Controller(GROW, 32), **again)


@property_test(25)
@given(
    micro=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    loader_size=st.integers(1, 20),
)
def test_a_fixed_micro_batch_is_every_micro_batchs_size_but_at_the_epochs_end(
    micro, sizes, loader_size
):
    train = adaptive(
        loader=DataLoader(data(80), loader_size),
        policy=Target(*sizes),
        batch_size=16,
        micro_batch=micro,
        fixed_micro_batch=True,
        min_micro_batches=2,
    )
    steps = []
    for step in train:
        steps.append([])
        for x, y in step:
            steps[-1].append(len(x))
            step.backward(loss_of(train, (x, y)))
        step.update()
    assert 80 == sum(map(sum, steps))
    for step in steps[:-2]:
        assert {micro} == set(step)


# memory


class TooLarge(nn.Module):
    """Has no memory for more than so many samples, forwards or backwards."""

    def __init__(self, inner: nn.Module, most: int, where: str) -> None:
        super().__init__()
        self.inner, self.most, self.where = inner, most, where

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        if len(x) > self.most and self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        if len(x) > self.most:
            out.register_hook(self._fail)
        return out

    def _fail(self, gradient: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_for_lack_of_memory_ends_with_the_size_to_set(where):
    model = TooLarge(classifier(), 11, where)
    opt = SGD(model.parameters(), lr=0.1)
    train = bb.AdaptiveBatch(
        model, opt, DataLoader(data(96), 16), policy=bb.Fixed(48), micro_batch=12, every=1
    )
    with pytest.raises(torch.OutOfMemoryError) as caught:
        next(records(train))
    (note,) = caught.value.__notes__
    assert "this micro-batch had 12 samples; set micro_batch=6" in note
    assert "bb.largest_micro_batch(" in note


@pytest.mark.parametrize(("every", "optimizer"), [(1, SGD), (50, SGD), (1, VRSGD)])
def test_a_layer_added_within_a_step_is_an_error_that_says_so(every, optimizer):
    train = adaptive(every=every, optimizer=optimizer, micro_batch=4)
    next(records(train))
    step = first_step(train)
    step.backward(loss_of(train, next(iter(step))))
    train.model.append(nn.Linear(3, 3).double())
    train.optimizer.add_param_group({"params": train.model[3].parameters()})
    before = weights(train)
    with pytest.raises(
        GradientError, match=r"parameters were added to the opt|add parameters, out"
    ):
        one_step(train, step)
    assert same(before, weights(train))


@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize("to_none", [True, False])
def test_an_optimizer_that_steps_inside_the_backward_is_named(every, to_none):
    train = adaptive(every=every, micro_batch=4)
    for parameter in train.model.parameters():
        inside = SGD([parameter], lr=0.1)

        def take(_, inside=inside):
            inside.step()
            inside.zero_grad(set_to_none=to_none)

        parameter.register_post_accumulate_grad_hook(take)
    with pytest.raises(
        GradientError, match=r"an optimizer that steps there|step no optimizer insi"
    ):
        list(records(train))


# what a state says


def test_settings_that_changed_since_the_state_are_named_and_the_new_ones_hold():
    before = adaptive(400, micro_batch=8, batch_size=64)
    next(records(before))
    again = adaptive(400, micro_batch=16, batch_size=64, policy=bb.SimiGrad(target=0.5))
    with pytest.warns(UserWarning, match="the new one is used") as caught:
        again.load_state_dict(before.state_dict())
    messages = "; ".join(str(warning.message) for warning in caught)
    assert "micro_batch was 8, is 16" in messages
    assert "is SimiGrad(target=0.5" in messages
    assert 8 < again.plan.micro <= 16
    assert "0.5" in next(records(again)).decision.reason


def test_a_state_that_is_none_of_ours_is_refused_by_what_is_in_it():
    train = adaptive()
    with pytest.raises(StateError, match=r"'param_groups', 'state'.*is not one of AdaptiveBatch"):
        train.load_state_dict(train.optimizer.state_dict())
    with pytest.raises(StateError, match="version 5 is not 6"):
        train.load_state_dict({"version": 5})


LOADERS = {
    "AdaptiveBatch": lambda: adaptive(policy=Patient(), lr_scaling="adascale"),
    "DistributedState": lambda: bb.DistributedState(adaptive()),
    "Batches": lambda: bb.Batches(DataLoader(data(96), 16)),
    "Controller": lambda: bb.Controller(bb.SimiGrad(0.5), 32),
    "RunLog": lambda: bb.RunLog("never"),
    "VarianceReduced": lambda: VarianceReduced(torch.optim.Adam(classifier().parameters())),
    "LAMB": lambda: LAMB(classifier().parameters()),
}


def damaged_states(state):
    """A state without one of its values, or with another in its place; at both levels."""
    for name, value in state.items():
        yield {key: other for key, other in state.items() if key != name}
        for wrong in ("text", [1, 2], {"of": "others"}):
            yield {**state, name: wrong}
        if isinstance(value, dict) and name in ("shared", "own", "pass", "stream"):
            yield from ({**state, name: inner} for inner in damaged_states(value))


@pytest.mark.parametrize("name", LOADERS)
def test_what_is_no_state_is_refused_and_never_a_raw_error(name):
    loader = LOADERS[name]()
    more = (0,) if name == "Batches" else ()
    for state in (None, "text", [1], 3, {}, {"of": "others"}):
        with pytest.raises(StateError, match=f"a state .* is not one of {name} .*; pass what its"):
            loader.load_state_dict(state, *more)
    for state in damaged_states(loader.state_dict()):
        with suppress(StateError):  # some may be left out, or are of another kind of policy
            loader.load_state_dict(state, *more)


def test_an_error_of_a_policy_that_reads_its_own_state_is_left_as_it_is():
    train = adaptive(policy=Patient())
    state = train.state_dict()
    state["shared"]["controller"]["policy"] = {}
    with pytest.raises(KeyError, match="decisions"):
        train.load_state_dict(state)


@pytest.mark.parametrize("virtual", [1, 4])
def test_an_inner_loop_that_is_left_and_entered_again_continues_with_the_same_step(virtual):
    given, seen = [], []
    for leave in (False, True):
        train = adaptive(loader=bb.Batches(DataLoader(data(96), 16), virtual_ranks=virtual))
        gradient = handed_over(train)
        step, count = first_step(train), 0
        for batch in step:
            step.backward(loss_of(train, batch))
            count += len(batch[0])
            if leave:
                break
        for batch in step:
            step.backward(loss_of(train, batch))
            count += len(batch[0])
        assert count == step.update().batch_size
        given.append(gradient[0])
        seen.append(count)
    assert seen[0] == seen[1]
    assert same(*given)


def test_a_pass_that_continues_with_another_order_says_so():
    def loader(seed: int) -> DataLoader[Any]:
        return DataLoader(data(96), 16, sampler=bb.ElasticDistributedSampler(range(96), seed=seed))

    first = adaptive(loader=loader(1))
    next(records(first))
    again = adaptive(loader=loader(2))
    with pytest.warns(
        UserWarning,
        match=r"order was ElasticDistributedSampler\(seed=1, .*is ElasticDistributedSampler",
    ):
        again.load_state_dict(first.state_dict())


def test_fewer_samples_than_virtual_ranks_are_refused():
    with pytest.raises(SettingError, match=r"3 samples of an epoch are too few for 4 \(virtual"):
        adaptive(loader=bb.Batches(DataLoader(data(3), 2), virtual_ranks=4))
    one_each = adaptive(loader=bb.Batches(DataLoader(data(4), 2), virtual_ranks=4))
    assert 4 == one_each.plan.batch_size


# steps that are left, failed or taken back


class Numbered:
    """The samples of a pass, by the numbers that a loader gives with them."""

    def __init__(self, **more: Any) -> None:
        numbered = TensorDataset(torch.randn(48, 5, dtype=torch.float64), torch.arange(48))
        self.train = adaptive(loader=DataLoader(numbered, 8), policy=bb.Fixed(16), **more)
        self.seen: list[int] = []

    def step(self, step: bb.Step) -> bb.StepRecord:
        for x, numbers in step:
            self.seen += numbers.tolist()
            step.backward(self.train.model(x).square().mean())
        return step.update()


def test_a_step_that_was_given_out_and_not_begun_is_given_out_again():
    one = Numbered()
    for number, step in enumerate(one.train):
        if number == 1:
            break
        one.step(step)
    for step, _ in zip(one.train, range(1), strict=False):  # takes one more than it uses
        one.step(step)
    assert 2 == one.train.state_dict()["shared"]["counts"][2]
    for step in one.train:
        one.step(step)
    assert [*range(48)] == one.seen


def test_a_pass_that_leaves_its_steps_out_is_warned():
    with pytest.raises(LoopError, match=r"was not called.*load an earlier checkpoint"):
        for _ in adaptive():
            pass


@pytest.mark.parametrize("saved_at", [0, 1, 3], ids=["before", "inside", "after"])
def test_a_state_that_is_loaded_inside_the_pass_takes_it_back(saved_at):
    one = Numbered()
    states = [one.train.state_dict()]
    back, epochs = True, []
    for epoch in one.train.epochs(2):
        epochs.append(epoch)
        for step in one.train:
            one.step(step)
            states.append(one.train.state_dict())
            if back and len(states) == 6:  # in the second epoch
                one.train.load_state_dict(states[saved_at])
                back = False
    again = [*range(48), *range(48)][16 * saved_at :]
    assert [*range(48), *range(32), *again] == one.seen
    assert (2, 96) == (one.train.epoch, one.train.samples)
    assert (0, 1) == (epochs[0], epochs[-1])


def test_an_update_that_failed_half_way_is_not_done_twice():
    class Failing:
        def decide(self, noise: Any, now: Any) -> bb.Decision:
            raise OSError("the log is full")

    one = Numbered()
    start = one.train.state_dict()
    one.train.controller.policy = Failing()
    step = first_step(one.train)
    with pytest.raises(OSError, match="full"):
        one.step(step)
    with pytest.raises(LoopError, match=r"half way; load an earlier checkpoint"):
        step.update()
    one.train.controller.policy = bb.Fixed(16)
    one.train.load_state_dict(start)
    for step in one.train:
        one.step(step)
    assert 48 == one.train.samples


def test_a_rule_of_ones_own_keeps_what_it_remembers():
    class Falling:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, batch: int, base: int, noise: Any) -> float:
            self.calls += 1
            return 1 / self.calls

        def state_dict(self) -> dict[str, int]:
            return {"calls": self.calls}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.calls = state["calls"]

    def rates(one: Numbered, steps: int) -> list[float]:
        return [one.step(step).lr[0] for step, _ in zip(one.train, range(steps), strict=False)]

    uninterrupted = rates(Numbered(lr_scaling=Falling()), 3)
    with pytest.warns(UserWarning, match="lr_scaling was"):
        Numbered(lr_scaling=Falling()).train.load_state_dict(
            Numbered(lr_scaling="adascale").train.state_dict()
        )
    one, other = (Numbered(lr_scaling=Falling()) for _ in range(2))
    first = rates(one, 2)
    other.train.load_state_dict(one.train.state_dict())
    assert uninterrupted == first + rates(other, 1)


def test_batches_of_another_training_start_again():
    numbers = bb.Batches([torch.arange(i, i + 8) for i in range(0, 48, 8)])
    seen: list[list[int]] = []
    for _ in range(2):
        train = adaptive(loader=numbers, policy=bb.Fixed(16), batch_size=16, micro_batch=4)
        step = first_step(train)
        seen.append([n for chunk in step_chunks(train, step) for n in chunk.tolist()])
    assert [*range(16)] == seen[0] == seen[1]


def step_chunks(train: bb.AdaptiveBatch, step: bb.Step) -> Iterator[Tensor]:
    for chunk in step:
        yield chunk
        step.backward(train.model(chunk[:, None].double().expand(-1, 5)).square().mean())


# clipping


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "with a scaler"])
def test_clipping_is_by_what_is_trained_whether_scaled_or_not(scaled):
    model = classifier(torch.float32)
    opt = SGD(model[2].parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**16) if scaled else None
    loader = DataLoader(data(32, torch.float32), 16)
    train = bb.AdaptiveBatch(model, opt, loader, policy=bb.Fixed(32), scaler=scaler, every=1)
    step = first_step(train)
    for batch in step:
        step.backward(loss_of(train, batch))
    x, y = data(32, torch.float32).tensors
    grads = torch.autograd.grad(cross_entropy(model(x), y), [*model[2].parameters()])
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    assert pytest.approx(norm.item(), rel=1e-5) == step.clip_grad_norm_(norm.item() / 2).item()
    clipped = torch.cat([p.grad.flatten() for p in model[2].parameters()]).norm()
    assert pytest.approx(norm.item() / 2, rel=1e-4) == clipped.item()


@pytest.mark.parametrize("every", [1, 2], ids=["measured", "not measured"])
def test_a_gradient_that_is_truly_zero_may_be_clipped(every):
    model = classifier()
    opt, loader = SGD(model.parameters(), lr=0.1), DataLoader(data(48), 16)
    train = bb.AdaptiveBatch(model, opt, loader, policy=bb.Fixed(16), every=every)
    for step in train:
        for x, _ in step:
            step.backward((train.model(x) * 0).sum())
        nn.utils.clip_grad_norm_(train.model.parameters(), 1.0)
        step.update()
    assert 3 == train.steps


def test_a_controllers_start_out_of_its_bounds_is_said_by_the_loop():
    model, samples = nn.Linear(1, 1), TensorDataset(torch.zeros(64, 1))
    controller = bb.Controller(bb.SimiGrad(target=0.2, max_batch=32), 48)
    with pytest.warns(UserWarning, match=r"batch_size=48 is out of bounds; .* starts with 32"):
        bb.AdaptiveBatch(
            model, SGD(model.parameters(), 0.1), DataLoader(samples, 8), policy=controller, every=1
        )
