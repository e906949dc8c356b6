"""check_groups against models and losses that groups= measures, refuses, or cannot judge itself."""

import math
import random

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, mse_loss
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from bigbatch.errors import GradientError, SettingError
from group_gradients import Scaled
from tensors import same

WORDS, LENGTH = 30, 6


def mlp(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12), *layers, nn.Tanh(), nn.Linear(12, 3))


def classes(samples=16):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(samples, 5, generator=draw), torch.arange(samples) % 3


class LanguageModel(nn.Module):
    """An embedding that is also the head, positions, and a transformer layer."""

    def __init__(self, dropped=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 16)
        self.positions = nn.Embedding(LENGTH, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropped, batch_first=True)

    def forward(self, ids):
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.layer(x) @ self.words.weight.t()


def texts(samples=8):
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(WORDS, (samples, LENGTH), generator=draw)
    labels = ids.clone()
    for number in range(samples):
        labels[number, : number % LENGTH] = -100
    return ids, labels


def token_loss(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


@pytest.mark.parametrize("groups", [2, 3, 8, 64])
def test_a_mean_over_samples_is_ok(groups):
    x, y = classes()
    checked = bb.check_groups(mlp(), cross_entropy, x, y, groups=groups)
    assert checked.ok, checked
    assert min(groups, 16) == checked.groups == checked.loop.micro_batches
    assert ["0.weight", "0.bias", "2.weight", "2.bias"] == [p.name for p in checked.parameters]
    assert pytest.approx(1) == sum(p.share for p in checked.parameters)
    assert max(p.error for p in checked.parameters) < 1e-5
    assert pytest.approx(checked.loop.noise_scale, rel=1e-4) == checked.one_backward.noise_scale
    assert "train" == checked.mode


def test_the_loop_is_that_of_a_meter():
    model, (x, y) = mlp().double(), classes()
    checked = bb.check_groups(model, cross_entropy, x.double(), y, groups=4)
    with bb.GradientMeter(model) as meter:
        for part, labels in zip(x.double().chunk(4), y.chunk(4), strict=True):
            (cross_entropy(model(part), labels) / 4).backward()
        expected = meter.read([4] * 4)
    assert pytest.approx(expected.grad_variance, rel=1e-10) == checked.loop.grad_variance
    assert pytest.approx(expected.grad_sqnorm, rel=1e-10) == checked.one_backward.grad_sqnorm


def masked_loss(output, labels):
    losses = cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.sum() / (labels != -100).sum()


@pytest.mark.parametrize("group", range(4))
def test_a_group_without_weight_is_left_out(group):
    torch.manual_seed(0)
    model, x, y, weight = nn.Linear(5, 3), torch.randn(8, 5), torch.arange(8) % 3, torch.ones(8)
    weight[2 * group : 2 * group + 2] = 0

    def weighted(output, labels):
        labels, weight = labels
        losses = cross_entropy(output, labels, reduction="none") * weight
        return losses.sum() / weight.sum().clamp_min(1)

    assert bb.check_groups(model, weighted, x, (y, weight), groups=4, weight=weight).ok


def test_a_masked_mean_needs_the_weights():
    ids, labels = texts()
    model = LanguageModel()
    weight = (labels != -100).sum(1)
    assert bb.check_groups(model, masked_loss, ids, labels, groups=4, weight=weight).ok
    without = bb.check_groups(model, masked_loss, ids, labels, groups=4)
    assert not without.ok
    assert "weight=" in str(without)
    with pytest.raises(SettingError, match=r"weight= has shape \(8, 6\)"):
        bb.check_groups(model, masked_loss, ids, labels, weight=labels != -100)


def test_the_mean_of_a_cross_entropy_says_its_weights_itself():
    ids, labels = texts()
    assert bb.check_groups(LanguageModel(), token_loss, ids, labels, groups=4).ok


def of_covariances(output, y):
    return (output.t() @ output).square().mean()


def summed(output, y):
    return cross_entropy(output, y, reduction="sum")


def of_neighbours(output, y):
    return mse_loss(output[1:], output[:-1])


@pytest.mark.parametrize("loss_fn", [summed, of_neighbours])
def test_a_loss_that_is_no_mean_over_samples_is_found(loss_fn):
    checked = bb.check_groups(mlp(), loss_fn, *classes())
    assert not checked.ok
    assert 4 == len(checked.failures)
    assert "depends on other samples" in str(checked)
    assert not any(p.refusal for p in checked.parameters)


def test_a_loss_of_covariances_is_refused_by_its_product():
    checked = bb.check_groups(mlp(), of_covariances, *classes())
    assert {"a group's samples influence others in MmBackward0"} == {
        p.refusal for p in checked.parameters
    }


def squares(output, y):
    return mse_loss(output[:, 0], y.float())


NONLINEAR_IN_A_MEAN = {
    "SqrtBackward0": lambda o, y: squares(o, y).sqrt(),
    "PowBackward0": lambda o, y: squares(o, y) ** 0.5,
    "ExpBackward0": lambda o, y: cross_entropy(o, y, label_smoothing=0.1).exp(),  # perplexity
    "LogBackward0": lambda o, y: ((o[:, 0] - y).square().mean() + 0.1).log(),
    "MulBackward0": lambda o, y: squares(o, y) * cross_entropy(o, y),
    "DivBackward0": lambda o, y: (y == 0).sum() / o.sigmoid().sum(),
    "ReciprocalBackward0": lambda o, y: 1 / o.sigmoid().mean(),
}


@pytest.mark.parametrize("name", NONLINEAR_IN_A_MEAN)
def test_a_nonlinear_function_of_a_mean_over_samples_is_refused_by_its_name(name):
    """A part of the samples has another mean, where the function has another slope."""
    model, (x, y), loss_fn = mlp(), classes(), NONLINEAR_IN_A_MEAN[name]
    checked = bb.check_groups(model, loss_fn, x, y, groups=4)
    reason = f"a group's samples influence others in {name}"
    assert {reason} == {p.refusal for p in checked.parameters}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train = bb.AdaptiveBatch(
        model, optimizer, [(x, y)], policy=bb.Fixed(16), micro_batch=16, groups=4
    )
    step = next(iter(train))
    part, labels = next(iter(step))
    with pytest.raises(GradientError, match=reason):
        step.backward(loss_fn(model(part), labels))


def test_the_root_of_a_mean_is_refused_where_time_is_first():
    def time_first(output, y):
        return mse_loss(output.transpose(0, 1), torch.ones(5, len(output), 3)).sqrt()

    checked = bb.check_groups(mlp(), time_first, torch.randn(8, 5, 5))
    assert {"a group's samples influence others in SqrtBackward0"} == {
        p.refusal for p in checked.parameters
    }


def in_a_loop(output, y):
    """Slices of one sample, and of its first two numbers, where the batch is a multiple of two."""
    parts = [output[i : i + 1].squeeze(0)[:2] for i in range(len(y))]
    return sum(mse_loss(part, torch.ones(2)).sqrt() for part in parts) / len(y)


LINEAR_IN_MEANS = {
    "two terms": lambda m, o, y: cross_entropy(o, y, label_smoothing=0.1) - squares(o, y) / 3,
    "learned weight": lambda m, o, y: (-m.scale).exp() * squares(o, y) + m.scale,
    "learned deviation": lambda m, o, y: squares(o, y) / (2 * m.scale**2) + m.scale.log(),
    "learned temperature": lambda m, o, y: cross_entropy(o * m.scale.exp(), y),
    "norm of a weight": lambda m, o, y: cross_entropy(o, y) + 0.1 * m.scale.square().sum().sqrt(),
    "root of each sample": lambda m, o, y: (o - y[:, None]).square().mean(1).sqrt().mean(),
    "loop": lambda m, o, y: in_a_loop(o, y),
    "flooding": lambda m, o, y: (cross_entropy(o, y) - 0.1).abs() + 0.1,
    "hinge": lambda m, o, y: torch.relu(cross_entropy(o, y) - 0.1),
}


@pytest.mark.parametrize("kind", LINEAR_IN_MEANS)
def test_a_loss_that_is_linear_in_means_over_samples_is_measured(kind):
    model, (x, y) = mlp(), classes()
    model.scale = nn.Parameter(torch.tensor(0.7))
    checked = bb.check_groups(model, lambda o, y: LINEAR_IN_MEANS[kind](model, o, y), x, y)
    # a parameter outside the samples has no groups, which is no matter of the others
    assert {"scale"} >= {p.name for p in checked.failures}
    assert not any("influence" in p.refusal for p in checked.parameters)
    assert pytest.approx(checked.loop.noise_scale, rel=1e-4) == checked.one_backward.noise_scale


def test_what_is_refused_is_listed_with_the_reason():
    model = mlp(nn.BatchNorm1d(12))
    checked = bb.check_groups(model, cross_entropy, *classes())
    assert not checked.ok
    assert all("BatchNorm" in p.refusal and math.isnan(p.error) for p in checked.parameters)
    assert "0.weight (12, 5): BatchNorm normalizes over the samples of all groups" in str(checked)
    assert "depends on other samples" not in str(checked)
    for parameter in model[1].parameters():
        parameter.requires_grad = False
    assert bb.check_groups(model.eval(), cross_entropy, *classes()).ok


def test_a_compiled_model_is_refused_by_name():
    model, (x, y) = torch.compile(mlp(), backend="aot_eager"), classes()
    parameters = r"(_orig_mod\.[02]\.(weight|bias), ){3}1 more"
    said = r"torch.compile makes one function .* cannot be seen for " + parameters
    with bb.GradientMeter(model, groups=4), pytest.raises(GradientError, match=said):
        cross_entropy(model(x), y).backward()
    checked = bb.check_groups(model, cross_entropy, x, y)
    assert all("torch.compile" in p.refusal for p in checked.parameters)


class Grid(nn.Module):
    """A buffer of as many rows as the batch has samples, in a layer of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("grid", torch.randn(8, 3))
        self.layer, self.of_grid = nn.Linear(5, 10), nn.Linear(3, 10)

    def forward(self, x):
        return torch.tanh(self.layer(x)) @ torch.tanh(self.of_grid(self.grid)).t()


def test_a_buffer_as_long_as_the_batch_is_no_samples():
    checked = bb.check_groups(Grid(), cross_entropy, *classes(8), groups=4)
    assert checked.ok, checked


class PartlyByHand(nn.Module):
    """A parameter in a function of its own, and one that the loss does not reach."""

    def __init__(self):
        super().__init__()
        self.net, self.unused = mlp(), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.full((3,), 1.5))

    def forward(self, x):
        return Scaled.apply(self.net(x), self.scale)


def test_only_some_parameters_are_refused():
    checked = bb.check_groups(PartlyByHand(), cross_entropy, *classes())
    assert ["scale"] == [p.name for p in checked.failures]
    assert "ScaledBackward" in checked.failures[0].refusal
    assert 4 == sum(p.error < 1e-5 for p in checked.parameters)
    assert not any("unused" in p.name for p in checked.parameters)
    assert str(checked).splitlines()[3].split()[1:3] == ["refused", "scale"]


def test_dropout_is_compared_in_eval_mode():
    checked = bb.check_groups(mlp(nn.Dropout(0.5)), cross_entropy, *classes())
    assert checked.ok
    assert "eval" == checked.mode
    ids, labels = texts()
    weight = (labels != -100).sum(1)
    checked = bb.check_groups(LanguageModel(0.1), token_loss, ids, labels, weight=weight)
    assert checked.ok, checked
    assert "eval" == checked.mode


def test_batch_norm_is_refused_with_dropout_too():
    checked = bb.check_groups(mlp(nn.BatchNorm1d(12), nn.Dropout()), cross_entropy, *classes())
    assert not checked.ok
    assert all(p.refusal for p in checked.parameters)


def test_a_loss_that_is_always_random_is_refused():
    def loss_fn(output, y):
        return cross_entropy(dropout(output, 0.5), y)

    with pytest.raises(SettingError, match="random in eval mode too"):
        bb.check_groups(mlp(), loss_fn, *classes())


def test_everything_is_as_before():
    model = mlp(nn.BatchNorm1d(12), nn.Dropout(0.5))
    model[0].eval()
    model[0].weight.grad = torch.ones(12, 5)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    torch.manual_seed(7)
    random.seed(7)
    expected = torch.rand(3), random.random()
    torch.manual_seed(7)
    random.seed(7)
    bb.check_groups(model, cross_entropy, *classes())
    assert expected[1] == random.random()
    torch.testing.assert_close(expected[0], torch.rand(3), rtol=0, atol=0)
    assert modes == [m.training for m in model.modules()]
    assert same(state.values(), model.state_dict().values())
    assert bool((model[0].weight.grad == 1).all())
    assert all(p.grad is None for p in list(model.parameters())[1:])


class Wrapped(nn.Module):
    """Takes two arguments, and keeps activations by checkpointing."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, scale):
        return checkpoint(self.net, x * scale, use_reentrant=False)


@pytest.mark.parametrize("kind", [tuple, dict])
def test_several_inputs(kind):
    x, y = classes()
    given = {"x": x, "scale": torch.rand(16, 1)}
    given = given if kind is dict else tuple(given.values())
    assert bb.check_groups(Wrapped(), cross_entropy, given, y).ok


def test_a_half_type_needs_another_tolerance():
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        checked = bb.check_groups(mlp(), cross_entropy, *classes(64), tolerance=0.1)
    assert checked.ok, checked
    assert max(p.error for p in checked.parameters) > 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(1, 5), "y": torch.zeros(1).long()}, "a batch of 1 samples"),
        ({"loss_fn": lambda output, y: output.mean(1)}, r"loss_fn returned \(16,\)"),
        ({"loss_fn": lambda output, y: 1.0}, "loss_fn returned float"),
        ({"model": nn.Identity()}, "no parameter requires a gradient"),
        ({"groups": 1}, "groups=1"),
        ({"tolerance": 0.0}, r"tolerance=0\.0"),
    ],
)
def test_a_wrong_setting_is_refused(change, message):
    x, y = classes()
    with pytest.raises(SettingError, match=message):
        bb.check_groups(**{"model": mlp(), "loss_fn": cross_entropy, "x": x, "y": y} | change)


def test_a_long_table_is_cut():
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(15)))
    table = str(bb.check_groups(model, cross_entropy, classes()[0], classes()[1]))
    assert 2 + 1 + 12 + 1 == len(table.splitlines())
    assert table.endswith("and 18 more")
