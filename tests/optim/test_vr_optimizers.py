"""VRSGD, VR-Momentum, VRAdam and VarianceReduced(any): numbers, torch's contract, torch's loops."""

import copy
import gc
import io
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.errors import GradientError, SettingError
from bigbatch.optim import VRSGD, VarianceReduced, VRAdam
from oracles import vr
from tensors import difference, pickled, same, through_a_file, values

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:k = [2-7] micro-batches:UserWarning")

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]

# One float64 rounding is 1e-16; a weight whose k gradients agree to 1 in 1e4 owns its layer's mean
# and loses 4 digits of it; the moments of 20 steps add up. A wrong formula is off by 1e-3 or more.
CLOSE = 1e-10

# library, oracle, settings that both take
RULES = {
    "VRSGD": (VRSGD, vr.VRSGD, {"lr": 0.1}),
    "VRSGD-decay": (VRSGD, vr.VRSGD, {"lr": 0.1, "weight_decay": 0.1, "beta3": 0.8}),
    "VRMomentum": (VRSGD, vr.VRSGD, {"lr": 0.02, "momentum": 0.9}),
    "VRMomentum-damped": (
        VRSGD,
        vr.VRSGD,
        {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    ),
    "VRMomentum-nesterov": (
        VRSGD,
        vr.VRSGD,
        {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "VRAdam": (VRAdam, vr.VRAdam, {"lr": 0.02}),
    "VRAdam-decay": (
        VRAdam,
        vr.VRAdam,
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1, "beta3": 0.7},
    ),
}
every_rule = pytest.mark.parametrize("rule", RULES)
main_rules = pytest.mark.parametrize("rule", ["VRSGD", "VRMomentum", "VRAdam"])

BASES: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "SGD": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "AdamW-fused": lambda params: AdamW(params, lr=0.02, fused=True),
    "Adafactor": lambda params: Adafactor(params, lr=0.02),
    "Muon": lambda params: Muon(params, lr=0.02),  # takes matrices only, so `matrices` below
}
every_base = pytest.mark.parametrize("base", BASES)

OPTIMIZERS: dict[str, Callable[..., VarianceReduced]] = {
    "VRSGD": lambda params, **own: VRSGD(params, lr=0.1, **own),
    "VRMomentum": lambda params, **own: VRSGD(params, lr=0.02, momentum=0.9, **own),
    "VRAdam": lambda params, **own: VRAdam(params, lr=0.02, **own),
} | {
    f"VarianceReduced-{name}": lambda params, make=make, **own: VarianceReduced(make(params), **own)
    for name, make in BASES.items()
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 4), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(4, 1)).to(dtype)


def matrices(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False)]
    return nn.Sequential(*layers).double()


def batches(k: int, seed: int, size: int = 4, dtype: torch.dtype = torch.float64) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(k, size, 5, generator=generator, dtype=torch.float64)
    y = x[..., :1] + x[..., 1:2] * x[..., 2:3]
    return list(zip(x.to(dtype), y.to(dtype), strict=True))


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def micro_gradients(
    model: nn.Module, micro: Sequence[Batch], loss: Loss = squared_error
) -> list[vr.Gradients]:
    """For each parameter its mean gradient on every micro-batch, from a copy that has no hooks."""
    replica = copy.deepcopy(model)
    weights = [p for p in replica.parameters() if p.requires_grad]
    by_batch = [
        torch.autograd.grad(loss(replica, batch), weights, allow_unused=True) for batch in micro
    ]
    columns = iter(zip(*by_batch, strict=True))
    return [next(columns) if p.requires_grad else [None] * len(micro) for p in replica.parameters()]


def accumulate(model: nn.Module, micro: Sequence[Batch], loss: Loss = squared_error) -> None:
    for batch in micro:
        (loss(model, batch) / len(micro)).backward()


def step_on(model: nn.Module, optimizer: Optimizer, micro: Sequence[Batch]) -> None:
    accumulate(model, micro)
    optimizer.step()
    optimizer.zero_grad()


def train(model: nn.Module, optimizer: Optimizer, seeds: Iterable[int], k: int = 8) -> None:
    for seed in seeds:
        step_on(model, optimizer, batches(k, seed))


def train_both(
    model: nn.Module,
    optimizer: Optimizer,
    oracle: vr.VRSGD | vr.VRAdam,
    seeds: Iterable[int],
    k: int = 8,
    loss: Loss = squared_error,
) -> None:
    """The same micro-batch gradients, to the bit, for the optimizer and the oracle."""
    for seed in seeds:
        micro = batches(k, seed)
        oracle.step(micro_gradients(model, micro, loss))
        accumulate(model, micro, loss)
        optimizer.step()
        optimizer.zero_grad()


def pair(rule: str, model: nn.Module, **own: Any) -> tuple[VarianceReduced, vr.VRSGD | vr.VRAdam]:
    """The optimizer of a rule and its oracle, with the same settings."""
    library, oracle, settings = RULES[rule]
    settings = settings | own
    return library(model.parameters(), **settings), oracle(model.parameters(), **settings)


class Rows(nn.Module):
    """A vector whose micro-batch gradients are exactly the rows that it is called on."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, row: Tensor) -> Tensor:
        return (self.weight * row).sum()


def rows(k: int, size: int, seed: int, mean: float = 0.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(k, size, generator=generator, dtype=torch.float64) + mean


def stepped_gradient(gradients: Tensor, gamma: float = 0.1, r_max: float = 1.0) -> Tensor:
    """r g of a layer that has these micro-batch gradients, as left in `.grad` by a step."""
    model = Rows(gradients.shape[1], gradients.dtype)
    optimizer = VRSGD(model.parameters(), lr=1.0, gamma=gamma, r_max=r_max)
    for row in gradients:
        (model(row) / len(gradients)).backward()
    optimizer.step()
    return model.weight.grad


def expected_step(gradients: Tensor, gamma: float = 0.1, r_max: float = 1.0) -> Tensor:
    ones = [1.0] * len(gradients)
    g_ds = list(gradients.double())
    return vr.gsnr(g_ds, ones, gamma, r_max) * vr.mean(g_ds, ones)


# the numbers


@every_rule
@pytest.mark.parametrize("r_max", [1.0, 10.0], ids=["r_max=1", "r_max=1/gamma"])
@pytest.mark.parametrize("k", [2, 3, 8, pytest.param(64, marks=pytest.mark.release)])
def test_twenty_steps_equal_the_oracle(rule: str, k: int, r_max: float) -> None:
    model = network()
    optimizer, oracle = pair(rule, model, gamma=0.1, r_max=r_max)
    train_both(model, optimizer, oracle, seeds=range(20), k=k)
    assert difference(oracle.params, model) < CLOSE


@pytest.mark.parametrize("gamma", [0.01, 0.5, 1.0])
def test_gamma_is_the_least_factor_and_r_max_the_largest(gamma: float) -> None:
    gradients = rows(8, 200, seed=0)
    factor = stepped_gradient(gradients, gamma=gamma, r_max=3.0) / gradients.mean(0)
    # both ends are reached, to a rounding of the quotient
    assert pytest.approx((gamma, 3.0), rel=1e-12) == (factor.min().item(), factor.max().item())


def test_after_the_step_grad_holds_what_the_base_stepped_along() -> None:
    gradients = rows(8, 50, seed=0)
    assert difference([expected_step(gradients)], [stepped_gradient(gradients)]) < CLOSE


@pytest.mark.thorough
@every_rule
def test_float32_stays_close_to_the_float64_oracle(rule: str) -> None:
    model = network(dtype=torch.float32)
    optimizer, oracle = pair(rule, model)
    for seed in range(20):
        micro = batches(8, seed, dtype=torch.float32)
        oracle.step(micro_gradients(model, micro))  # divided by k = 8, exact in float32
        step_on(model, optimizer, micro)
    # a float32 rounding, 6e-8, in weights, in sums of gradients that partly cancel, 20 times
    assert difference(oracle.params, model) < 1e-4


def test_signal_to_noise_of_a_million_survives_float32() -> None:
    gradients = (1 + 1e-3 * rows(64, 100, seed=0, mean=0.0)).float()
    # the running mean is rounded to 6e-8, 6e-5 of a deviation; E[g^2] - g^2 would be off by 8e-2
    expected = expected_step(gradients, gamma=0.01, r_max=100.0)
    assert difference([expected], [stepped_gradient(gradients, gamma=0.01, r_max=100.0)]) < 1e-3


def test_bfloat16_gradients_are_squared_and_summed_in_float32() -> None:
    gradients = (1 + 0.1 * rows(8, 200, seed=0, mean=0.0)).bfloat16()
    # .grad is rounded to 4e-3 in every sum; a variance in bfloat16 would be off by 0.05 of itself
    factor = stepped_gradient(gradients).double() / gradients.double().mean(0)
    expected = expected_step(gradients) / gradients.double().mean(0)
    assert difference([expected], [factor]) < 0.03


@every_optimizer
def test_bfloat16_parameters_train_without_nan(name: str) -> None:
    model = matrices().bfloat16()
    before = values(model)
    optimizer = OPTIMIZERS[name](model.parameters(), beta3=0.9)
    for seed in range(5):
        step_on(model, optimizer, batches(8, seed, dtype=torch.bfloat16))
    assert not same(before, model)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("scale", [1e-12, 1e12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_factor_does_not_depend_on_the_scale_of_the_loss(
    scale: float, dtype: torch.dtype
) -> None:
    gradients = rows(8, 100, seed=0).to(dtype)
    expected = stepped_gradient(gradients) / gradients.sum(0)
    scaled = gradients * scale
    # nothing but roundings of the scaled gradients, in deviations 10 times smaller than they are
    tolerance = 100 * torch.finfo(dtype).eps
    assert difference([expected], [stepped_gradient(scaled) / scaled.sum(0)]) < tolerance


# where the base optimizer must come out

PLAIN = {
    "SGD": (VRSGD, SGD, {"lr": 0.1}),
    "SGD-momentum": (VRSGD, SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "SGD-nesterov": (
        VRSGD,
        SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "SGD-maximize": (VRSGD, SGD, {"lr": 0.01, "maximize": True}),
    "AdamW": (VRAdam, AdamW, {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    "AdamW-eps": (VRAdam, AdamW, {"lr": 0.02, "weight_decay": 0.0, "eps": 1e-3}),
}


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("named", PLAIN)
def test_gamma_one_is_the_plain_optimizer(named: str, fused: bool) -> None:
    scaled, plain, settings = PLAIN[named]
    ours, theirs = network(), network()
    off = {"gamma": 1.0, "r_max": 1.0, "beta3": None}
    train(ours, scaled(ours.parameters(), **settings, **off, fused=fused), seeds=range(10))
    train(theirs, plain(theirs.parameters(), **settings, fused=fused), seeds=range(10))
    assert same(theirs, ours)  # r is 1 exactly, so nothing is rounded


def test_gamma_one_with_momentum_on_r_is_adamw_up_to_rounding() -> None:
    ours, theirs = network(), network()
    train(ours, VRAdam(ours.parameters(), lr=0.02, gamma=1.0, r_max=1.0), seeds=range(10))
    train(theirs, AdamW(theirs.parameters(), lr=0.02, weight_decay=0.0), seeds=range(10))
    assert difference(theirs, ours) < 1e-12  # p_hat is 1 to a few roundings


@every_base
def test_gamma_one_is_the_bare_base(base: str) -> None:
    ours, theirs = matrices(), matrices()
    optimizer = VarianceReduced(BASES[base](ours.parameters()), gamma=1.0, r_max=1.0)
    train(ours, optimizer, seeds=range(10))
    train(theirs, BASES[base](theirs.parameters()), seeds=range(10))
    assert same(theirs, ours)


@every_base
def test_gamma_below_one_is_not_the_bare_base(base: str) -> None:
    ours, theirs = matrices(), matrices()
    train(ours, VarianceReduced(BASES[base](ours.parameters())), seeds=range(3))
    train(theirs, BASES[base](theirs.parameters()), seeds=range(3))
    assert difference(theirs, ours) > 1e-3


@pytest.mark.parametrize("r_max", [1.0, 10.0])
def test_a_layer_of_one_weight_is_plain_sgd(r_max: float) -> None:
    ours, theirs = Rows(1), Rows(1)
    scaled = VRSGD(ours.parameters(), lr=0.1, gamma=0.1, r_max=r_max)
    plain = SGD(theirs.parameters(), lr=0.1)
    for row in rows(8, 1, seed=0):
        ours(row).backward()
        theirs(row).backward()
    scaled.step()
    plain.step()
    assert same(theirs, ours)


# weights without a variance


@main_rules
@pytest.mark.parametrize(
    ("dead", "steps"), [([2], 10), (range(6), 3)], ids=["one-unit", "whole-layer"]
)
def test_dead_relu_units_give_no_nan_stay_and_do_not_count(
    rule: str, dead: Iterable[int], steps: int
) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 1)).double()
    dead = list(dead)
    with torch.no_grad():
        model[0].bias[dead] = -100.0
    before = values(p[dead] for p in model[0].parameters())
    optimizer, oracle = pair(rule, model)
    train_both(model, optimizer, oracle, seeds=range(steps))
    assert same(before, [p[dead] for p in model[0].parameters()])
    assert difference(oracle.params, model) < CLOSE


def test_the_average_of_r_decays_to_gamma_while_a_weight_is_dead() -> None:
    model = Rows(20)
    settings = {"lr": 0.1, "gamma": 0.1, "r_max": 10.0, "beta3": 0.5}
    optimizer, oracle = pair("VRSGD", model, **settings)
    for step in range(6):
        gradients = rows(8, 20, seed=step)
        gradients[:, 0] *= step not in (2, 3)
        oracle.step([list(gradients)])
        for row in gradients:
            (model(row) / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert difference(oracle.params, model) < CLOSE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("k", [2, 3, 4, 8, 64])
def test_a_weight_on_which_all_agree_gets_r_max_and_does_not_count(
    k: int, dtype: torch.dtype
) -> None:
    gradients = rows(k, 20, seed=0).to(dtype)
    gradients[:, 0] = 0.1  # not a binary fraction: its sums are rounded
    expected = expected_step(gradients, r_max=10.0)
    # a float32 rounding over the smallest deviation; counting the exact weight is off by 0.9
    assert difference([expected], [stepped_gradient(gradients, r_max=10.0)]) < 1e-4


def test_gradients_that_are_all_identical_are_reported() -> None:
    model = network()
    one = batches(1, seed=0)
    refused = pytest.raises((GradientError, UserWarning), match=r"identical|the same")
    with warnings.catch_warnings(action="error"), refused:
        step_on(model, VRSGD(model.parameters(), lr=0.1), one * 8)


# micro-batches, counted


def test_fewer_than_eight_micro_batches_warn_once() -> None:
    model = network()
    optimizer = VRSGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="k = 7 .*use k >= 8") as seen:
        train(model, optimizer, seeds=range(3), k=7)
    assert len(seen) == 1


def test_eight_micro_batches_do_not_warn() -> None:
    model = network()
    with warnings.catch_warnings(action="error"):
        train(model, VRSGD(model.parameters(), lr=0.1), seeds=range(2), k=8)


ZEROINGS: dict[str, Callable[[nn.Module, Optimizer], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer-keeping": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model-keeping": lambda model, optimizer: model.zero_grad(set_to_none=False),
}
every_zeroing = pytest.mark.parametrize("zeroing", ZEROINGS)


@every_zeroing
@main_rules
def test_any_zero_grad_between_steps_will_do(rule: str, zeroing: str) -> None:
    model = network()
    optimizer, oracle = pair(rule, model)
    for seed in range(3):
        micro = batches(8, seed)
        oracle.step(micro_gradients(model, micro))
        accumulate(model, micro)
        optimizer.step()
        ZEROINGS[zeroing](model, optimizer)
    assert difference(oracle.params, model) < CLOSE


@every_zeroing
def test_micro_batches_before_a_zero_grad_are_forgotten(zeroing: str) -> None:
    model = network()
    optimizer, oracle = pair("VRAdam", model)
    accumulate(model, batches(5, seed=99))
    ZEROINGS[zeroing](model, optimizer)
    train_both(model, optimizer, oracle, seeds=[0])
    assert difference(oracle.params, model) < CLOSE


@every_zeroing
def test_a_zero_grad_leaves_no_micro_batch_to_step_on(zeroing: str) -> None:
    model = network()
    optimizer = VRSGD(model.parameters(), lr=0.1)
    accumulate(model, batches(8, seed=99))
    ZEROINGS[zeroing](model, optimizer)
    accumulate(model, batches(1, seed=0))
    with pytest.raises(GradientError, match="saw 1 "):
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_right_after_zero_grad_is_refused(set_to_none: bool) -> None:
    model = network()
    optimizer = VRSGD(model.parameters(), lr=0.1)
    accumulate(model, batches(8, seed=0))
    optimizer.zero_grad(set_to_none=set_to_none)
    with pytest.raises(GradientError, match="saw 0 "):
        optimizer.step()


@every_zeroing
@main_rules
def test_a_step_that_the_scaler_skips_changes_nothing(rule: str, zeroing: str) -> None:
    model = network()
    optimizer, oracle = pair(rule, model, beta3=0.9)
    train_both(model, optimizer, oracle, seeds=range(3))
    before, state = values(model), copy.deepcopy(optimizer.state_dict())
    scaler = torch.amp.GradScaler(device="cpu", enabled=True)
    micro = batches(8, seed=3)
    for overflows in (True, False):
        if not overflows:
            oracle.step(micro_gradients(model, micro))
        for d, batch in enumerate(micro):
            blow_up = float("inf") if overflows and d == 5 else 1.0
            (scaler.scale(squared_error(model, batch)) * blow_up / 8).backward()
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            assert same(before, model)
            torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
        ZEROINGS[zeroing](model, optimizer)
    assert difference(oracle.params, model) < CLOSE  # loss scales are powers of 2: exact


def test_a_forgotten_zero_grad_is_refused() -> None:
    model = network()
    optimizer = VRSGD(model.parameters(), lr=0.1)
    accumulate(model, batches(8, seed=0))
    optimizer.step()
    with pytest.raises(GradientError, match=r"\.grad is not empty .* call zero_grad\(\)"):
        accumulate(model, batches(8, seed=1))


def test_a_gradient_put_there_by_hand_is_refused() -> None:
    model = network()
    optimizer = VRSGD(model.parameters(), lr=0.1)
    next(model.parameters()).grad = torch.ones(7, 5, dtype=torch.float64)
    with pytest.raises(GradientError, match=r"\.grad is not empty"):
        accumulate(model, batches(8, seed=0))
    optimizer.zero_grad()


def test_a_gradient_edited_between_micro_batches_is_refused() -> None:
    model = network()
    optimizer = VRSGD(model.parameters(), lr=0.1)
    accumulate(model, batches(4, seed=0))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(GradientError, match=r"\.grad was changed"):
        accumulate(model, batches(4, seed=1))
    optimizer.zero_grad()


def test_a_penalty_by_autograd_grad_over_the_inputs_is_no_micro_batch() -> None:
    def penalized(model: nn.Module, batch: Batch) -> Tensor:
        x = batch[0].clone().requires_grad_()
        loss = squared_error(model, (x, batch[1]))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()

    model = network()
    optimizer, oracle = pair("VRSGD", model)
    train_both(model, optimizer, oracle, seeds=range(3), loss=penalized)
    assert difference(oracle.params, model) < CLOSE


def test_a_step_after_a_backward_that_failed_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1)).double()
    optimizer = VRSGD(model.parameters(), lr=0.1)
    accumulate(model, batches(2, seed=0))
    handle = model[0].weight.register_hook(out_of_memory)
    before = values(model)
    with pytest.raises(MemoryError):
        squared_error(model, batches(1, seed=1)[0]).backward()
    handle.remove()
    with pytest.raises(GradientError, match="the last backward did not finish"):
        optimizer.step()
    assert same(before, model)


def test_autograd_grad_over_the_parameters_is_no_micro_batch() -> None:
    model = network()
    optimizer, oracle = pair("VRSGD", model)
    micro = batches(4, seed=0)
    oracle.step(micro_gradients(model, micro))
    accumulate(model, micro)
    torch.autograd.grad(squared_error(model, batches(1, seed=1)[0]), model.parameters())
    optimizer.step()
    assert difference(oracle.params, model) < CLOSE


def out_of_memory(gradient: Tensor) -> None:
    raise MemoryError


@pytest.mark.parametrize("zeroing", ["optimizer", "model"])
def test_a_backward_that_failed_is_forgotten_with_its_gradients(zeroing: str) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1)).double()
    optimizer, oracle = pair("VRSGD", model)
    hidden = model[0](batches(1, seed=0)[0][0])
    hidden.register_hook(out_of_memory)
    with pytest.raises(MemoryError):  # after the gradient of the last layer, before the first's
        model[1](hidden).mean().backward()
    ZEROINGS[zeroing](model, optimizer)
    train_both(model, optimizer, oracle, seeds=[1])
    assert difference(oracle.params, model) < CLOSE


# parameters that not every micro-batch reaches


class Branches(nn.Module):
    """One branch for every batch; another for those whose first target is positive."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.often = nn.Linear(5, 3).double()
        self.rarely = nn.Linear(5, 3).double()
        self.never = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out = self.often(x)
        if x[0, 0] > 0:
            out = out + self.rarely(x)
        return out.sum(1, keepdim=True)


def branch_batches(reached: Iterable[int], seed: int) -> list[Batch]:
    """Eight micro-batches, of which those in `reached` take the rare branch."""
    micro = batches(8, seed)
    for d, (x, _) in enumerate(micro):
        x[0, 0] = x[0, 0].abs() if d in reached else -x[0, 0].abs()
    return micro


REACHED = {"early": range(5), "late": range(3, 8), "once": [0], "between": [2, 5]}
every_reach = pytest.mark.parametrize("reached", REACHED)


@every_reach
@main_rules
def test_a_micro_batch_that_misses_a_parameter_counts_as_zero(rule: str, reached: str) -> None:
    model = Branches()
    optimizer, oracle = pair(rule, model)
    for seed in range(5):
        micro = branch_batches(REACHED[reached], seed)
        oracle.step(micro_gradients(model, micro))
        step_on(model, optimizer, micro)
    assert difference(oracle.params, model) < CLOSE


@every_reach
def test_clipping_does_not_change_r_where_a_micro_batch_misses_a_parameter(reached: str) -> None:
    model = Branches()
    optimizer, oracle = pair("VRSGD", model)
    micro = branch_batches(REACHED[reached], seed=0)
    gradients = micro_gradients(model, micro)
    accumulate(model, micro)
    factor = clip_factor(model, max_norm=0.5)
    oracle.step(gradients, clip=lambda g: factor * g)
    optimizer.step()
    assert difference(oracle.params, model) < CLOSE


@every_reach
def test_a_grad_scaler_does_not_change_r_where_a_micro_batch_misses_a_parameter(
    reached: str,
) -> None:
    model = Branches()
    optimizer, oracle = pair("VRSGD", model)
    scaler = torch.amp.GradScaler(device="cpu", enabled=True)
    micro = branch_batches(REACHED[reached], seed=0)
    oracle.step(micro_gradients(model, micro))
    for batch in micro:
        scaler.scale(squared_error(model, batch) / 8).backward()
    scaler.step(optimizer)
    assert difference(oracle.params, model) < CLOSE


@main_rules
def test_a_parameter_that_is_never_reached_is_left_alone(rule: str) -> None:
    model = Branches()
    before = values(model.never)
    optimizer, _ = pair(rule, model, weight_decay=0.1)
    train(model, optimizer, seeds=range(2))
    accumulate(model, batches(8, seed=2))
    optimizer.step()
    assert same(before, model.never)
    assert all(p.grad is None for p in model.never.parameters())


@main_rules
def test_a_zeroed_gradient_that_no_micro_batch_reaches_is_a_gradient_of_zero(rule: str) -> None:
    model = Branches()
    optimizer, oracle = pair(rule, model)
    for seed, reached in enumerate([range(8), []]):
        micro = branch_batches(reached, seed)
        zeros = [[torch.zeros_like(p)] * 8 for p in model.rarely.parameters()]
        gradients = micro_gradients(model, micro)
        gradients[2:4] = gradients[2:4] if reached else zeros
        oracle.step(gradients)
        accumulate(model, micro)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert difference(oracle.params, model) < CLOSE


@main_rules
def test_tied_weights_are_one_parameter(rule: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh()).sum(1, keepdim=True)

    model = Tied()
    optimizer, oracle = pair(rule, model)
    train_both(model, optimizer, oracle, seeds=range(5))
    assert difference(oracle.params, model) < CLOSE


@main_rules
def test_a_frozen_parameter_is_left_alone_and_trains_once_it_is_not(rule: str) -> None:
    model = network()
    model[0].requires_grad_(False)
    frozen = values(model[0])
    optimizer, oracle = pair(rule, model)
    train_both(model, optimizer, oracle, seeds=range(3))
    assert same(frozen, model[0])
    assert difference(oracle.params, model) < CLOSE
    model[0].requires_grad_(True)
    optimizer.zero_grad()
    train_both(model, optimizer, oracle, seeds=range(3, 6))
    assert not same(frozen, model[0])
    assert difference(oracle.params, model) < CLOSE


# clipping


def clip_factor(model: nn.Module, max_norm: float) -> float:
    """Clips and returns what the gradients were multiplied by; it must have been active."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
    assert norm > max_norm
    return max_norm / (norm + 1e-6)  # as torch documents it


@every_rule
def test_clipping_scales_g_and_leaves_r(rule: str) -> None:
    model = network()
    optimizer, oracle = pair(rule, model)
    for seed in range(5):
        micro = batches(8, seed)
        gradients = micro_gradients(model, micro)
        accumulate(model, micro)
        factor = clip_factor(model, max_norm=0.01)
        oracle.step(gradients, clip=lambda g, factor=factor: factor * g)
        optimizer.step()
        optimizer.zero_grad()
    assert difference(oracle.params, model) < CLOSE


def test_clipping_by_value_leaves_r_or_is_refused() -> None:
    model = network()
    optimizer, oracle = pair("VRSGD", model)
    micro = batches(8, seed=0)
    oracle.step(micro_gradients(model, micro), clip=lambda g: g.clamp(-0.05, 0.05))
    accumulate(model, micro)
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    try:
        optimizer.step()
    except GradientError:
        return  # g is gone, so saying so is right as well; an r of the clipped g is not
    assert difference(oracle.params, model) < CLOSE


# groups


def test_groups_have_settings_of_their_own() -> None:
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))).double()
    settings: list[dict[str, Any]] = [
        {},
        {"gamma": 0.5},
        {"r_max": 4.0, "lr": 0.05},
        {"beta3": 0.6, "gamma": 0.01},
    ]
    groups = [
        {"params": list(layer.parameters()), **own}
        for layer, own in zip(model, settings, strict=True)
    ]
    optimizer = VRSGD(groups, lr=0.1, gamma=0.1, r_max=2.0, beta3=None)
    common = {"lr": 0.1, "gamma": 0.1, "r_max": 2.0, "beta3": None}
    oracles = [
        vr.VRSGD(layer.parameters(), **(common | own))
        for layer, own in zip(model, settings, strict=True)
    ]
    for seed in range(5):
        micro = batches(8, seed)
        gradients = micro_gradients(model, micro)
        for layer, oracle in enumerate(oracles):
            oracle.step(gradients[2 * layer : 2 * layer + 2])
        step_on(model, optimizer, micro)
    assert difference([p for oracle in oracles for p in oracle.params], model) < CLOSE


def test_a_group_added_in_mid_training_is_scaled_by_its_own_gamma() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1)).double()
    optimizer = VRAdam(model[1].parameters(), lr=0.02)
    head = vr.VRAdam(model[1].parameters(), lr=0.02)
    for seed in range(3):
        micro = batches(8, seed)
        head.step(micro_gradients(model, micro)[2:])
        accumulate(model, micro)
        optimizer.step()
        model.zero_grad()
    optimizer.add_param_group({"params": model[0].parameters(), "gamma": 0.4, "lr": 0.01})
    body = vr.VRAdam(model[0].parameters(), lr=0.01, gamma=0.4)
    for seed in range(3, 6):
        micro = batches(8, seed)
        gradients = micro_gradients(model, micro)
        body.step(gradients[:2])
        head.step(gradients[2:])
        step_on(model, optimizer, micro)
    assert difference(body.params + head.params, model) < CLOSE


@every_optimizer
def test_groups_and_state_are_the_base_optimizers_own(name: str) -> None:
    model = matrices()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, seeds=range(2))
    for _ in range(2):
        assert optimizer.base.param_groups is optimizer.param_groups
        assert optimizer.base.state.keys() == optimizer.state.keys()
        for parameter, state in optimizer.base.state.items():
            assert all(optimizer.state[parameter][key] is value for key, value in state.items())
        optimizer.load_state_dict(optimizer.state_dict())


# settings that cannot work

REFUSED = [
    ("gamma", 0.0),
    ("gamma", -0.1),
    ("gamma", 1.5),
    ("gamma", float("nan")),
    ("r_max", 0.9),
    ("r_max", float("inf")),
    ("r_max", float("nan")),
    ("beta3", -0.1),
    ("beta3", 1.0),
    ("beta3", float("nan")),
]


@every_optimizer
@pytest.mark.parametrize(("setting", "value"), REFUSED)
def test_a_value_out_of_range_is_refused_at_construction(
    name: str, setting: str, value: float
) -> None:
    with pytest.raises(SettingError, match=f"{setting}={value} must"):
        OPTIMIZERS[name](matrices().parameters(), **{setting: value})


@pytest.mark.parametrize(("setting", "value"), REFUSED)
def test_a_group_with_a_value_out_of_range_is_refused(setting: str, value: float) -> None:
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(SettingError, match=f"{setting}={value} must"):
        VRSGD([{"params": new.parameters(), setting: value}], lr=0.1)
    optimizer = VRSGD(old.parameters(), lr=0.1)
    with pytest.raises(SettingError, match=f"{setting}={value} must"):
        optimizer.add_param_group({"params": new.parameters(), setting: value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("r_max", [1.0, 10.0])
@pytest.mark.parametrize("beta3", [None, 0.0, 0.99])
@pytest.mark.parametrize("gamma", [1e-6, 1.0])
def test_values_at_the_ends_of_their_ranges_are_allowed(
    gamma: float, r_max: float, beta3: float | None
) -> None:
    model = network()
    train(model, VRSGD(model.parameters(), 0.1, gamma=gamma, r_max=r_max, beta3=beta3), seeds=[0])
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_scaled_optimizer_is_not_scaled_twice() -> None:
    inner = VRSGD(network().parameters(), lr=0.1)
    with pytest.raises(SettingError, match="VRSGD is scaled already"):
        VarianceReduced(inner)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3, dtype=torch.complex64), torch.eye(3, device="cpu").to_sparse()],
    ids=["complex", "sparse"],
)
def test_a_parameter_without_a_gsnr_is_refused(tensor: Tensor) -> None:
    with pytest.raises(
        SettingError,
        match=r"does not support .* put it into another optimizer, or into a group with vr=False",
    ):
        VRSGD([nn.Parameter(tensor)], lr=0.1)


# what is saved


@every_optimizer
@pytest.mark.parametrize("beta3", [None, 0.9])
@pytest.mark.parametrize("carry", [copy.deepcopy, through_a_file], ids=["deepcopy", "file"])
def test_a_loaded_state_continues_bit_for_bit(
    name: str, beta3: float | None, carry: Callable[[Any], Any]
) -> None:
    model = matrices()
    optimizer = OPTIMIZERS[name](model.parameters(), beta3=beta3, gamma=0.2, r_max=3.0)
    train(model, optimizer, seeds=range(4))
    saved, weights = carry(optimizer.state_dict()), carry(model.state_dict())
    train(model, optimizer, seeds=range(4, 8))

    resumed = matrices(seed=1)
    resumed.load_state_dict(weights)
    loaded = OPTIMIZERS[name](resumed.parameters())  # settings come with the state, as torch's do
    loaded.load_state_dict(saved)
    train(resumed, loaded, seeds=range(4, 8))
    assert same(model, resumed)
    torch.testing.assert_close(loaded.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


def test_groups_keep_their_settings_when_a_bare_state_is_loaded() -> None:
    model = matrices()
    bare = AdamW([{"params": [p]} for p in model.parameters()])
    gammas = [0.5, 0.2]
    optimizer = VRAdam(
        {"params": [p], "gamma": gamma} for p, gamma in zip(model.parameters(), gammas, strict=True)
    )
    optimizer.load_state_dict(bare.state_dict())
    assert gammas == [group["gamma"] for group in optimizer.param_groups]


@every_optimizer
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_a_copy_of_model_and_optimizer_continues_by_itself(
    name: str, copied: Callable[[Any], Any]
) -> None:
    model = matrices()
    optimizer = OPTIMIZERS[name](model.parameters(), beta3=0.9)
    train(model, optimizer, seeds=range(3))
    other, its = copied((model, optimizer))
    train(model, optimizer, seeds=range(3, 6))
    train(other, its, seeds=range(3, 6))
    assert same(model, other)


def test_a_model_is_saved_copied_and_pickled_without_warnings() -> None:
    model = network()
    leaf = torch.ones(3, requires_grad=True)  # no Parameter, whose hooks torch never minds
    optimizer = VRSGD([*model.parameters(), leaf], lr=0.1)
    accumulate(model, batches(8, seed=0))
    with warnings.catch_warnings(action="error"):
        torch.save((model, leaf), io.BytesIO())
        torch.save(model.state_dict(), io.BytesIO())
        assert same(model, copy.deepcopy(model))
        assert same(model, pickled(model))
    optimizer.step()


# torch's contract

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=6),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("base", ["SGD", "AdamW-fused"])
def test_schedulers_drive_it_as_they_drive_the_base(base: str, schedule: str) -> None:
    rates, ends = [], []
    for scaled in (False, True):
        model = network()
        optimizer = BASES[base](model.parameters())
        if scaled:
            optimizer = VarianceReduced(optimizer, gamma=1.0)
        with warnings.catch_warnings(action="error"):
            scheduler = SCHEDULERS[schedule](optimizer)
            for seed in range(5):
                train(model, optimizer, seeds=[seed])
                scheduler.step()
                rates.append(optimizer.param_groups[0]["lr"])
        ends.append(values(model))
    assert rates[:5] == rates[5:]
    assert len(set(rates)) > 1
    assert same(*ends)


@every_optimizer
def test_it_prints_its_groups(name: str) -> None:
    assert "gamma: 0.25" in repr(OPTIMIZERS[name](matrices().parameters(), gamma=0.25))


def test_a_deleted_optimizer_takes_its_hooks_with_it() -> None:
    model = network()
    optimizer = VRSGD(model.parameters(), lr=0.1)
    train(model, optimizer, seeds=[0])
    next(model.parameters()).grad = torch.ones(7, 5, dtype=torch.float64)
    with pytest.raises(GradientError):  # the hooks are there: a dirty .grad is refused
        accumulate(model, batches(2, seed=1))
    del optimizer
    gc.collect()
    accumulate(model, batches(2, seed=1))


def test_two_optimizers_share_the_backwards_of_one_model() -> None:
    model = network()
    parts = [list(model.parameters())[:4], list(model.parameters())[4:]]
    optimizers = [VRSGD(parts[0], lr=0.1), VRAdam(parts[1], lr=0.02)]
    oracles = [vr.VRSGD(parts[0], lr=0.1), vr.VRAdam(parts[1], lr=0.02)]
    for seed in range(5):
        micro = batches(8, seed)
        gradients = micro_gradients(model, micro)
        oracles[0].step(gradients[:4])
        oracles[1].step(gradients[4:])
        accumulate(model, micro)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert difference(oracles[0].params + oracles[1].params, model) < CLOSE


# inside AdaptiveBatch


def adaptive(
    model: nn.Module, optimizer: Optimizer, data: Sequence[Tensor], **options: Any
) -> bb.AdaptiveBatch:
    """Eight micro-batches of 3 samples; of 44 samples the second step has 4 of 3 and 4 of 2."""
    loader = DataLoader(TensorDataset(*data), batch_size=11)
    settings = {"batch_size": 24, "micro_batch": 3, "lr_scaling": None}
    policy = bb.Fixed(24)
    return bb.AdaptiveBatch(
        model, optimizer, loader, policy=policy, **{"every": 1, **settings, **options}
    )


def samples(seed: int = 0, n: int = 44) -> Batch:
    x, y = batches(1, seed, size=n)[0]
    return x, y


def train_epoch_both(loop: bb.AdaptiveBatch, oracle: vr.VRSGD | vr.VRAdam) -> list[list[int]]:
    """An epoch of the loop and of the oracle with weights n_d; returns the n_d of each step."""
    sizes = []
    for step in loop:
        micro = []
        for x, y in step:
            micro.append((x, y))
            step.backward(squared_error(loop.model, (x, y)))
        sizes.append([len(y) for _, y in micro])
        oracle.step(micro_gradients(loop.model, micro), weights=sizes[-1])
        step.update()
    return sizes


@pytest.mark.thorough
@every_rule
def test_unequal_micro_batches_have_weights_in_the_loop(rule: str) -> None:
    model = network()
    optimizer, oracle = pair(rule, model)
    loop = adaptive(model, optimizer, samples())
    sizes = [train_epoch_both(loop, oracle) for _ in loop.epochs(3)]
    assert sizes == [[[3] * 8, [2] * 4 + [3] * 4]] * 3
    assert difference(oracle.params, model) < CLOSE


def token_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    x, y, tokens = batch
    return ((model(x) - y).square().squeeze(1) * tokens).sum() / tokens.sum().clamp_min(1)


@every_rule
@pytest.mark.parametrize("clipped", [False, True], ids=["unclipped", "clipped"])
def test_token_weights_are_weights_in_the_loop(rule: str, clipped: bool) -> None:
    model = network()
    optimizer, oracle = pair(rule, model)
    x, y = samples()
    tokens = torch.randint(1, 50, (44,), generator=torch.Generator().manual_seed(0)).double()
    tokens[:6] = 0  # two micro-batches with nothing in them are left out
    loop = adaptive(model, optimizer, (x, y, tokens))
    for _ in loop.epochs(2):
        for step in loop:
            micro = []
            for batch in step:
                micro.append(tuple(batch))
                step.backward(token_loss(model, batch), weight=batch[2].sum().item())
            counted = [batch for batch in micro if batch[2].sum() > 0]
            gradients = micro_gradients(model, counted, token_loss)
            factor = 1.0
            if clipped:
                factor = 0.01 / (step.clip_grad_norm_(0.01).item() + 1e-6)
            weights = [batch[2].sum().item() for batch in counted]
            oracle.step(gradients, weights, clip=lambda g, factor=factor: factor * g)
            step.update()
    assert difference(oracle.params, model) < CLOSE


@every_reach
def test_token_weights_hold_where_a_micro_batch_misses_a_parameter(reached: str) -> None:
    model = Branches()
    optimizer, oracle = pair("VRSGD", model)
    x, y = samples(n=16)
    first = torch.arange(16) // 2  # eight micro-batches of two
    takes = torch.tensor([d in REACHED[reached] for d in first.tolist()])
    x[:, 0] = torch.where(takes, x[:, 0].abs(), -x[:, 0].abs())
    tokens = torch.randint(1, 50, (16,), generator=torch.Generator().manual_seed(0)).double()
    loader = DataLoader(TensorDataset(x, y, tokens), batch_size=16)
    loop = bb.AdaptiveBatch(
        model, optimizer, loader, policy=bb.Fixed(16), micro_batch=2, lr_scaling=None, every=1
    )
    for step in loop:
        micro = []
        for batch in step:
            micro.append(tuple(batch))
            step.backward(token_loss(model, batch), weight=batch[2].sum().item())
        weights = [batch[2].sum().item() for batch in micro]
        oracle.step(micro_gradients(model, micro, token_loss), weights)
        step.update()
    assert difference(oracle.params, model) < CLOSE


def test_a_backward_of_the_users_own_is_not_counted_in_the_loop() -> None:
    model = network()
    optimizer, oracle = pair("VRSGD", model)
    for step in adaptive(model, optimizer, samples()):
        micro = []
        for x, y in step:
            micro.append((x, y))
            torch.autograd.grad(squared_error(model, (x, y)), model.parameters())
            step.backward(squared_error(model, (x, y)))
        oracle.step(micro_gradients(model, micro), weights=[len(y) for _, y in micro])
        step.update()
    assert difference(oracle.params, model) < CLOSE


class Differentiating(torch.autograd.Function):
    """Whose backward calls autograd.grad over the parameters, and reaches none of them itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: nn.Module) -> Tensor:
        ctx.x, ctx.model = x.detach(), model
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            loss = ctx.model(ctx.x).square().sum()
        torch.autograd.grad(loss, ctx.model.parameters())
        return torch.zeros_like(ctx.x), None


def test_a_backward_that_calls_autograd_grad_and_reaches_nothing_has_a_gradient_of_zero() -> None:
    model = network()
    loop = adaptive(model, SGD(model.parameters(), lr=0.1), samples())
    step = next(iter(loop))
    before: list[Tensor] = []
    for number, (x, y) in enumerate(step):
        hidden = number == 1
        loss = Differentiating.apply(x.requires_grad_(), model) if hidden else None
        step.backward(squared_error(model, (x, y)) if loss is None else loss)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if hidden:
            assert all(map(torch.equal, before, gradients))
        before = gradients
    assert step.update().micro_batches == 8


def test_a_non_finite_step_of_the_loop_leaves_everything_untouched() -> None:
    model = network()
    optimizer, _ = pair("VRAdam", model)
    loop = adaptive(model, optimizer, samples())
    skipped = []
    for number, step in enumerate(loop):
        before, state = values(model), copy.deepcopy(optimizer.state_dict())
        for x, y in step:
            step.backward(squared_error(model, (x, y)) * (float("inf") if number == 1 else 1))
        skipped.append(step.update().skipped)
    assert skipped == [False, True]
    assert same(before, model)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)


def test_a_layer_unfrozen_between_epochs_of_the_loop_trains_on() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer, oracle = pair("VRSGD", model)
    loop = adaptive(model, optimizer, samples())
    for epoch in loop.epochs(2):
        model[0].requires_grad_(epoch == 1)
        train_epoch_both(loop, oracle)
    assert difference(oracle.params, model) < CLOSE


@pytest.mark.parametrize("loop", ["plain", "scheduler", "AdaptiveBatch"])
def test_a_warning_names_the_line_of_the_loop(loop):
    model, (x, y) = nn.Linear(3, 2), (torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    optimizer = VRSGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda _: 1.0) if loop != "plain" else None  # wraps step()
    with warnings.catch_warnings(record=True, action="always") as caught:
        if loop == "AdaptiveBatch":
            batches = [(x.repeat(8, 1), y.repeat(8))] * 2
            train = bb.AdaptiveBatch(
                model, optimizer, batches, policy=bb.Fixed(32), micro_batch=4, scheduler=scheduler
            )
            for step in train:
                for inputs, labels in step:
                    step.backward(nn.functional.cross_entropy(model(inputs), labels))
                step.update()
        else:
            for _ in range(8):
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    found = [each for each in caught if "every micro-batch has the same gradient" in str(each)]
    assert [__file__] == [each.filename for each in found]
