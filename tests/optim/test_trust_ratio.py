"""LARS, LAMB, VRLARS and VRLAMB: the numbers, and that kernels and torch compute the same."""

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import bigbatch
from bigbatch.errors import SettingError
from bigbatch.gradients import SingleProcessSource
from bigbatch.kernels import native
from bigbatch.optim import LAMB, LARS, VRLAMB, VRLARS
from oracles import vr
from tensors import difference, same, threads, values
from third_party_optimizers import timm_optimizer

torch.set_num_threads(1)  # small tensors: a second thread only waits
pytestmark = pytest.mark.filterwarnings("ignore:k = [2-7] micro-batches:UserWarning")

# Every micro-batch gradient below is a given row. A float64 rounding is 1e-16; a layer whose two
# rows agree to 1e-4 somewhere loses 4 digits of r, in steps of a hundredth of the weights at most.
CLOSE = 1e-13
# The same in float32: 20 roundings of 6e-8, and the steps'. A missing decay, bias correction or
# clip is off by 1e-2.
CLOSE32 = 2e-6

SHAPES = [(7, 5), (7,), (3, 2, 3, 2), (1, 4), (11,), ()]

# library, oracle, settings that both take
BASES = {
    "LARS": (LARS, vr.LARS, {"lr": 0.5}),
    "LARS-decay": (LARS, vr.LARS, {"lr": 2.0, "weight_decay": 0.3, "trust_coefficient": 0.02}),
    "LARS-nesterov": (
        LARS,
        vr.LARS,
        {"lr": 1.0, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    ),
    "LARS-no-momentum": (LARS, vr.LARS, {"lr": 3.0, "momentum": 0.0, "weight_decay": 0.1}),
    "LARS-all": (LARS, vr.LARS, {"lr": 1.0, "weight_decay": 0.1, "exclude_bias_and_norm": False}),
    "LAMB": (LAMB, vr.LAMB, {"lr": 0.02}),
    "LAMB-settings": (
        LAMB,
        vr.LAMB,
        {"lr": 0.01, "betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.4},
    ),
    "LAMB-all": (LAMB, vr.LAMB, {"lr": 0.02, "weight_decay": 0.1, "exclude_bias_and_norm": False}),
    "LAMB-no-decay": (LAMB, vr.LAMB, {"lr": 0.02, "weight_decay": 0.0}),
}
SCALED = {
    "VRLARS": (VRLARS, vr.VRLARS, {"lr": 0.5}),
    "VRLARS-nesterov": (
        VRLARS,
        vr.VRLARS,
        {"lr": 1.0, "nesterov": True, "weight_decay": 0.2, "trust_coefficient": 0.01, "beta3": 0.8},
    ),
    "VRLAMB": (VRLAMB, vr.VRLAMB, {"lr": 0.02}),
    "VRLAMB-settings": (
        VRLAMB,
        vr.VRLAMB,
        {"lr": 0.01, "betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.4, "beta3": 0.6},
    ),
    "VRLAMB-all": (
        VRLAMB,
        vr.VRLAMB,
        {"lr": 0.02, "weight_decay": 0.1, "beta3": None, "exclude_bias_and_norm": False},
    ),
}
RULES = BASES | SCALED
MAIN = {name: RULES[name] for name in ("LARS", "LAMB", "VRLARS", "VRLAMB")}
main_rules = pytest.mark.parametrize("rule", MAIN)
both_clips = pytest.mark.parametrize("r_max", [1.0, 10.0], ids=["r_max=1", "r_max=1/gamma"])
needs_timm = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
needs_kernels = pytest.mark.skipif(native.library() is None, reason="no compiled kernels here")


def layers(
    shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[nn.Parameter]:
    """Parameters of mean 0 and deviation 1, matrices three times as long."""
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    return [nn.Parameter((t * (3 if t.ndim == 2 else 1)).to(dtype)) for t in tensors]


def micro_gradients(
    params: Sequence[Tensor], k: int, seed: int, mean: float = 0.4
) -> list[list[Tensor]]:
    """For each parameter the k gradients that it will get; .grad is to be their sum."""
    draw = torch.Generator().manual_seed(1000 + seed)
    drawn = [torch.randn(k, *p.shape, generator=draw, dtype=torch.float64) for p in params]
    return [list(((x + mean) / k).to(p.dtype)) for p, x in zip(params, drawn, strict=True)]


def backwards(params: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> None:
    """One backward for each micro-batch; its gradients are exactly the ones given."""
    for micro in zip(*gradients, strict=True):
        torch.autograd.backward(list(params), list(micro))


def rows_of(gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The mean gradients, of which .grad is the mean."""
    return [[len(micro) * g.double() for g in micro] for micro in gradients]


def pair(
    rule: str, params: Sequence[Tensor], fused: bool | None = None, **own: Any
) -> tuple[Optimizer, Any]:
    """The optimizer of a rule and its oracle, with the same settings."""
    library, oracle, settings = RULES[rule]
    settings = settings | own
    return library(params, fused=fused, **settings), oracle(params, **settings)


def train(
    params: Sequence[Tensor], optimizer: Optimizer, oracle: Any, seeds: range, k: int
) -> None:
    """The same micro-batch gradients, to the bit, for the optimizer and the oracle."""
    for seed in seeds:
        gradients = micro_gradients(params, k, seed)
        if oracle is not None:
            oracle.step(rows_of(gradients))
        backwards(params, gradients)
        optimizer.step()
        optimizer.zero_grad()


# the numbers


@pytest.mark.parametrize("rule", BASES)
def test_twenty_steps_of_bases_equal_the_oracle(rule: str) -> None:
    params = layers()
    optimizer, oracle = pair(rule, params)
    train(params, optimizer, oracle, range(20), k=1)
    assert difference(oracle.params, params) < CLOSE


@pytest.mark.parametrize(
    ("rule", "k"), [(rule, k) for rule in SCALED for k in (2, 3, 8, 64) if k == 8 or rule in MAIN]
)
@both_clips
def test_twenty_steps_equal_the_oracle(rule: str, k: int, r_max: float) -> None:
    params = layers()
    optimizer, oracle = pair(rule, params, r_max=r_max)
    train(params, optimizer, oracle, range(20), k)
    assert difference(oracle.params, params) < CLOSE


@main_rules
@pytest.mark.parametrize("fused", [False, None], ids=["torch", "default"])
def test_a_layer_that_comes_later_counts_its_own_steps(rule: str, fused: bool | None) -> None:
    params = layers()
    optimizer, oracle = pair(rule, params, fused=fused)
    for begun in range(1, len(params) + 1):
        gradients = micro_gradients(params, 8, seed=begun)
        rows = rows_of(gradients)
        oracle.step([*rows[:begun], *([None] for _ in rows[begun:])])
        backwards(params[:begun], gradients[:begun])
        optimizer.step()
        optimizer.zero_grad()
    assert difference(oracle.params, params) < CLOSE


@needs_kernels
@pytest.mark.parametrize("rule", BASES)
def test_twenty_float32_steps_of_bases_stay_close(rule: str) -> None:
    params = layers(dtype=torch.float32)
    optimizer, oracle = pair(rule, params, fused=True)
    train(params, optimizer, oracle, range(20), k=1)
    assert difference(oracle.params, params) < CLOSE32


@needs_kernels
@both_clips
@pytest.mark.parametrize("k", [2, 3, 8, pytest.param(64, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("rule", ["VRLARS-nesterov", "VRLAMB"])
def test_twenty_float32_steps_stay_close_to_the_oracle(rule: str, k: int, r_max: float) -> None:
    params = layers(dtype=torch.float32)
    optimizer, oracle = pair(rule, params, fused=True, r_max=r_max)
    train(params, optimizer, oracle, range(20), k)
    assert difference(oracle.params, params) < CLOSE32


@pytest.mark.parametrize("rule", ["VRLARS", "VRLAMB"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_unequal_micro_batches_have_weights(rule: str, dtype: torch.dtype) -> None:
    sizes = [3, 17, 8, 1, 11]
    params = layers(dtype=dtype)
    optimizer, oracle = pair(rule, params)
    source = SingleProcessSource(params, explicit=True)
    optimizer.bind(source)
    for seed in range(20):
        gradients = micro_gradients(params, len(sizes), seed)  # n_d g_d / N
        oracle.step(
            [
                [sum(sizes) / n * g.double() for n, g in zip(sizes, micro, strict=True)]
                for micro in gradients
            ],
            weights=sizes,
        )
        for n, *micro in zip(sizes, *gradients, strict=True):
            with source.micro_batch(weight=n):
                backwards(params, [[g] for g in micro])
        optimizer.step()
        optimizer.zero_grad()
    assert difference(oracle.params, params) < (CLOSE if dtype == torch.float64 else CLOSE32)


@main_rules
def test_maximize_is_a_step_on_the_negated_gradient(rule: str) -> None:
    settings = {"maximize": True, "weight_decay": 0.1}
    params = layers()
    optimizer, oracle = pair(rule, params, **settings)
    train(params, optimizer, oracle, range(5), k=8)
    assert difference(oracle.params, params) < CLOSE
    in_kernels = layers(dtype=torch.float32)
    optimizer, oracle = pair(rule, in_kernels, fused=True, **settings)
    train(in_kernels, optimizer, oracle, range(5), k=8)
    assert difference(oracle.params, in_kernels) < CLOSE32


@main_rules
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_learning_rate_may_change_from_step_to_step(rule: str, dtype: torch.dtype) -> None:
    params = layers(dtype=dtype)
    optimizer, oracle = pair(rule, params, lr=1.0)
    for seed, lr in enumerate([1.0, 0.1, 0.0, 0.5, 0.25]):
        oracle.lr = lr
        optimizer.param_groups[0]["lr"] = lr
        train(params, optimizer, oracle, range(seed, seed + 1), k=8)
    assert difference(oracle.params, params) < (CLOSE if dtype == torch.float64 else CLOSE32)


def test_larss_buffer_keeps_the_learning_rate_that_its_summands_had() -> None:
    params = [nn.Parameter(torch.tensor([[3.0, 4.0]]))]
    optimizer = LARS(params, lr=2.0, momentum=0.5, trust_coefficient=0.1)
    params[0].grad = torch.tensor([[0.0, 1.0]])
    optimizer.step()  # rate = .1 * 5 / 1, so b = 2 * .5 * g
    assert [[3.0, 3.0]] == params[0].tolist()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert [[3.0, 2.5]] == params[0].tolist()  # half of what was in the buffer


def test_lambs_first_step_is_as_long_as_the_learning_rate_times_the_weights() -> None:
    params = [nn.Parameter(torch.tensor([[3.0, 4.0]]))]
    optimizer = LAMB(params, lr=0.1, eps=1e-30, weight_decay=0.0)
    params[0].grad = torch.tensor([[1e-6, -1e6]])
    optimizer.step()  # u = (1, -1), |u| = 2^.5, |theta| = 5
    step = 0.1 * 5 / 2**0.5
    assert pytest.approx([3 - step, 4 + step]) == params[0][0].tolist()


@main_rules
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_learning_rate_may_be_a_tensor(rule: str, dtype: torch.dtype) -> None:
    ends = []
    for lr in (0.25, torch.tensor(0.25)):
        params = layers(dtype=dtype)
        optimizer, _ = pair(rule, params, lr=lr)
        train(params, optimizer, None, range(3), k=8)
        if isinstance(lr, Tensor):
            assert optimizer.param_groups[0]["lr"] is lr
            lr.fill_(0.125)  # in place, as a captured schedule does
        else:
            optimizer.param_groups[0]["lr"] = 0.125
        train(params, optimizer, None, range(3, 6), k=8)
        ends.append(values(params))
    assert same(*ends)


@main_rules
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_groups_have_settings_of_their_own(rule: str, dtype: torch.dtype) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"lr": 0.3, "weight_decay": 0.2},
        {"exclude_bias_and_norm": False, "weight_decay": 0.1},
        {"momentum": 0.5, "trust_coefficient": 0.01, "nesterov": True}
        if rule.endswith("LARS")
        else {"betas": (0.6, 0.9), "eps": 1e-2},
    ]
    if rule.startswith("VR"):
        settings[0] |= {"gamma": 0.5}
        settings[1] |= {"r_max": 4.0}
        settings[2] |= {"beta3": 0.5}
    by_group = [layers([(4, 3), (4,)], seed=i, dtype=dtype) for i in range(len(settings))]
    params = [p for group in by_group for p in group]
    groups = [{"params": g, **own} for g, own in zip(by_group, settings, strict=True)]
    optimizer = RULES[rule][0](groups, lr=0.1)
    oracles = [
        RULES[rule][1](g, **({"lr": 0.1} | own)) for g, own in zip(by_group, settings, strict=True)
    ]
    for seed in range(5):
        gradients = micro_gradients(params, 8, seed)
        for i, oracle in enumerate(oracles):
            oracle.step(rows_of(gradients[2 * i : 2 * i + 2]))
        backwards(params, gradients)
        optimizer.step()
        optimizer.zero_grad()
    expected = [p for oracle in oracles for p in oracle.params]
    assert difference(expected, params) < (CLOSE if dtype == torch.float64 else CLOSE32)


@main_rules
def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned(rule: str) -> None:
    params, by_closure = layers(), layers()
    optimizer, _ = pair(rule, params)
    train(params, optimizer, None, range(3), k=8)
    optimizer, _ = pair(rule, by_closure)
    calls = []
    for seed in range(3):

        def closure(seed: int = seed) -> float:
            calls.append(seed)
            optimizer.zero_grad()
            backwards(by_closure, micro_gradients(by_closure, 8, seed))
            return 0.5 + seed

        with torch.no_grad():
            assert 0.5 + seed == optimizer.step(closure)
    assert [0, 1, 2] == calls
    assert same(params, by_closure)


# what has no trust ratio


@main_rules
@pytest.mark.parametrize("fused", [True, False], ids=["kernels", "torch"])
def test_a_layer_of_zeros_moves_at_the_plain_rate(rule: str, fused: bool) -> None:
    params = layers([(3, 4), (2, 2)], dtype=torch.float32)
    with torch.no_grad():
        params[0].zero_()
    optimizer, oracle = pair(rule, params, fused, lr=0.1, weight_decay=0.1)
    train(params, optimizer, oracle, range(1), k=8)
    assert difference(oracle.params, params) < 1e-5
    assert params[0].abs().min() > 0.001  # and it moved


@main_rules
@pytest.mark.parametrize("fused", [True, False], ids=["kernels", "torch"])
def test_a_layer_without_a_gradient_has_no_more_than_its_decay(rule: str, fused: bool) -> None:
    params = layers([(3, 4)], dtype=torch.float32)
    before = values(params)
    optimizer, _ = pair(rule, params, fused, lr=0.1, weight_decay=0.0)
    zeros = [[torch.zeros(3, 4)] * 8]
    backwards(params, zeros)
    optimizer.step()
    optimizer.zero_grad()
    assert same(before, params)
    decayed = layers([(3, 4)], dtype=torch.float64)
    oracle = RULES[rule][1](decayed, lr=0.1, weight_decay=0.2)
    oracle.step(rows_of(zeros))
    optimizer, _ = pair(rule, params, fused, lr=0.1, weight_decay=0.2)
    backwards(params, zeros)
    optimizer.step()
    assert difference(oracle.params, params) < 1e-6
    assert not same(before, params)


@main_rules
@pytest.mark.parametrize("fused", [True, False], ids=["kernels", "torch"])
def test_biases_and_norms_get_neither_decay_nor_ratio(rule: str, fused: bool) -> None:
    own = {"gamma": 1.0} if rule.startswith("VR") else {}
    shapes, lr = [(5,), (), (1,), (5, 1)], 0.125
    params = layers(shapes, dtype=torch.float32)
    before = values(params)
    optimizer, _ = pair(rule, params, fused, lr=lr, weight_decay=100.0, **own)
    train(params, optimizer, None, range(1), k=8)
    gradients = [torch.stack(rows).mean(0) for rows in rows_of(micro_gradients(params, 8, 0))]
    # LAMB's first direction is g / |g|, element by element
    steps = [g if rule.endswith("LARS") else g.sign() for g in gradients]
    expected = [b.double() - lr * step for b, step in zip(before, steps, strict=True)]
    assert difference(expected[:3], params[:3]) < 1e-5
    assert difference(expected[3:], params[3:]) > 0.01  # a matrix of one column is no bias


def test_nvidias_convention_is_a_group_of_its_own() -> None:
    """NVIDIA's BERT and timm: decay for matrices only, but a ratio for all (NVLAMB)."""
    params = layers()
    matrices = [p for p in params if p.ndim > 1]
    others = [p for p in params if p.ndim <= 1]
    rest = {"exclude_bias_and_norm": False, "lr": 0.05}
    optimizer = LAMB(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], **rest
    )
    oracles = [
        vr.LAMB(matrices, weight_decay=0.1, **rest),
        vr.LAMB(others, weight_decay=0.0, **rest),
    ]
    ordered = matrices + others
    for seed in range(5):
        gradients = micro_gradients(ordered, 1, seed)
        oracles[0].step(rows_of(gradients[: len(matrices)]))
        oracles[1].step(rows_of(gradients[len(matrices) :]))
        backwards(ordered, gradients)
        optimizer.step()
        optimizer.zero_grad()
    assert difference(oracles[0].params + oracles[1].params, ordered) < CLOSE


# what cancels


@pytest.mark.parametrize("rule", ["LARS", "LAMB"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.filterwarnings("ignore:every micro-batch has the same gradient")
def test_a_uniform_r_cancels(rule: str, dtype: torch.dtype) -> None:
    """Both micro-batches have the same gradient, so r is r_max for all."""
    plain, scaled = layers([(4, 3), (6, 2)], dtype=dtype), layers([(4, 3), (6, 2)], dtype=dtype)
    own = {"lr": 0.1, "weight_decay": 0.0}
    own |= {"eps": 1e-30} if rule == "LAMB" else {"trust_coefficient": 0.5}
    base = RULES[rule][0](plain, **own)
    optimizer = RULES[f"VR{rule}"][0](scaled, **own, r_max=1.25, watch=True)
    for seed in range(5):
        means = [micro[0] for micro in micro_gradients(plain, 1, seed)]
        gradients = [[0.5 * g, 0.5 * g] for g in means]
        for params, either in ((plain, base), (scaled, optimizer)):
            backwards(params, gradients)
            either.step()
            either.zero_grad()
        assert pytest.approx([1.25, 1.25], rel=1e-5) == optimizer.gsnr.lr_factor.tolist()
    # steps of a tenth of the weights; r would make them a quarter longer
    assert difference(plain, scaled) < 100 * torch.finfo(dtype).eps


@main_rules
@pytest.mark.parametrize("scale", [1e-12, 1e12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_unit_of_the_gradient_cancels_where_nothing_is_excluded(
    rule: str, scale: float, dtype: torch.dtype
) -> None:
    own = {"weight_decay": 0.0, "exclude_bias_and_norm": False}
    own |= {"eps": 1e-30} if rule.endswith("LAMB") else {}
    ends = []
    for factor in (1.0, scale):
        params = layers(dtype=dtype)
        optimizer, _ = pair(rule, params, **own)
        for seed in range(5):
            gradients = micro_gradients(params, 8, seed)
            backwards(params, [[factor * g for g in micro] for micro in gradients])
            optimizer.step()
            optimizer.zero_grad()
        ends.append(values(params))
    # every gradient is rounded again, in deviations down to .1 of it
    assert difference(*ends) < 200 * torch.finfo(dtype).eps


# kernels and torch


def filled(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


ARRAYS: dict[str, Callable[[], Tensor]] = {
    "0-dim": lambda: torch.tensor(0.7),
    "empty": lambda: torch.zeros(0, 3),
    "one": lambda: filled(1, 1),
    "three": lambda: filled(3),
    "4095": lambda: filled(1, 4095),
    "4096": lambda: filled(1, 4096),
    "4097": lambda: filled(1, 4097),
    "65537": lambda: filled(65537),
    "shared-by-threads": lambda: filled(1, 2**18 + 1),
    "channels-last": lambda: filled(8, 6, 5, 5).contiguous(memory_format=torch.channels_last),
    "channels-last-of-one": lambda: filled(8, 1, 5, 5).contiguous(
        memory_format=torch.channels_last
    ),
    "transposed": lambda: filled(6, 9).t(),
    "every-other-column": lambda: filled(6, 9)[:, ::2],
    "inside-another": lambda: filled(4, 9)[1:3],
}
# A step of LONG is a tenth of the weights, so an error in a norm or in a layer's mean shows there
# as a tenth of itself: two steps, each with a rounding in rate, direction and weight.
FEW = 8
LONG = {
    "LARS": {"lr": 0.5, "trust_coefficient": 0.2, "weight_decay": 0.1, "nesterov": True},
    "LAMB": {"lr": 0.1, "weight_decay": 0.1},
}
LONG |= {f"VR{name}": settings for name, settings in LONG.items()}


def tensors_of_all_kinds() -> list[Tensor]:
    small = set(ARRAYS) - {"empty", "65537", "shared-by-threads"}
    return [make() for name, make in ARRAYS.items() if name in small]


def two_steps(rule: str, tensors: Sequence[Tensor], fused: bool | None, **own: Any) -> list[Tensor]:
    """Where two steps lead, from given weights of any layout."""
    params = [nn.Parameter(tensor) for tensor in tensors]
    optimizer = RULES[rule][0](params, fused=fused, **(LONG[rule] | own))
    train(params, optimizer, None, range(2), k=8)
    return values(params)


def apart(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Their difference in float32 roundings of the largest weight of each layer."""
    return difference(expected, actual) / torch.finfo(torch.float32).eps


@needs_kernels
@main_rules
@pytest.mark.parametrize(
    ("name", "excluded"), [*((name, False) for name in ARRAYS), ("0-dim", True), ("three", True)]
)
def test_kernels_and_torch_agree_on_every_layout(rule: str, name: str, excluded: bool) -> None:
    own = {"exclude_bias_and_norm": excluded}
    expected = two_steps(rule, [ARRAYS[name]().contiguous()], False, **own)
    by_torch = two_steps(rule, [ARRAYS[name]()], False, **own)
    by_kernels = two_steps(rule, [ARRAYS[name]()], True, **own)
    if not expected[0].numel():
        assert (0, 3) == by_kernels[0].shape == by_torch[0].shape
        return
    assert apart(expected, by_torch) < FEW
    assert apart(expected, by_kernels) < FEW
    assert apart([ARRAYS[name]()], by_kernels) > 1e4


@needs_kernels
@main_rules
def test_kernels_and_torch_agree_on_all_layouts_in_one_group(rule: str) -> None:
    expected = two_steps(rule, [x.contiguous() for x in tensors_of_all_kinds()], False)
    actual = two_steps(rule, tensors_of_all_kinds(), None)
    assert apart(expected, actual) < FEW


@needs_kernels
@main_rules
def test_layers_of_three_types_in_one_group_go_each_its_way(rule: str) -> None:
    types = [torch.float32, torch.bfloat16, torch.float64, torch.float32]

    def tensors() -> list[Tensor]:
        return [filled(5, 6 + i).to(dtype) for i, dtype in enumerate(types)]

    for fused in (True, None):
        expected = two_steps(rule, tensors(), False)
        actual = two_steps(rule, tensors(), fused)
        assert types == [t.dtype for t in actual]
        assert same(expected[1:3], actual[1:3])  # no kernel has these types
        assert apart(expected[::3], actual[::3]) < FEW


@pytest.mark.parametrize("rule", ["LARS", "LAMB"])
@pytest.mark.parametrize("fused", [True, False], ids=["kernels", "torch"])
def test_a_gradient_may_have_another_layout_than_its_parameter(rule: str, fused: bool) -> None:
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        theta = nn.Parameter(filled(4, 3, 5, 5).contiguous(memory_format=torch.channels_last))
        optimizer = RULES[rule][0]([theta], fused=fused, **LONG[rule])
        for seed in range(3):
            (micro,) = micro_gradients([theta], 1, seed)
            theta.grad = micro[0].contiguous(memory_format=layout)
            optimizer.step()
        ends.append(theta)
    assert apart(ends[:1], ends[1:]) < FEW


@needs_kernels
@main_rules
@pytest.mark.parametrize("count", [2, 5])
def test_the_number_of_threads_changes_nothing_but_last_bits(rule: str, count: int) -> None:
    shapes = [(1, 400_003), *[(1, 5000 + i) for i in range(20)], (1, 2**18 + 1), (3,)]
    ends = []
    for number in (1, count):
        params = [nn.Parameter(filled(*shape)) for shape in shapes]
        optimizer = RULES[rule][0](params, fused=True, **LONG[rule])
        gradients = [[filled(*p.shape), torch.ones_like(p), -filled(*p.shape)] for p in params]
        with threads(number):
            backwards(params, gradients)
            optimizer.step()
        ends.append(params)
    assert apart(*ends) < 2  # sums are in double, so a rate may be rounded to the next number


@needs_kernels
@main_rules
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_own_layer_only(rule: str, bad: float) -> None:
    for fused in (True, False):
        params = layers([(4, 3), (5, 2)], dtype=torch.float32)
        optimizer, _ = pair(rule, params, fused)
        gradients = micro_gradients(params, 8, seed=0)
        gradients[0][3][1, 1] = bad
        backwards(params, gradients)
        optimizer.step()
        assert params[0][1, 1].isnan()
        assert params[1].isfinite().all()


# without a compiler

CHILD = """
import pickle, sys
import torch
import bigbatch
from bigbatch.errors import SettingError
from bigbatch.kernels import native
from bigbatch.optim import LAMB, LARS, VRLAMB, VRLARS, VRSGD
import test_trust_ratio as checks

torch.set_num_threads(1)
assert bigbatch.__file__.startswith(sys.argv[1]), bigbatch.__file__
for make in (LARS, LAMB, VRLARS, VRLAMB, VRSGD):
    try:
        make([torch.nn.Parameter(torch.ones(2))], fused=True)
    except SettingError as error:
        assert "no kernels were built" in str(error)
    else:
        raise AssertionError(make)
ends = {rule: checks.two_steps(rule, checks.tensors_of_all_kinds(), None) for rule in checks.MAIN}
torch.save(ends, sys.argv[3])
with open(sys.argv[2], "rb") as file:
    params, optimizer = pickle.load(file)
checks.train(params, optimizer, None, range(3, 6), k=8)
torch.save(checks.values(params), sys.argv[4])
"""


@pytest.fixture(scope="module")
def by_torch_only(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[Tensor]]:
    """Where a copy of the package without its compiled library left its results; what it said.

    It got an optimizer pickled where there are kernels; it continues here, to the weights returned.
    """
    place = tmp_path_factory.mktemp("no-kernels")
    source = Path(bigbatch.__file__).parent
    shutil.copytree(source, place / "bigbatch", ignore=shutil.ignore_patterns("*.so", "*.pyd"))
    params = layers(dtype=torch.float32)
    optimizer, _ = pair("VRLAMB", params)
    train(params, optimizer, None, range(3), k=8)
    (place / "pickled").write_bytes(pickle.dumps((params, optimizer)))
    files = [str(place / name) for name in ("pickled", "ends", "continued")]
    paths = os.pathsep.join(
        [
            str(place),
            str(Path(__file__).parent),
            *(str(Path(__file__).parents[1] / name) for name in ("", "helpers")),
        ]
    )
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(place), *files],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    train(params, optimizer, None, range(3, 6), k=8)
    return place, child.stderr, values(params)


@pytest.mark.thorough
@needs_kernels
def test_without_kernels_everything_runs_by_torch(
    by_torch_only: tuple[Path, str, list[Tensor]],
) -> None:
    place, said, _ = by_torch_only
    assert (place / "ends").exists(), said
    for rule, actual in torch.load(place / "ends").items():
        assert apart(two_steps(rule, tensors_of_all_kinds(), None), actual) < FEW


@pytest.mark.thorough
@needs_kernels
def test_an_optimizer_pickled_where_there_are_kernels_continues_without(
    by_torch_only: tuple[Path, str, list[Tensor]],
) -> None:
    place, said, expected = by_torch_only
    assert (place / "continued").exists(), said
    assert apart(expected, torch.load(place / "continued")) < FEW


# what others have


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_bias_under_lars_is_torchs_sgd_with_momentum(nesterov: bool) -> None:
    ours, theirs = layers([(6,), ()]), layers([(6,), ()])
    own = {"lr": 0.1, "momentum": 0.8, "nesterov": nesterov}
    for params, optimizer in (
        (ours, LARS(ours, **own, weight_decay=0.5)),
        (theirs, torch.optim.SGD(theirs, **own)),
    ):
        train(params, optimizer, None, range(10), k=1)
    assert difference(theirs, ours) < 1e-14


@pytest.mark.parametrize("maximize", [False, True])
def test_a_bias_under_lamb_is_torchs_adam(maximize: bool) -> None:
    ours, theirs = layers([(6,), ()]), layers([(6,), ()])
    own = {"lr": 0.1, "betas": (0.8, 0.97), "eps": 1e-3, "maximize": maximize}
    for params, optimizer in (
        (ours, LAMB(ours, **own, weight_decay=0.5)),
        (theirs, torch.optim.Adam(theirs, **own)),
    ):
        train(params, optimizer, None, range(10), k=1)
    assert difference(theirs, ours) < 1e-14


@needs_timm
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_is_timms_with_a_ratio_for_all(decay: float) -> None:
    theirs_of = timm_optimizer("LAMB")
    ours, theirs = layers(), layers()
    own = {"lr": 0.02, "betas": (0.8, 0.97), "eps": 1e-4, "weight_decay": decay}
    train(ours, LAMB(ours, exclude_bias_and_norm=False, **own), None, range(10), k=1)
    reference = theirs_of(theirs, always_adapt=True, max_grad_norm=None, **own)
    train(theirs, reference, None, range(10), k=1)
    assert difference(theirs, ours) < CLOSE


@needs_timm
def test_excluding_biases_is_timms_and_apexs_ratio_for_decayed_groups_only() -> None:
    theirs_of = timm_optimizer("LAMB")
    ours, theirs = layers(), layers()
    train(ours, LAMB(ours, lr=0.02, weight_decay=0.1), None, range(10), k=1)
    groups = [
        {"params": [p for p in theirs if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs if p.ndim <= 1], "weight_decay": 0.0},
    ]
    reference = theirs_of(groups, lr=0.02, max_grad_norm=None)
    train(theirs, reference, None, range(10), k=1)
    assert difference(theirs, ours) < CLOSE


@needs_timm
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars_is_timms_at_a_constant_learning_rate(decay: float, nesterov: bool) -> None:
    theirs_of = timm_optimizer("LARS")
    ours, theirs = layers(), layers()
    own = {"lr": 1.0, "momentum": 0.8, "weight_decay": decay, "nesterov": nesterov}
    local = LARS(ours, trust_coefficient=0.01, exclude_bias_and_norm=False, **own)
    train(ours, local, None, range(10), k=1)
    # its denominator has an eps, which it lets us choose
    reference = theirs_of(theirs, trust_coeff=0.01, eps=1e-30, always_adapt=True, **own)
    train(theirs, reference, None, range(10), k=1)
    assert difference(theirs, ours) < CLOSE


# what is refused

REFUSED = [
    ("lr", -0.1),
    ("lr", float("nan")),
    ("lr", float("inf")),
    ("lr", 10**39),  # beyond float32: torch's own steps overflow
    ("weight_decay", -0.1),
    ("weight_decay", float("nan")),
    ("weight_decay", 10**39),
]
REFUSED_OF = {
    "LARS": [
        ("momentum", -0.1),
        ("momentum", 1.0),
        ("momentum", float("nan")),
        ("trust_coefficient", 0.0),
        ("trust_coefficient", -1.0),
        ("trust_coefficient", float("nan")),
    ],
    "LAMB": [
        ("betas", (-0.1, 0.9)),
        ("betas", (0.9, 1.0)),
        ("betas", (float("nan"), 0.9)),
        ("eps", 0.0),
        ("eps", -1e-8),
        ("eps", float("nan")),
    ],
}


@pytest.mark.parametrize(
    ("rule", "setting", "value"),
    [
        (prefix + name, *case)
        for name, cases in REFUSED_OF.items()
        for case in REFUSED + cases
        for prefix in ("", "VR")
    ],
)
def test_a_value_out_of_range_is_refused(rule: str, setting: str, value: Any) -> None:
    message = "beta" if setting == "betas" else f"{setting}={value} must"
    with pytest.raises(SettingError, match=message):
        RULES[rule][0](layers(), **{setting: value})
    optimizer = RULES[rule][0](layers())
    with pytest.raises(SettingError, match=message):
        optimizer.add_param_group({"params": layers(seed=1), setting: value})
    assert 1 == len(optimizer.param_groups)


@pytest.mark.parametrize("rule", ["LARS", "VRLARS"])
def test_nesterov_needs_a_momentum(rule: str) -> None:
    with pytest.raises(SettingError, match="nesterov=True needs a momentum"):
        RULES[rule][0](layers(), nesterov=True, momentum=0.0)


@main_rules
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_a_complex_parameter_is_refused(rule: str, dtype: torch.dtype) -> None:
    with pytest.raises(SettingError, match=r"complex.* parameter"):
        RULES[rule][0]([nn.Parameter(torch.ones(2, 2, dtype=dtype))])
