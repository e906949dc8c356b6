"""How the learning rate follows the batch: the factors, and how they leave no trace."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import bigbatch as bb
from bigbatch.errors import LoopError, SettingError
from bigbatch.optim import LAMB, LARS, VRSGD, VRAdam
from bigbatch.policies.lr_scaling import AdaScale, resolve_scaling
from bigbatch.training.step_rates import scale_lr
from property_tests import property_test

torch.set_num_threads(1)
often = property_test(200)
batch_sizes = st.integers(1, 2**20)
positive = st.floats(1e-9, 1e9)


def noise_of(signal: float, noise: float, samples: int = 64) -> bb.GradientStatistics:
    return bb.GradientStatistics(signal, noise, samples, micro_batches=4)


# factors


@pytest.mark.parametrize(
    ("rule", "factors"),
    [("sqrt", [0.5, 1.0, 2.0]), ("linear", [0.25, 1.0, 4.0]), (None, [1.0, 1.0, 1.0])],
)
def test_a_quarter_the_same_and_four_times_the_base_batch(rule, factors):
    factor = resolve_scaling(rule, 128)
    assert factors == [factor(batch_size, 128, None) for batch_size in (32, 128, 512)]


def test_adascale_has_its_name():
    assert isinstance(resolve_scaling("adascale", 128), AdaScale)


def test_a_function_of_ones_own_is_taken_as_it_is():
    def rule(batch_size: int, base_batch: int, noise: bb.GradientStatistics | None) -> float:
        return 3.0

    assert resolve_scaling(rule, 128) is rule


@pytest.mark.parametrize("name", ["square", "SQRT", "", "none"])
def test_an_unknown_rule_is_refused_with_its_name(name):
    with pytest.raises(SettingError, match=rf"lr_scaling='{name}'.*\"sqrt\""):
        resolve_scaling(name, 128)


@often
@given(base=batch_sizes, signal=positive, noise=positive)
def test_the_base_batch_itself_is_never_scaled(base, signal, noise):
    for name in ("sqrt", "linear", "adascale", None):
        assert 1.0 == resolve_scaling(name, base)(base, base, noise_of(signal, noise))


# AdaScale

# the average divides by what it multiplied with: a few roundings of float64
rounding = 1e-9


@often
@given(batch_size=batch_sizes, base=batch_sizes, signal=positive)
def test_adascale_without_noise_gains_nothing(batch_size, base, signal):
    assert 1.0 == AdaScale(base)(batch_size, base, noise_of(signal, 0.0))


@often
@given(batch_size=batch_sizes, base=batch_sizes, signal=st.floats(-1e9, 0.0), noise=positive)
def test_adascale_with_noise_alone_is_linear(batch_size, base, signal, noise):
    gain = AdaScale(base)(batch_size, base, noise_of(signal, noise))
    assert pytest.approx(batch_size / base, rel=rounding) == gain


@often
@given(batch_size=batch_sizes, base=batch_sizes, signal=positive, noise=positive)
def test_adascale_gains_between_nothing_and_linear(batch_size, base, signal, noise):
    gain = AdaScale(base)(batch_size, base, noise_of(signal, noise))
    low, high = sorted([1.0, batch_size / base])
    assert low * (1 - rounding) <= gain <= high * (1 + rounding)
    expected = (signal + noise / base) / (signal + noise / batch_size)
    assert pytest.approx(expected, rel=rounding) == gain


def test_adascale_before_any_measurement_is_one():
    assert 1.0 == AdaScale(64)(1024, 64, None)


def test_adascale_of_dead_gradients_is_one():
    assert 1.0 == AdaScale(64)(1024, 64, noise_of(0.0, 0.0))


def test_adascale_keeps_its_average_through_steps_without_a_measurement():
    rule = AdaScale(64)
    rule(256, 64, noise_of(1.0, 64.0))
    # (1 + 64/64) / (1 + 64/128)
    assert pytest.approx(2 / 1.5, rel=rounding) == rule(128, 64, None)


def test_adascale_averages_signal_and_noise_before_it_divides():
    rule = AdaScale(64)
    rule(256, 64, noise_of(-1.0, 64.0))
    gain = rule(256, 64, noise_of(3.0, 64.0))
    # two equal steps in a window of 1000 base batches weigh almost the same: signal 1.0005
    assert pytest.approx((1 + 1) / (1 + 0.25), rel=1e-3) == gain


def test_adascale_continues_from_a_saved_state_bit_for_bit():
    steps = [noise_of(s, n) for s, n in [(1.0, 64.0), (-0.5, 90.0), (0.3, 70.0), (0.2, 50.0)]]
    uninterrupted, first = AdaScale(64), AdaScale(64)
    expected = [uninterrupted(256, 64, noise) for noise in steps]
    for noise in steps[:2]:
        first(256, 64, noise)
    second = AdaScale(64)
    second.load_state_dict(first.state_dict())
    assert expected[2:] == [second(256, 64, noise) for noise in steps[2:]]


def test_a_restored_adascale_knows_its_gain_before_the_next_measurement():
    first, second = AdaScale(64), AdaScale(64)
    first(256, 64, noise_of(1.0, 64.0))
    second.load_state_dict(first.state_dict())
    assert first(256, 64, None) == second(256, 64, None)


# around the step


def optimizer_with(*rates: float | Tensor) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in rates]
    return torch.optim.SGD(groups)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float | Tensor]:
    return [group["lr"] for group in optimizer.param_groups]


@often
@given(rates=st.lists(st.floats(0.0, 1e3), min_size=1, max_size=3), factor=st.floats(0.0, 1e6))
def test_inside_the_rates_are_multiplied_and_afterwards_the_very_same(rates, factor):
    optimizer = optimizer_with(*rates)
    with scale_lr(optimizer, factor) as used:
        assert [lr * factor for lr in rates] == rates_of(optimizer) == used
    assert rates == rates_of(optimizer)


def test_the_rates_come_back_after_an_error():
    optimizer = optimizer_with(0.1, 0.3)
    with pytest.raises(ZeroDivisionError), scale_lr(optimizer, 3.0):
        raise ZeroDivisionError
    assert [0.1, 0.3] == rates_of(optimizer)


@often
@given(rate=st.floats(0.0, 1024.0, width=32), factor=st.floats(0.0, 1e6))
def test_a_tensor_rate_is_multiplied_in_place_and_comes_back_to_the_last_bit(rate, factor):
    tensor = torch.tensor(rate)
    optimizer = optimizer_with(tensor, 0.3)
    with scale_lr(optimizer, factor) as used:
        assert optimizer.param_groups[0]["lr"] is tensor
        assert [(torch.tensor(rate) * factor).item(), 0.3 * factor] == used
        assert used == [float(lr) for lr in rates_of(optimizer)]
    assert optimizer.param_groups[0]["lr"] is tensor
    assert rate == tensor.item()


def test_a_tensor_that_groups_share_is_multiplied_once():
    shared = torch.tensor(0.25)
    optimizer = optimizer_with(shared, shared, torch.tensor(0.25))
    with scale_lr(optimizer, 3.0) as used:
        assert [0.75, 0.75, 0.75] == used
    assert [0.25, 0.25, 0.25] == rates_of(optimizer)


def test_a_group_that_is_added_inside_keeps_its_own_rate():
    optimizer = optimizer_with(0.1)
    with scale_lr(optimizer, 3.0):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.5})
    assert [0.1, 0.5] == rates_of(optimizer)


def test_a_rate_that_is_learnt_itself_is_multiplied_without_a_graph():
    rate = torch.nn.Parameter(torch.tensor(0.25))
    with scale_lr(optimizer_with(rate), 3.0) as used:
        assert [0.75] == used
    assert 0.25 == rate.item()
    assert rate.is_leaf


def test_a_number_stays_a_number_whatever_the_factor_is():
    optimizer = optimizer_with(0.25)
    with scale_lr(optimizer, torch.tensor(3.0)):
        assert type(optimizer.param_groups[0]["lr"]) is float


@pytest.mark.parametrize("factor", [-0.5, math.inf, math.nan])
def test_a_factor_that_is_none_is_refused_and_nothing_touched(factor):
    optimizer = optimizer_with(0.1)
    with pytest.raises(SettingError, match=f"factor {factor}"), scale_lr(optimizer, factor):
        pytest.fail("the block ran")
    assert [0.1] == rates_of(optimizer)


# two parties

both_kinds = pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """As torch's schedulers do."""
    group = optimizer.param_groups[-1]
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


@both_kinds
def test_a_rate_that_somebody_else_sets_inside_is_an_error_and_the_old_ones_are_back(kind):
    optimizer = optimizer_with(kind(0.125), kind(0.25))
    with (
        pytest.raises(LoopError, match=r"group 1 was set to 2\.0 .* set 0\.75; .*lr_scaling=None"),
        scale_lr(optimizer, 3.0),
    ):
        set_rate(optimizer, 2.0)
    assert [0.125, 0.25] == rates_of(optimizer)


def test_a_tensor_in_place_of_a_number_and_the_other_way_round_are_found_too():
    for before, other in [(0.25, torch.tensor(2.0)), (torch.tensor(0.25), 2.0)]:
        optimizer = optimizer_with(before)
        with pytest.raises(LoopError, match=r"set to 2\.0"), scale_lr(optimizer, 3.0):
            optimizer.param_groups[0]["lr"] = other
        assert optimizer.param_groups[0]["lr"] is before
        assert 0.25 == float(before)


@both_kinds
def test_whoever_puts_a_rate_back_inside_disturbs_nobody(kind):
    optimizer = optimizer_with(kind(0.25))
    with scale_lr(optimizer, 3.0):
        set_rate(optimizer, 2.0)
        set_rate(optimizer, 0.75)
    assert [0.25] == rates_of(optimizer)


@both_kinds
def test_an_error_inside_is_not_hidden_by_a_rate_that_somebody_else_set(kind):
    def set_and_fail() -> None:
        set_rate(optimizer, 2.0)
        raise ZeroDivisionError

    optimizer = optimizer_with(kind(0.25))
    with pytest.raises(ZeroDivisionError), scale_lr(optimizer, 3.0):
        set_and_fail()
    assert [0.25] == rates_of(optimizer)


@both_kinds
def test_a_factor_of_one_leaves_the_rates_to_others(kind):
    optimizer = optimizer_with(kind(0.25))
    with scale_lr(optimizer, 1.0) as used:
        set_rate(optimizer, 2.0)
    assert [0.25] == used
    assert [2.0] == rates_of(optimizer)


NO_RATES = [math.nan, math.inf, -0.1, "0.1", 1j, [0.1], None, 10**40, 10**400]
NO_RATES += [torch.tensor(math.nan), torch.tensor(-1.0), torch.ones(2)]


@pytest.mark.parametrize("rate", NO_RATES, ids=lambda rate: str(rate)[:42])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_what_is_no_rate_is_refused_by_its_group_and_left_as_it_is(rate, factor):
    optimizer = optimizer_with(0.1, 0.2)
    optimizer.param_groups[1]["lr"] = rate
    with pytest.raises(SettingError, match="group 1 "), scale_lr(optimizer, factor):
        pytest.fail("the block ran")
    assert 0.1 == optimizer.param_groups[0]["lr"]
    assert rate is optimizer.param_groups[1]["lr"]


@pytest.mark.parametrize("rate", NO_RATES, ids=lambda rate: str(rate)[:42])
@pytest.mark.parametrize("lr_scaling", ["sqrt", None])
def test_no_step_is_taken_at_what_is_no_rate_and_the_next_one_is(rate, lr_scaling):
    model = torch.nn.Linear(4, 1)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), [torch.randn(96, 4)]
    sizes = {"base_batch": 8, "micro_batch": 4}
    train = bb.AdaptiveBatch(
        model, optimizer, data, policy=bb.Fixed(16), lr_scaling=lr_scaling, **sizes
    )
    for number, step in enumerate(train):
        for x in step:
            step.backward(model(x).square().mean())
        if number == 1:
            weights = [p.clone() for p in model.parameters()]
            optimizer.param_groups[0]["lr"] = rate
            with pytest.raises(SettingError, match="rate of parameter group 0 was set to"):
                step.update()
            assert all(map(torch.equal, weights, model.parameters()))
            optimizer.param_groups[0]["lr"] = 0.1
        step.update()
        if number == 2:
            break
    assert 3 == train.steps


@pytest.mark.parametrize("rate", NO_RATES, ids=lambda rate: str(rate)[:42])
@pytest.mark.parametrize("optimizer", [LARS, LAMB, VRSGD, VRAdam])
def test_an_optimizer_alone_takes_no_step_at_what_is_no_rate_either(optimizer, rate):
    weight = torch.nn.Parameter(torch.ones(3))
    alone = optimizer([weight], lr=0.1)
    for _ in range(2):
        weight.square().sum().backward()
    alone.param_groups[0]["lr"] = rate
    with pytest.raises(SettingError, match="rate of parameter group 0 was set to"):
        alone.step()
    assert [1.0, 1.0, 1.0] == weight.tolist()


# without a rate


class Rateless(torch.optim.SGD):
    """Chooses its step itself in its second group, as Adafactor does without an `lr`."""

    def __init__(self, parameters: Iterable[Tensor], *, none: bool = True, **more: Any) -> None:
        first, *others = parameters
        super().__init__([{"params": [first]}, {"params": others}], **more)
        if none:
            self.param_groups[1]["lr"] = self.defaults["lr"] = None
        else:
            del self.param_groups[1]["lr"]

    def step(self, closure: None = None) -> None:
        """Steps by 0.5 there."""
        for parameter in self.param_groups[1]["params"]:
            parameter.data.sub_(parameter.grad, alpha=0.5)


@pytest.mark.parametrize("none", [True, False])
def test_a_group_without_a_rate_is_refused_by_its_number_before_anything_is_touched(none):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = Rateless(parameters, none=none, lr=0.1)
    with (
        pytest.raises(SettingError, match=r"group 1 has no learning rate.*lr_scaling=None"),
        scale_lr(optimizer, 3.0),
    ):
        pytest.fail("the block ran")
    assert 0.1 == optimizer.param_groups[0]["lr"]
    with scale_lr(optimizer, 1.0) as used:
        assert 0.1 == used[0]
        assert math.isnan(used[1])


# in the loop


def one_step(
    optimizer_of: Callable[..., torch.optim.Optimizer],
    lr: float | Tensor,
    *,
    hook: Callable[..., None] = lambda *_: None,
    **more: object,
) -> tuple[list[float], bb.StepRecord, torch.optim.Optimizer]:
    """(rates that the optimizer stepped with, the record, the optimizer afterwards)."""
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 1)
    optimizer = optimizer_of(model.parameters(), lr=lr)
    used: list[float] = []
    optimizer.register_step_pre_hook(lambda o, *_: used.append(float(o.param_groups[0]["lr"])))
    optimizer.register_step_post_hook(hook)
    loader = [torch.randn(96, 4)]
    train = bb.AdaptiveBatch(
        model,
        optimizer,
        loader,
        policy=bb.Fixed(96),
        batch_size=96,
        base_batch=32,
        micro_batch=24,
        **more,
        every=1,
    )
    for step in train:
        for x in step:
            step.backward(model(x).square().mean())
        record = step.update()
    return used, record, optimizer


@pytest.mark.parametrize(
    ("rule", "factor"),
    [
        ("sqrt", math.sqrt(3)),
        ("linear", 3.0),
        (None, 1.0),
        (lambda batch, base, noise: batch / base / noise.micro_batches, 0.75),
    ],
)
def test_the_optimizer_steps_with_the_scaled_rate_and_the_record_says_it(rule, factor):
    used, record, optimizer = one_step(torch.optim.SGD, 0.1, lr_scaling=rule)
    assert [0.1 * factor] == used == list(record.lr)
    assert [0.1] == rates_of(optimizer)


def test_the_optimizer_steps_with_adascale_of_what_was_measured():
    used, record, _ = one_step(torch.optim.SGD, 0.1, lr_scaling="adascale")
    signal, noise = max(0.0, record.statistics.grad_sqnorm), record.statistics.grad_variance
    gain = (signal + noise / 32) / (signal + noise / 96)
    assert pytest.approx(0.1 * gain, rel=rounding) == used[0]
    assert 1.0 < gain < 3.0


@pytest.mark.parametrize("factor", [-1.0, math.inf, math.nan])
def test_a_rule_of_ones_own_that_gives_no_factor_is_refused_with_its_value(factor):
    with pytest.raises(SettingError, match=f"factor {factor}"):
        one_step(torch.optim.SGD, 0.1, lr_scaling=lambda batch, base, noise: factor)


def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A scheduler in a hook of the optimizer."""
    set_rate(optimizer, 0.5 * float(optimizer.param_groups[-1]["lr"]))


@both_kinds
@pytest.mark.parametrize("rule", ["sqrt", "linear", "adascale"])
def test_a_hook_that_schedules_inside_the_step_cannot_go_with_scaling(rule, kind):
    with pytest.raises(LoopError, match="during the step"):
        one_step(torch.optim.SGD, kind(0.25), lr_scaling=rule, hook=halve)


@both_kinds
def test_a_hook_that_schedules_inside_the_step_goes_with_no_scaling(kind):
    used, record, optimizer = one_step(torch.optim.SGD, kind(0.25), lr_scaling=None, hook=halve)
    assert [0.25] == used == list(record.lr)
    assert [0.125] == rates_of(optimizer)


def test_an_optimizer_that_chooses_its_own_step_goes_with_no_scaling():
    with pytest.raises(SettingError, match="group 1 has no learning rate"):
        one_step(Rateless, 0.1, lr_scaling="sqrt")
    _, record, _ = one_step(Rateless, 0.1, lr_scaling=None)
    assert 0.1 == record.lr[0]
    assert math.isnan(record.lr[1])


@pytest.mark.parametrize("fused", [False, True])
def test_one_tensor_for_all_groups_trains_as_a_number_does(fused):
    def weights(lr: float | Tensor) -> list[Tensor]:
        def optimizer_of(parameters: Iterable[Tensor], lr: float | Tensor) -> torch.optim.AdamW:
            return torch.optim.AdamW([{"params": [p]} for p in parameters], lr=lr, fused=fused)

        _, _, optimizer = one_step(optimizer_of, lr, lr_scaling="linear")
        return [p.detach() for group in optimizer.param_groups for p in group["params"]]

    # float32: a rate of float32 is 1e-7 off
    torch.testing.assert_close(weights(0.1), weights(torch.tensor(0.1)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, torch.optim.AdamW])
def test_a_tensor_rate_is_recorded_as_it_was_used(optimizer_of):
    rate = torch.tensor(0.1)
    used, record, optimizer = one_step(optimizer_of, rate, lr_scaling="sqrt")
    assert used == list(record.lr)
    assert optimizer.param_groups[0]["lr"] is rate
    assert torch.tensor(0.1).item() == rate.item()
