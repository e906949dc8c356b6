"""The range of gradients in which r is right, by an oracle, and the warning where it is left."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch.optim import VRLAMB, VRLARS, VRSGD, VarianceReduced, VRAdam
from oracles import vr

torch.set_num_threads(1)

K, SIZE = 8, 75
LOST = "r is not right for 1 layers, 'layer' the first"
ways = pytest.mark.parametrize("fused", [None, False], ids=["kernels", "torch"])

# deviations of these from their mean: .3 to 5 times the scale, as roots of sums over 8
INSIDE = [5e-19, 1e-6, 1.0, 1e6, 1e18]
OUTSIDE = [1e-25, 1e-22, 3e-21, 2e20]


def rows(scale, seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    return ((torch.randn(K, SIZE, generator=draw) + 0.5) * scale).to(dtype)


def scaled(layer, optimizer, gradients):
    """r g over g of a step; where g is 0, 1."""
    optimizer.zero_grad()
    for row in gradients:
        (layer * row).sum().backward()
    before = layer.grad.to(torch.float64, copy=True)
    optimizer.step()
    return torch.where(before == 0, 1.0, layer.grad.double() / before)


def stepped(gradients, **options):
    """r of one step along given gradients, and what was said of r that is not right."""
    layer = nn.Parameter(torch.zeros(SIZE, dtype=gradients.dtype))
    optimizer = VRSGD([("layer", layer)], lr=1e-30, **options)
    with warnings.catch_warnings(record=True, action="always") as messages:
        r = scaled(layer, optimizer, gradients)
    return r, [str(w.message) for w in messages]


@ways
@pytest.mark.parametrize("scale", INSIDE)
def test_inside_its_range_r_is_right_and_nothing_is_said(scale, fused):
    gradients = rows(scale)
    r, messages = stepped(gradients, fused=fused)
    expected = vr.GsnrScaling(0.1, 1.0, None)(0, list(gradients.double()), [1.0] * K)
    # sums of 8, squares and a mean of 75 in float32
    torch.testing.assert_close(r, expected, rtol=1e-5, atol=0)
    assert not messages


@ways
@pytest.mark.parametrize("scale", OUTSIDE)
def test_outside_of_it_the_layer_and_the_remedy_are_named(scale, fused):
    _, messages = stepped(rows(scale), fused=fused)
    (message,) = messages  # and not that every micro-batch has the same gradient
    assert LOST in message
    assert "multiply the loss" in message


@pytest.mark.parametrize("scale", [1e-25, 1e20])
def test_bfloat16_has_the_range_of_float32(scale):
    assert any(LOST in message for message in stepped(rows(scale, dtype=torch.bfloat16))[1])
    assert not stepped(rows(1e-18, dtype=torch.bfloat16))[1]


@pytest.mark.parametrize("scale", [2e-7, 1e4])
def test_no_float16_leaves_it(scale):
    assert not stepped(rows(scale, dtype=torch.float16))[1]


@pytest.mark.parametrize("scale", [1e-150, 1e-25, 1e20, 1e150])
def test_float64_has_a_wider_one(scale):
    gradients = rows(1.0).double() * scale
    r, messages = stepped(gradients)
    expected = vr.gsnr(list(rows(1.0).double()), [1.0] * K, 0.1, 1.0)
    torch.testing.assert_close(r, expected, rtol=1e-12, atol=0)
    assert not messages


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e15])
def test_zeros_and_gradients_that_agree_are_no_underflow(scale):
    gradients = rows(scale)
    gradients[:, :40] = 0
    gradients[:, 40:70] = gradients[0, 40:70]
    assert not stepped(gradients)[1]


@pytest.mark.parametrize("make", [VRSGD, VRAdam, VRLARS, VRLAMB], ids=lambda make: make.__name__)
def test_where_it_is_left_later_that_is_said_within_16_steps_and_once(make):
    layers = [nn.Parameter(torch.ones(SIZE)), nn.Parameter(torch.ones(SIZE))]
    optimizer = make([("sound", layers[0]), ("layer", layers[1])], lr=1e-30)
    messages = []
    for step in range(40):
        scales = 1.0, 1.0 if step < 2 else 1e-25
        with warnings.catch_warnings(record=True, action="always") as now:
            optimizer.zero_grad()
            for both in zip(*(rows(scale, seed=step) for scale in scales), strict=True):
                sum((p * row).sum() for p, row in zip(layers, both, strict=True)).backward()
            optimizer.step()
        messages += [(step, str(w.message)) for w in now]
    ((step, message),) = messages
    assert 2 <= step < 18
    assert LOST in message


def attached(rank, ranks, scale):
    """What two ranks of four micro-batches say."""
    model = nn.Linear(SIZE, 1, bias=False)
    ddp = DistributedDataParallel(model)
    base = torch.optim.SGD([("layer", model.weight)], lr=1e-30)
    optimizer = VarianceReduced(base)
    optimizer.attach(ddp)
    with warnings.catch_warnings(record=True, action="always") as messages:
        for number, row in enumerate(rows(scale)[rank::ranks]):
            ddp.require_backward_grad_sync = number == K // ranks - 1
            ddp(row[None]).sum().backward()
        optimizer.step()
    return [str(w.message) for w in messages if "r is not right" in str(w.message)]


@pytest.mark.parametrize("scale", [1e-25, 1e20, 1.0])
def test_it_is_said_under_ddp_too(ranks, scale):
    messages = ranks(2)(attached, scale)
    assert [scale != 1.0] * 2 == [
        any(LOST in message for message in of_rank) for of_rank in messages
    ]
