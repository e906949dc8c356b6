"""Where the sum of the gradients is kept: in `.grad` itself while nobody else writes there."""

import contextlib
import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.errors import GradientError
from bigbatch.optim import VRSGD, VRAdam
from single_process_training import Fails

K = 8
CHANGED = "gradients were changed"


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 2)).to(dtype)


def batches(step, dtype=torch.float32):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(K, 5, 6, generator=draw, dtype=torch.float64).to(dtype)


def train(model, optimizer, steps, change=lambda step, parameters: None):
    """Weights after the steps; `change` is what happens between the last backward and step()."""
    for step in steps:
        for x in batches(step, model[0].weight.dtype):
            (model(x).square().mean() / K).backward()
        change(step, list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def clip_to_nothing(step, parameters):
    clip_grad_norm_(parameters, 1e9)  # multiplies by 1, so `.grad` is written to


@pytest.mark.parametrize("fused", [None, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_r_is_the_same_to_the_bit_wherever_the_sum_is_kept(dtype, fused):
    models = [network(dtype) for _ in range(2)]
    ends = [
        train(model, VRAdam(model.parameters(), 0.01, fused=fused), range(6), change)
        for model, change in zip(models, (lambda *_: None, clip_to_nothing), strict=True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_buffer_is_freed_once_grad_has_come_through_untouched():
    model = network()
    optimizer = VRSGD(model.parameters(), 0.1)
    elements = sum(p.numel() for p in model.parameters())
    before = alive()
    copies = []

    def count(step, parameters):
        """Elements of all tensors that were made since, over those of the parameters."""
        gc.collect()
        made = [x for number, x in alive().items() if number not in before]
        copies.append(sum(x.numel() for x in made) / elements)

    train(model, optimizer, range(2), count)
    assert copies[0] >= 3  # M2, S and `.grad`
    assert copies[1] < copies[0] - 0.9


def alive():
    """All tensors, by numbers that no other has as long as these are kept."""
    return {id(x): x for x in gc.get_objects() if type(x) is torch.Tensor}


def test_a_step_that_is_the_first_to_change_gradients_says_so_once():
    model = network()
    optimizer = VRSGD(model.parameters(), 0.1)
    train(model, optimizer, range(2))
    with pytest.warns(UserWarning, match=CHANGED):
        train(model, optimizer, [2], clip_to_nothing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(3, 5), clip_to_nothing)


def test_scaling_all_gradients_alike_changes_no_gsnr_not_even_unannounced():
    def halve(step, parameters):
        for p in parameters if step == 2 else ():
            p.grad.mul_(0.5)

    ends = []
    for change in (lambda *_: None, halve):
        model = network(torch.float64)
        optimizer = VRSGD(model.parameters(), 0.0, watch=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, optimizer, range(3), change)
        ends.append(optimizer.gsnr.mean)
    torch.testing.assert_close(*ends, rtol=1e-12, atol=0)


def test_clipping_by_value_from_the_first_step_on_leaves_r():
    clip = 1e-3
    model = network(torch.float64)
    optimizer = VRSGD(model.parameters(), 0.0, watch=True)
    train(model, optimizer, range(2), lambda step, p: clip_grad_value_(p, clip))
    other = network(torch.float64)
    plain = VRSGD(other.parameters(), 0.0, watch=True)
    train(other, plain, range(2))
    assert torch.equal(plain.gsnr.mean, optimizer.gsnr.mean)
    assert not torch.equal(plain.gsnr.lr_factor, optimizer.gsnr.lr_factor)


def clamped(gradient):
    return gradient.clamp(-0.01, 0.01)


def results_of(change=None, hook=None, scale=lambda step: 1.0, steps=4, made=lambda row: row):
    """Mean r of each step of one weight, and the warnings."""
    weight = nn.Parameter(torch.zeros(100))
    optimizer = VRSGD([weight], 0.0, watch=True)
    if hook is not None:
        weight.register_hook(hook)  # after ours
    draw, means = torch.Generator().manual_seed(0), []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(steps):
            for row in (torch.randn(K, 100, generator=draw) + 0.5) * scale(step):
                torch.autograd.backward([weight], [made(row)])
            if change is not None:
                change(weight)
            optimizer.step()
            optimizer.zero_grad()
            means.append(optimizer.gsnr.mean.item())
    return means, [str(warning.message) for warning in seen]


def test_r_is_that_of_what_a_hook_makes_of_the_gradients():
    """Also of a hook that is registered after those of the optimizer."""
    hooked, expected = results_of(hook=clamped), results_of(made=clamped)
    assert expected == hooked
    assert hooked[0] != results_of()[0]


def test_a_meter_next_to_the_optimizer_costs_it_sums_of_its_own():
    model = network()
    optimizer, meter = VRSGD(model.parameters(), 0.1), bb.GradientMeter(model)
    for step in range(2):
        for x in batches(step):
            (model(x).square().mean() / K).backward()
        meter.read([5] * K)
        optimizer.step()
        optimizer.zero_grad()
    for x in batches(2):
        (model(x).square().mean() / K).backward()
    state, parameters = optimizer.gsnr_state, [*model.parameters()]
    sums, _ = state.moments.sums_and_m2s(parameters, state.sums_of)
    kept = state.sums_of(parameters)
    assert all(s is None or s.data_ptr() != t.data_ptr() for s, t in zip(kept, sums, strict=True))


def test_changes_through_data_are_found_by_comparing_now_and_then():
    def clip(weight):
        weight.grad.data.clamp_(-2.0, 2.0)  # which no version counter shows

    sizes = {"scale": lambda step: 1e-4 if step == 0 else 1.0, "steps": 40}
    plain, clipped = results_of(**sizes), results_of(clip, **sizes)
    assert not plain[1]
    assert 1 == len(clipped[1])
    assert CHANGED in clipped[1][0]
    same = [abs(a - b) < 1e-6 for a, b in zip(plain[0], clipped[0], strict=True)]
    assert same[0]
    assert not all(same[1:15])
    assert all(same[16:])  # compared in step 16, and with sums of its own from there on


def test_a_weight_that_grew_between_steps_has_new_moments():
    weight = nn.Parameter(torch.zeros(10, 8))
    optimizer = VRSGD([weight], 0.1, watch=True)
    draw = torch.Generator().manual_seed(0)
    for rows in (10, 10, 12):
        weight.data = torch.zeros(rows, 8)
        drawn = torch.randn(K, rows, 8, generator=draw)
        for row in drawn:
            torch.autograd.backward([weight], [row])
        optimizer.step()
        optimizer.zero_grad()
    fresh = nn.Parameter(torch.zeros(12, 8))
    other = VRSGD([fresh], 0.1)
    for row in drawn:
        torch.autograd.backward([fresh], [row])
    other.step()
    torch.testing.assert_close(weight, fresh, rtol=1e-5, atol=0)


def test_the_loops_own_rescale_of_a_ragged_step_is_no_change():
    """44 samples: the second step of an epoch has 4 micro-batches of 3 and 4 of 2, rescaled."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(44, 6, dtype=torch.float64))
    ends = []
    for clipped in (False, True):
        model = network(torch.float64)
        optimizer = VRSGD(model.parameters(), 0.05)
        loop = bb.AdaptiveBatch(
            model,
            optimizer,
            DataLoader(data, batch_size=11),
            policy=bb.Fixed(24),
            micro_batch=3,
            lr_scaling=None,
            every=1,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in loop.epochs(3):
                for step in loop:
                    for (x,) in step:
                        step.backward(model(x).square().mean())
                    if clipped:
                        step.clip_grad_norm_(1e9)
                    step.update()
        ends.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-15)


def test_half_gradients_keep_sums_of_their_own():
    model = network(torch.bfloat16)
    other = copy.deepcopy(model)
    ends = [
        train(m, VRSGD(m.parameters(), 0.1), range(4), change)
        for m, change in ((model, lambda *_: None), (other, clip_to_nothing))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_half_gradients_have_one_sum_each_whatever_a_step_reaches():
    """As with experts, of which every step uses others."""
    before = float32_elements()
    weights = [nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)) for _ in range(8)]
    optimizer = VRSGD(weights, 0.1)
    for missed in range(8):
        reached = weights[:missed] + weights[missed + 1 :]
        for _ in range(2):
            torch.autograd.backward(reached, [torch.randn_like(weight) for weight in reached])
        optimizer.step()
        optimizer.zero_grad()
    assert 2 * 8 * 1000 == float32_elements() - before  # S and M2


def float32_elements():
    """Of all tensors that are alive."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    return sum(x.numel() for x in tensors if x.dtype is torch.float32)


@pytest.mark.parametrize("clipped", [False, True])
def test_a_parameter_that_is_missed_by_micro_batches_counts_them_as_zero(clipped):
    """The second weight is reached by the even micro-batches only, whose gradients are known."""
    first, second = (nn.Parameter(torch.zeros(5, dtype=torch.float64)) for _ in range(2))
    optimizer = VRSGD([first, second], 0.0, watch=True)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        g = torch.randn(K, 5, generator=draw, dtype=torch.float64)
        g[1::2] = 0
        for i, one in enumerate(g):
            ((first + (second if i % 2 == 0 else 0)) @ (one + (i % 2)) / K).backward()
        if clipped:
            clip_grad_norm_([first, second], 1e9)
        optimizer.step()
        optimizer.zero_grad()
    q = g.mean(0).square() / g.var(0, correction=0)
    expected = (q / q.mean()).clamp(0.1, 1.0).mean().item()
    assert pytest.approx(expected, rel=1e-9) == optimizer.gsnr.mean[1].item()


# where the sum is .grad, it is added to here and not by autograd


def backwards(model, step):
    for x in batches(step, model[0].weight.dtype):
        (model(x).square().mean() / K).backward()


def trained_once(model):
    """An optimizer whose next step has its sums in `.grad`."""
    optimizer = VRSGD(model.parameters(), 0.0)
    train(model, optimizer, [0])
    return optimizer


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def plain_gradients(dtype=torch.float32):
    model = network(dtype)
    backwards(model, 1)
    return gradients(model)


def equal(expected, actual):
    return all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_grad_is_what_autograd_alone_would_have_made_of_it(dtype):
    model = network(dtype)
    _optimizer = trained_once(model)
    backwards(model, 1)
    assert equal(plain_gradients(dtype), gradients(model))


def test_grad_stays_the_tensor_it_is_wherever_it_lies():
    """As for those who keep all gradients in one array."""
    model = network()
    optimizer = trained_once(model)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    chunks = flat.split([p.numel() for p in model.parameters()])
    for p, chunk in zip(model.parameters(), chunks, strict=True):
        p.grad = chunk.view_as(p)
    tensors = [p.grad for p in model.parameters()]
    backwards(model, 1)
    assert all(p.grad is t for p, t in zip(model.parameters(), tensors, strict=True))
    assert torch.equal(flat, torch.cat([g.flatten() for g in plain_gradients()]))
    optimizer.step()


@pytest.mark.parametrize("first", ["meter", "optimizer"])
def test_a_meter_next_to_the_optimizer_sees_nothing_of_it(first):
    model = network()
    makers = {"optimizer": lambda: trained_once(model), "meter": lambda: bb.GradientMeter(model)}
    order = [first, *(makers.keys() - {first})]
    made = {name: makers[name]() for name in order}
    model.zero_grad()
    backwards(model, 1)
    noise = made["meter"].read([5] * K)
    alone = network()
    meter = bb.GradientMeter(alone)
    backwards(alone, 1)
    assert pytest.approx(meter.read([5] * K).similarity, rel=1e-6) == noise.similarity
    assert equal(plain_gradients(), gradients(model))


def test_a_meter_of_some_parameters_measures_next_to_the_optimizer_of_all():
    model = network()
    _optimizer = trained_once(model)
    meter = bb.GradientMeter([model[3].weight, model[0].bias])
    backwards(model, 1)
    assert -1 < meter.read([5] * K).similarity < 1


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph:UserWarning")
def test_a_graph_of_the_gradients_can_be_made():
    model, plain = network(torch.float64), network(torch.float64)
    _optimizer = trained_once(model)
    for m in (model, plain):
        for x in batches(1, torch.float64):
            (m(x).square().mean() / K).backward(create_graph=True)
    assert equal(gradients(plain), gradients(model))
    assert all(p.grad.grad_fn is not None for p in model.parameters())


def test_autograd_grad_leaves_grad_there():
    model = network()
    _optimizer = trained_once(model)  # whose hooks it takes along
    (model(batches(1)[0]).square().mean() / K).backward()
    before = [p.grad for p in model.parameters()]
    torch.autograd.grad(model(batches(1)[1]).square().mean(), list(model.parameters()))
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))


def test_after_a_backward_that_failed_half_way_the_step_can_be_repeated():
    model = network()
    optimizer = trained_once(model)
    x = batches(1)[0]
    model(x).square().mean().backward()
    with pytest.raises(MemoryError):  # the last layer has its gradient, the first has not
        model[3](model[2](Fails.apply(model[1](model[0](x))))).square().mean().backward()
    optimizer.zero_grad()
    backwards(model, 1)
    assert equal(plain_gradients(), gradients(model))
    optimizer.step()


@pytest.mark.cpu
def test_no_hook_is_left_when_the_optimizer_is_gone():
    model = network()
    optimizer = trained_once(model)
    backwards(model, 1)
    hooks = [p._backward_hooks for p in model.parameters()]
    assert all(len(each) == 1 for each in hooks)
    del optimizer
    gc.collect()
    assert not any(hooks)


@pytest.mark.parametrize("after", [1, 2], ids=["before the step", "within the step"])
def test_a_users_hook_on_the_sum_sees_it_and_may_change_it(after):
    """Registered when sums are in `.grad` already, so that it would run before ours."""

    def halve(parameter):
        seen.append(parameter.grad.clone())
        parameter.grad.mul_(0.5)

    ends = []
    for scaled in (True, False):
        seen, model = [], network()
        if scaled:
            trained_once(model)
        weight = model[0].weight
        for number, x in enumerate(batches(1)[:2]):
            if number == after - 1:
                weight.register_post_accumulate_grad_hook(halve)
            with contextlib.suppress(GradientError):  # what an optimizer of ours says of it
                model(x).square().mean().backward()
        ends.append([*seen, weight.grad])
    assert equal(*ends)


def test_what_goes_wrong_in_a_backward_leaves_grad_as_autograd_does(monkeypatch):
    weight = nn.Parameter(torch.ones(3))
    optimizer = VRSGD([weight], 0.0)
    for _ in range(2):
        for row in torch.randn(2, 3):
            torch.autograd.backward([weight], [row])
        optimizer.step()
        optimizer.zero_grad()
    torch.autograd.backward([weight], [torch.ones(3)])

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for where in (
        "bigbatch.kernels.native.run_at",
        "bigbatch.statistics.second_moment._add_deviations",
    ):
        monkeypatch.setattr(where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.backward([weight], [torch.ones(3)])
    assert torch.equal(torch.full((3,), 2.0), weight.grad)
    monkeypatch.undo()
    with pytest.raises(GradientError, match="not empty before the first backward"):
        torch.autograd.backward([weight], [torch.ones(3)])
