"""Losses that are no mean of their micro-batch are said; ordinary ones never are."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.optim import SGD

import bigbatch as bb
from bigbatch.errors import LoopError
from bigbatch.training.loss_check import LossCheck

torch.set_num_threads(1)
SEED = 2


class Classifier(nn.Module):
    """Three classes of five numbers; loss functions of a logits, a target and this module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(SEED)
        self.body = nn.Linear(5, 3)
        self.log_weight = nn.Parameter(torch.zeros(()))
        self.register_buffer("two", torch.tensor(2.0))

    def forward(self, x):
        return self.body(x)


def one_hot(y):
    return F.one_hot(y, 3).float()


def cross(z, y, _=None, **options):
    return F.cross_entropy(z, y, **options)


def loop(micro=4, batch=16, samples=32, **settings):
    model = Classifier()
    x = torch.randn(samples, 5)
    batches = [(x, torch.arange(samples) % 3)]
    opt = SGD(model.parameters(), lr=0.01)
    policy = settings.pop("policy", bb.Fixed(batch))
    return bb.AdaptiveBatch(
        model, opt, batches, policy=policy, micro_batch=micro, **{"every": 1, **settings}
    )


def warnings_of(train, loss_of, passes=1):
    """What is said of the losses in so many passes."""
    with warnings.catch_warnings(record=True, action="always") as found:
        for _ in range(passes):
            for step in train:
                for x, y in step:
                    step.backward(loss_of(train.model(x), y, train.model))
                step.update()
    found = [each for each in found if "mean" in str(each.message)]
    assert all(each.filename == __file__ for each in found)  # the line of the loop
    return [str(each.message) for each in found]


# a GradScaler's


def scaler_of(scale=2.0**16, factor=2.0):
    return GradScaler("cpu", init_scale=scale, growth_factor=factor)


SCALED = {
    "cross entropy": lambda s: lambda z, y, _: s.scale(cross(z, y)),
    "mean": lambda s: lambda z, y, _: s.scale((z - 1).square().mean()),
    "divided before": lambda s: lambda z, y, _: s.scale(cross(z, y) / 4),
    "divided after": lambda s: lambda z, y, _: s.scale(cross(z, y)) / 4,
    "weighed": lambda s: lambda z, y, m: s.scale(cross(z, y) * m.two),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_loss_that_a_scaler_has_scaled_is_refused_where_none_was_given(name):
    train = loop()
    with pytest.raises(LoopError, match=r"AdaptiveBatch\(scaler=scaler\)"):
        warnings_of(train, SCALED[name](scaler_of()))


@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**16])
def test_it_is_known_by_the_scaler_and_not_by_the_scale(scale):
    with pytest.raises(LoopError, match="scaled by a GradScaler"):
        warnings_of(loop(), SCALED["cross entropy"](scaler_of(scale, 1.5)))


def test_a_loss_that_is_scaled_twice_is_refused():
    scaler = scaler_of()
    with pytest.raises(LoopError, match="pass the unscaled loss"):
        warnings_of(loop(scaler=scaler), SCALED["cross entropy"](scaler))
    assert [] == warnings_of(loop(scaler=scaler_of()), cross)


def test_a_scaler_that_is_off_is_none():
    scaler = GradScaler("cpu", enabled=False)
    assert [] == warnings_of(loop(), lambda z, y, _: scaler.scale(cross(z, y)))


# a share of it


DIVIDED = {
    "by hand": lambda z, y, _: cross(z, y) / 4,
    "by half": lambda z, y, _: cross(z, y) / 2,
    "in place": lambda z, y, _: cross(z, y).div_(8),
    "squares": lambda z, y, _: F.mse_loss(z, one_hot(y)) / 4,
    "a float": lambda z, y, _: cross(z, y, weight=torch.ones(3)) / 4.0,
    "cast": lambda z, y, _: cross(z, y).double() / 4,
    "own mean": lambda z, y, _: cross(z, y, reduction="none").mean() / 4,
    "binary": lambda z, y, _: F.binary_cross_entropy_with_logits(z, one_hot(y)) / 16,
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_mean_loss_that_is_divided_as_accumulation_does_is_said_once(name):
    (message,) = warnings_of(loop(), DIVIDED[name], passes=2)
    assert "was divided by" in message
    assert "pass the undivided loss" in message


# a sum


SUMMED = {
    "cross entropy": lambda z, y, _: cross(z, y, reduction="sum"),
    "squares": lambda z, y, _: F.mse_loss(z, one_hot(y), reduction="sum"),
    "huber": lambda z, y, _: F.huber_loss(z, one_hot(y), reduction="sum"),
    "binary": lambda z, y, _: F.binary_cross_entropy_with_logits(z, one_hot(y), reduction="sum"),
    "two sums": lambda z, y, _: (
        cross(z, y, reduction="sum") + F.mse_loss(z, one_hot(y), reduction="sum")
    ),
    "own sum": lambda z, y, _: cross(z, y, reduction="none").sum(),
    "absolute": lambda z, y, _: F.l1_loss(z, one_hot(y), reduction="sum"),
    "two own sums": lambda z, y, _: (
        cross(z, y, reduction="none").sum() + (z - one_hot(y)).square().sum()
    ),
    "two terms": lambda z, y, _: (
        F.binary_cross_entropy_with_logits(z, one_hot(y), reduction="sum")
        - 0.5 * (1 + z - z.square()).sum()
    ),
}


@pytest.mark.parametrize("name", SUMMED)
def test_a_loss_function_that_adds_up_is_said_once(name):
    (message,) = warnings_of(loop(), SUMMED[name], passes=2)
    assert 'reduction="mean"' in message


# a mean over something else than samples


def mask(y):
    return (y > 0).double() if y[0] else torch.ones(len(y))


def masked(z, y):
    return cross(z, y, reduction="none") * mask(y)


ELEMENTS = {
    "masked mean": lambda z, y, _: (
        (cross(z, y, reduction="none") * mask(y)).sum() / mask(y).sum().clamp(min=1)
    ),
    "chosen samples": lambda z, y, _: z[mask(y) > 0].square().mean(),
    "chosen squares": lambda z, y, _: F.mse_loss(z[mask(y) > 0], one_hot(y)[mask(y) > 0]),
    "sum by hand": lambda z, y, _: cross(z, y, reduction="sum") / mask(y).sum(),
    "half of it": lambda z, y, _: 0.5 * (masked(z, y).sum() / mask(y).sum()),
    "negative": lambda z, y, _: -(masked(z, y).sum() / mask(y).sum()),
    "one minus it": lambda z, y, _: 1 - z[mask(y) > 0].sigmoid().mean(),
    "two terms": lambda z, y, _: (
        F.smooth_l1_loss(z[mask(y) > 0], one_hot(y)[mask(y) > 0]) + cross(z, y)
    ),
    "two tasks": lambda z, y, _: cross(z[mask(y) > 0], y[mask(y) > 0]) + cross(2 * z, y),
    "two sums": lambda z, y, _: (masked(z, y).sum() + cross(z, y, reduction="sum")) / mask(y).sum(),
    "a quotient of means": lambda z, y, _: masked(z, y).mean() / mask(y).mean(),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_a_mean_over_different_numbers_of_elements_is_said_once(name):
    (message,) = warnings_of(loop(), ELEMENTS[name], passes=2)
    assert "pass what the sum is divided by: step.backward(loss, weight=mask.sum())" in message


def test_it_is_not_said_where_the_weight_is_given():
    train, loss_of = loop(), ELEMENTS["masked mean"]
    with warnings.catch_warnings(action="error"):
        for step in train:
            for x, y in step:
                step.backward(loss_of(train.model(x), y, None), weight=mask(y).sum())
            step.update()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_, loss):
        return 2 * loss

    @staticmethod
    def backward(_, gradient):
        return 2 * gradient


def uneven(z, y):
    return cross(z, y, ignore_index=1)


def both(z, y):
    return torch.stack([uneven(z, y), z.square().mean()])


TERMS = {
    "a tensor": lambda z, y, m: uneven(z, y) * m.two,
    "divided by a tensor": lambda z, y, m: uneven(z, y) / m.two,
    "a dot product": lambda z, y, _: torch.dot(torch.tensor([1, 0.3]), both(z, y)),
    "einsum": lambda z, y, _: torch.einsum("i,i->", torch.tensor([1, 0.3]), both(z, y)),
    "interpolated": lambda z, y, _: torch.lerp(uneven(z, y), z.square().mean(), 0.3),
    "a function": lambda z, y, _: Doubled.apply(uneven(z, y)),
    "a power": lambda z, y, _: uneven(z, y).exp(),
    "class weights": lambda z, y, _: (
        cross(z, y, weight=torch.tensor([1.0, 2.0, 3.0])) + z.square().mean()
    ),
    "ignored labels": lambda z, y, _: 0.5 * z.mean() - cross(z, y, ignore_index=1) / -3,
    "a stack": lambda z, y, _: torch.stack([cross(z, y), cross(z, y, ignore_index=0)]).sum(),
}


@pytest.mark.parametrize("name", TERMS)
def test_a_mean_over_labels_among_other_terms_is_said_once(name):
    (message,) = warnings_of(loop(), TERMS[name], passes=2)
    assert "is no plain mean over its labels" in message
    assert "pass weight=" in message


def test_a_tensor_that_multiplies_a_mean_over_labels_is_named():
    (message,) = warnings_of(loop(), TERMS["a tensor"])
    assert "(times a tensor)" in message


@pytest.mark.parametrize("begins_plain", [False, True])
def test_labels_that_become_uneven_late_are_said_once(begins_plain):
    step = 0

    def loss_of(z, y, _):
        nonlocal step
        step += 1
        term = 0 if begins_plain and step < 20 else z.square().mean()
        return cross(z, y, ignore_index=1 if step > 30 else -100) + term

    (message,) = warnings_of(loop(), loss_of, passes=6)
    assert "is no plain mean over its labels" in message


# ordinary ones


def perplexed(z, y, _):
    return cross(z, y) / math.log(2)


def uncertain(z, y, m):
    return cross(z, y) * (-m.log_weight).exp() + m.log_weight / 2


def simulated(z, y, _):
    """A path for each of 2^60 ways through its graph."""
    place, speed = z, z
    for _ in range(60):
        place = place + speed / 8
        speed = speed - place / 8
    return place.square().mean() + speed.mean()


def contrastive(z, y, _):
    similar = F.normalize(z, dim=1) @ F.normalize(z, dim=1).T / 0.1
    return (cross(similar, torch.arange(len(z))) + cross(similar.T, torch.arange(len(z)))) / 2


def of_each_sample(z, y, _):
    """A mean of the means over different numbers of numbers of each sample."""
    return sum(z[i, : 1 + int(y[i])].square().mean() for i in range(len(y))) / len(y)


ORDINARY = {
    "of each sample": of_each_sample,
    "distance of parameters": lambda z, y, m: (
        cross(z, y) + F.mse_loss(m.body.weight, torch.zeros(3, 5), reduction="sum")
    ),
    "equal class weights": lambda z, y, _: cross(z, y, weight=torch.full((3,), 2.0)) + z.mean(),
    "times what changes": lambda z, y, _: cross(z, y) * torch.rand(()) + z.square().mean(),
    "a mean by what changes": lambda z, y, _: z.square().mean() / torch.rand(()),
    "cross entropy": cross,
    "smoothed": lambda z, y, _: cross(z, y, label_smoothing=0.1),
    "class weights": lambda z, y, _: cross(z, y, weight=torch.tensor([1.0, 2.0, 3.0])),
    "squares": lambda z, y, _: F.mse_loss(z, one_hot(y)),
    "half the squares": lambda z, y, _: F.mse_loss(z, one_hot(y)) / 2,
    "half by a factor": lambda z, y, _: 0.5 * F.mse_loss(z, one_hot(y)),
    "squares by hand": lambda z, y, _: (z - one_hot(y)).square().mean(),
    "half by hand": lambda z, y, _: (z - one_hot(y)).square().sum(1).mean() / 2,
    "sum over samples": lambda z, y, _: cross(z, y, reduction="sum") / len(y),
    "sum over labels": lambda z, y, _: cross(z, y, reduction="sum") / (y != -100).sum(),
    "own sum": lambda z, y, _: cross(z, y, reduction="none").sum() / len(y),
    "weights of samples": lambda z, y, _: (
        cross(z, y, reduction="none") * torch.full_like(z[:, 0], 1 / len(y))
    ).sum(),
    "weighed sum": lambda z, y, _: cross(z, y) + 0.01 * z.square().mean(),
    "mean of two": lambda z, y, _: (cross(z, y) + F.mse_loss(z, one_hot(y))) / 2,
    "mean of three": lambda z, y, _: sum([cross(z, y)] * 3) / 3,
    "mean of a stack": lambda z, y, _: torch.stack([cross(z, y)] * 4).mean(),
    "weighed": lambda z, y, _: 2 * cross(z, y),
    "weighed by 65536": lambda z, y, _: 65536.0 * cross(z, y),
    "weighed by a tensor": lambda z, y, m: cross(z, y) * m.two,
    "weighed by a new tensor": lambda z, y, _: cross(z, y) * torch.tensor(65536.0),
    "bits": perplexed,
    "temperature": lambda z, y, _: cross(z / 2, y),
    "penalty": lambda z, y, m: cross(z, y) + 1e-4 * sum(p.square().sum() for p in m.parameters()),
    "uncertainty": uncertain,
    "contrastive": contrastive,
    "simulated": simulated,
    "distilled": lambda z, y, _: F.kl_div(z.log_softmax(1), one_hot(y), reduction="batchmean") * 4,
    "reshaped": lambda z, y, _: cross(z, y).reshape(1),
    "half precision": lambda z, y, _: cross(z.bfloat16(), y).float(),
    "zeros": lambda z, y, _: 0 * cross(z, y),
    "negative": lambda z, y, _: -z.log_softmax(1).gather(1, y[:, None]).mean(),
    "learned": lambda z, y, m: cross(z, y) * m.log_weight.exp(),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_loss_is_never_said(name):
    train = loop(samples=44, policy=bb.SimiGrad(0.9, max_batch=40), batch_size=8)
    assert [] == warnings_of(train, ORDINARY[name], passes=6)


@pytest.mark.parametrize("penalty", [torch.square, torch.abs])
def test_a_penalty_of_as_many_rows_as_samples_is_no_sum_over_samples(penalty):
    def loss_of(z, y, model):
        return cross(z, y) + penalty(model.body.weight).sum()

    assert [] == warnings_of(loop(micro=3, batch=12), loss_of)  # the weight is (3, 5)


def test_another_rank_than_the_first_is_silent():
    check = LossCheck(warns=False)
    z = torch.ones(4, 3, requires_grad=True)
    with warnings.catch_warnings(action="error"):
        check.examine(z.square().sum(), 4, 1, "samples")
