"""Micro-batches that the advisor cuts from a batch, against a hand loop that really cuts it."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bigbatch as bb
from bigbatch.advisor.html_page import html_page
from oracles.hand_loop import measured

STEPS = 24


def network(dropout=0.0):
    def block(channels, filters):
        layers = nn.Conv2d(channels, filters, 3, 2, 1), nn.BatchNorm2d(filters), nn.ReLU()
        return nn.Sequential(*layers)

    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(8, 10)
    return nn.Sequential(block(3, 4), block(4, 8), *head).double()


LOSSES = {
    "cross-entropy": lambda out, y: F.cross_entropy(out, y),
    "a module with class weights": nn.CrossEntropyLoss(
        torch.linspace(1, 2, 10, dtype=torch.float64), label_smoothing=0.1
    ),
    "in steps": lambda out, y: -out.log_softmax(1).gather(1, y[:, None]).squeeze(1).mean() / 3,
    "of two parts": lambda out, y: 0.3 * F.cross_entropy(out, y) + 0.7 * out.square().mean(),
    "over every position": lambda out, y: F.cross_entropy(
        torch.stack([out, 2 * out], 1).view(-1, 10), torch.stack([y, y], 1).view(-1)
    ),
    "with a constant of the outputs": lambda out, y: (
        F.cross_entropy(out, y) + (out - out.detach().tanh()).square().mean()
    ),
    "in place": lambda out, y: F.cross_entropy(out, y).mul_(2).add_(1),
}


def cut_gradients(model, loss_of, x, y, parts):
    """The gradients of a batch's micro-batches, by a forward and backward of each."""
    random, again = torch.get_rng_state(), copy.deepcopy(model)
    gradients = []
    for images, labels in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
        loss = loss_of(again(images), labels)
        parameters = torch.autograd.grad(loss, list(again.parameters()))
        gradients.append(torch.cat([one.flatten() for one in parameters]))
    torch.set_rng_state(random)
    return gradients


def train(
    seed, loss_of, *, dropout=0.0, batch=64, parts=4, backwards=1, steps=STEPS, context=nullcontext
):
    """(losses and buffers, what was measured by hand, the advice; None without) of a training."""
    torch.manual_seed(seed)
    model = network(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, expected = [], []
    with bb.advise(model, optimizer) if parts else nullcontext() as advice, context():
        for _ in range(steps):
            optimizer.zero_grad()
            x = torch.randn(backwards, batch, 3, 8, 8, dtype=torch.float64)
            for images in x:
                y = torch.randint(10, (batch,))
                loss = loss_of(model(images), y)
                loss.backward()
                losses.append(loss.item())
            if parts and backwards == 1:
                gradients = cut_gradients(model, loss_of, images, y, parts)
                sizes = [len(part) for part in y.tensor_split(parts)]
                expected.append(measured(gradients, sizes))
            optimizer.step()
    return [*losses, *(x.tolist() for x in model.buffers())], expected, advice


def assert_measured(expected, advice):
    assert ("", "cut micro-batches") == (advice.refusal, advice.observations.way)
    assert len(advice.observations.measurements) > 2
    for one in advice.observations.measurements:
        actual, by_loop = one.statistics, expected[one.step]
        assert pytest.approx(by_loop.grad_variance, rel=1e-9) == actual.grad_variance
        assert pytest.approx(by_loop.grad_sqnorm, rel=1e-7, abs=1e-12) == actual.grad_sqnorm
        assert by_loop[2:] == (actual.samples, actual.micro_batches)
        layers = actual.layers.values()
        assert pytest.approx(sum(one.grad_variance for one in layers)) == actual.grad_variance


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LOSSES)
def test_cut_micro_batches_are_those_of_a_loop_that_cuts_the_batch(name, seed):
    assert_measured(*train(seed, LOSSES[name])[1:])


@pytest.mark.parametrize(("batch", "parts"), [(6, 2), (50, 3), (200, 8)])
def test_sizes_of_other_batches(batch, parts):
    *_, expected, advice = train(0, F.cross_entropy, batch=batch, parts=parts)
    assert_measured(expected, advice)
    size = -(-batch // parts)
    assert f"BatchNorm sees micro-batches of {size} samples" in str(advice) + html_page(advice)
    assert f"micro-batches of {size} samples" in advice.as_dict()["batch_norm"]


@pytest.mark.parametrize("seed", range(2))
def test_dropout_draws_numbers_of_its_own_and_the_training_those_that_it_would(seed):
    advised = train(seed, F.cross_entropy, dropout=0.5)
    assert_measured(*advised[1:])
    assert train(seed, F.cross_entropy, dropout=0.5, parts=0)[0] == advised[0]


def test_a_loss_of_the_model_itself_is_that_of_the_micro_batch():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network()

        def forward(self, x, labels):
            scores = self.network(x)
            return {"loss": F.cross_entropy(scores, labels), "scores": scores}

    torch.manual_seed(0)
    model, expected = Own(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with bb.advise(model, optimizer) as advice:
        for _ in range(STEPS):
            x, y = torch.randn(64, 3, 8, 8, dtype=torch.float64), torch.randint(10, (64,))
            optimizer.zero_grad()
            (model(x, labels=y)["loss"] / 2).backward()
            gradients = cut_gradients(
                model.network, lambda out, y: F.cross_entropy(out, y) / 2, x, y, 4
            )
            expected.append(measured(gradients, [16] * 4))
            optimizer.step()
    assert_measured(expected, advice)


def test_too_few_steps_to_try_another_way_are_said_to_be():
    advice = train(0, F.cross_entropy, steps=8)[-1]
    assert advice.refusal.endswith("another way was not tried in the 8 steps that were observed")
    assert "groups=None" not in advice.refusal


def test_two_backwards_are_cut_each():
    *_, advice = train(0, lambda out, y: F.cross_entropy(out, y) / 2, backwards=2)
    assert "cut micro-batches" == advice.observations.way
    assert {(128, 8)} == {
        (one.statistics.samples, one.statistics.micro_batches)
        for one in advice.observations.measurements
    }


def on_a_rank(rank, ranks):
    """(measurements, the gradients of each step's micro-batches) of a training under DDP."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, draw = nn.parallel.DistributedDataParallel(model), torch.Generator().manual_seed(rank)
    steps = []
    with bb.advise(model, optimizer) as advice:
        for _ in range(STEPS):
            x = torch.randn(40, 3, 8, 8, dtype=torch.float64, generator=draw)
            y = torch.randint(10, (40,), generator=draw)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            steps.append(cut_gradients(model.module, F.cross_entropy, x, y, 2))
            optimizer.step()
    return advice.as_dict()["measurements"], steps


def test_ranks_compare_the_micro_batches_of_all(ranks):
    (measurements, one), (_, other) = ranks(2)(on_a_rank)
    assert len(measurements) > 2
    for actual in measurements:
        expected = measured([*one[actual["step"]], *other[actual["step"]]], [20] * 4)
        assert pytest.approx(expected.grad_variance, rel=1e-9) == actual["grad_variance"]
        assert pytest.approx(expected.grad_sqnorm, rel=1e-7) == actual["grad_sqnorm"]
        assert (80, 4) == (actual["samples"], actual["micro_batches"])


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


weight = torch.ones(10, dtype=torch.float64, requires_grad=True)


def changed_in_place(out, y):
    out[:, 0] = out[:, 0] + 1
    return F.cross_entropy(out, y)


NOT_CUT = {
    "of weights that are not the model's": (
        lambda out, y: F.cross_entropy(out * weight, y),
        nullcontext,
        "more than the model's outputs and constants",
    ),
    "of a function of its own": (
        lambda out, y: F.cross_entropy(OwnFunction.apply(out) + out, y),
        nullcontext,
        "its loss has an autograd.Function",
    ),
    "that changes outputs": (changed_in_place, nullcontext, "not one number"),
    "under a mode": (F.cross_entropy, lambda: torch.device("cpu"), "under a TorchFunctionMode"),
}


@pytest.mark.parametrize("name", NOT_CUT)
def test_a_loss_that_cannot_be_repeated_is_measured_by_consecutive_steps(name):
    loss_of, context, reason = NOT_CUT[name]
    advised, _, advice = train(0, loss_of, context=context)
    assert "consecutive steps" == advice.observations.way
    assert any(reason in unseen for unseen in advice.observations.unseen)
    assert "groups=None" not in str(advice)
    assert train(0, loss_of, parts=0, context=context)[0] == advised
    assert 0 == torch._C._len_torch_function_stack()
