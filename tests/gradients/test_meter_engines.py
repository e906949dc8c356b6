"""Where a meter works: compiled, autocast, checkpointed, tied, frozen, growing, mixed models."""

import contextlib
import math
import shutil

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from bigbatch import AdaptiveBatch, Fixed, GradientMeter
from bigbatch.errors import BigbatchError, GradientError
from bigbatch.statistics.norms import flattened, squared_norm
from oracles import noise as oracle
from single_process_training import (
    RAGGED,
    Experts,
    accumulate,
    data,
    expected_of,
    mean_loss,
    network,
    right_or_refused,
    rows_of,
    same,
)

torch.set_num_threads(1)  # small tensors: a second thread only waits
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to sum on")
ALL = {
    "confidence": 0.9,
    "per_layer": True,
    "half_batch_cosine": True,
}  # everything that can be asked for


def cosine_of(model, batches):
    """Of the sums of the even and the odd micro-batches."""
    rows = rows_of(model, batches) * torch.tensor([[len(y)] for _, y in batches])
    return float(torch.cosine_similarity(rows[::2].sum(0), rows[1::2].sum(0), dim=0))


def all_right(model, actual, batches, rel=1e-9):
    """Every number that can be asked for agrees with the others and with the oracle."""
    assert same(expected_of(model, batches), actual, rel)
    assert pytest.approx(cosine_of(model, batches), rel=rel) == actual.half_batch_cosine
    assert pytest.approx(actual.grad_variance) == math.fsum(
        one.grad_variance for one in actual.layers.values()
    )
    low, high = actual.similarity_interval
    assert low < actual.similarity < high
    return True


# compiled


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_measured_as_the_plain_one(backend, before, fresh_compiler):
    model, batches = network(), data()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    if before:  # the hooks are there when it is compiled, or come to a graph that is
        compiled(batches[0][0])
    with GradientMeter(compiled, **ALL) as meter:
        for _ in range(2):
            accumulate(compiled, batches)
            assert all_right(model, meter.read(RAGGED), batches)
            model.zero_grad()


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_a_model_compiled_by_inductor_is_measured_as_the_plain_one(fresh_compiler):
    torch.manual_seed(0)
    model, batches = nn.Linear(4, 3).double(), data([5, 5, 5])
    compiled = torch.compile(model)
    with GradientMeter(compiled, **ALL) as meter:
        accumulate(compiled, batches)
        assert all_right(model, meter.read([5] * 3), batches)


# types


@pytest.mark.parametrize("loss", ["weighted", "mean"])
def test_under_bfloat16_autocast_the_gradients_that_arrive_are_measured(loss):
    model, batches = network(torch.float32), data(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = expected_of(model, batches, loss)
    with GradientMeter(model, loss=loss, **ALL) as meter:
        total = sum(RAGGED)
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = mean_loss(model, x, y)
            (value * (len(y) / total if loss == "weighted" else 1.0)).backward()
        # a share n / N is another number to round to bfloat16 on the way back
        assert same(expected, meter.read(RAGGED), rel=0.03)


def test_layers_of_three_types_in_one_model_are_measured_together():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.wide, self.single = nn.Linear(4, 8).double(), nn.Linear(8, 8)
            self.narrow, self.head = nn.Linear(8, 8).bfloat16(), nn.Linear(8, 3).double()

        def forward(self, x):
            hidden = torch.tanh(self.single(torch.tanh(self.wide(x.double())).float()))
            return self.head(self.narrow(hidden.bfloat16()).double())

    model, batches = Mixed(), data()
    with GradientMeter(model, **ALL) as meter:
        accumulate(model, batches)
        step = meter.read(RAGGED)
    # one layer's gradients are bfloat16, and rounded again as they are added up
    assert same(expected_of(model, batches), step, rel=0.02)
    assert ["wide", "single", "narrow", "head"] == list(step.layers)
    # that layer aside, float32
    rows = rows_of(model, batches)[:, -27:]
    assert pytest.approx(tuple(oracle.weighted(rows, RAGGED))[:2], rel=1e-3) == (
        step.layers["head"].grad_sqnorm,
        step.layers["head"].grad_variance,
    )


def test_narrow_parameters_with_wide_gradients_are_measured():
    weight = nn.Parameter(torch.zeros(3000, dtype=torch.bfloat16))
    if not hasattr(weight, "grad_dtype"):
        pytest.skip("this torch gives a gradient the type of its parameter")
    weight.grad_dtype = torch.float32
    gradients = torch.randn(4, 3000, generator=torch.Generator().manual_seed(2)) + 0.1
    gradients = gradients.bfloat16().float()  # what a cast lets through; their sums need more
    with GradientMeter([weight], loss="mean", confidence=0.9, half_batch_cosine=True) as meter:
        for gradient in gradients:
            (weight.float() * gradient).sum().backward()
        step = meter.read([4] * 4)
    assert same(oracle.mean(gradients, [4] * 4), step, rel=1e-4)  # float32


def test_a_complex_parameter_is_refused_by_name():
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(BigbatchError, match="complex"):
        GradientMeter([weight])
    with GradientMeter(network()) as meter, pytest.raises(BigbatchError, match="complex"):
        meter.select([*meter.source.parameters, weight])


def test_a_complex_parameter_that_is_frozen_does_no_harm():
    class Rotated(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()
            turns = torch.polar(torch.ones(2), torch.arange(2.0)).to(torch.complex128)
            self.turns = nn.Parameter(turns, requires_grad=False)

        def forward(self, x):
            pairs = torch.view_as_complex(x.view(-1, 2, 2)) * self.turns
            return self.body(torch.view_as_real(pairs).flatten(1))

    model = Rotated()
    with GradientMeter(model, **ALL) as meter:
        accumulate(model, data())
        assert all_right(model, meter.read(RAGGED), data())


@pytest.mark.parametrize("late", [False, True])
def test_a_sparse_gradient_is_refused_by_name(late):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3))
    meter = GradientMeter(model, **ALL)
    with (
        pytest.raises(GradientError, match="sparse=False"),
        meter.micro_batch() if late else contextlib.nullcontext(),
    ):
        model(torch.arange(5)).square().mean().backward()


# odd shapes and places


def test_scalars_and_empty_parameters_go_with_everything():
    torch.manual_seed(0)

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(2.0))
            self.nothing = nn.Parameter(torch.zeros(0, 3))
            self.body = nn.Linear(4, 3)
            self.double()

        def forward(self, x):
            return self.body(x) / self.temperature + self.nothing.sum()

    model, batches = Odd(), data()
    with GradientMeter(model, **ALL) as meter:
        for zero in (True, False):
            accumulate(model, batches)
            assert all_right(model, meter.read(RAGGED), batches)
            model.zero_grad(set_to_none=zero)


def test_weights_under_a_parametrization_are_measured():
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 6)), nn.Linear(6, 3)).double()
    with GradientMeter(model, **ALL) as meter:
        accumulate(model, data())
        assert all_right(model, meter.read(RAGGED), data())


def test_a_tied_weight_goes_with_everything():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)).double()
    model[2].weight = model[0].weight
    with GradientMeter(model, **ALL) as meter:
        accumulate(model, data())
        assert all_right(model, meter.read(RAGGED), data())


@pytest.mark.parametrize("mark", [False, True])
def test_parameters_that_some_or_all_micro_batches_miss_go_with_everything(mark):
    model = Experts()
    with GradientMeter(model, **ALL) as meter:
        accumulate(model, data(), mark=meter.micro_batch if mark else contextlib.nullcontext)
        assert all_right(model, meter.read(RAGGED), data())


# checkpointing


class Checkpointed(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.reentrant = reentrant
        self.double()

    def forward(self, x):
        hidden = torch.tanh(self.stem(x))
        if self.reentrant is None:
            return self.head(self.body(hidden))
        return self.head(checkpoint(self.body, hidden, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mark", [False, True])
def test_a_checkpointed_model_is_measured_as_the_plain_one_or_refused(reentrant, mark):
    model = Checkpointed(reentrant)
    meter = GradientMeter(model, **ALL)
    marked = meter.micro_batch if mark else contextlib.nullcontext

    def measure():
        accumulate(model, data(), mark=marked)
        return meter.read(RAGGED)

    if mark or not reentrant:
        assert all_right(Checkpointed(), measure(), data())
    else:
        assert right_or_refused(expected_of(Checkpointed(), data()), measure)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_loop_measures_a_checkpointed_model(reentrant):
    model, batches = Checkpointed(reentrant), data([5, 5, 5, 5])
    meter = GradientMeter(model, **ALL)
    train = AdaptiveBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        batches,
        policy=Fixed(20),
        micro_batch=5,
        meter=meter,
        every=1,
    )
    for step in train:
        for x, y in step:
            step.backward(mean_loss(model, x, y))
        assert all_right(Checkpointed(), step.update().statistics, batches)


def test_a_loop_whose_losses_are_means_over_tokens_measures_per_token():
    model, batches, tokens = network(), data([5, 5, 5, 5]), [70, 12, 55, 31]
    rows = rows_of(model, batches)
    # a loop counts in samples: the share of the tokens, of 20 samples
    expected = oracle.weighted(rows, [20 * n / sum(tokens) for n in tokens])
    weighted = rows * torch.tensor(tokens)[:, None]
    cosine = torch.cosine_similarity(weighted[::2].sum(0), weighted[1::2].sum(0), dim=0)
    meter = GradientMeter(model, **ALL)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    train = AdaptiveBatch(
        model, own, batches, policy=Fixed(20), micro_batch=5, meter=meter, every=1
    )
    for step in train:
        for (x, y), n in zip(step, tokens, strict=True):
            step.backward(mean_loss(model, x, y), weight=n)
        noise = step.update().statistics
        assert same(expected, noise)
        assert pytest.approx(float(cosine)) == noise.half_batch_cosine
        assert pytest.approx(noise.grad_variance) == math.fsum(
            one.grad_variance for one in noise.layers.values()
        )


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 40, 3), nn.Tanh(), nn.Conv2d(40, 7, 2))
        self.double().to(memory_format=torch.channels_last)

    def forward(self, x):  # of 4 numbers a sample
        images = torch.outer(x.sum(1), torch.linspace(-1, 1, 48, dtype=x.dtype)).sin()
        return self.body(images.view(-1, 3, 4, 4)).mean((2, 3))


def test_weights_whose_channels_come_last_are_measured():
    model, batches = Images(), data()
    assert not model.body[0].weight.is_contiguous()
    expected = oracle.weighted(rows_of(model, batches), RAGGED)
    with GradientMeter(model, **ALL) as meter, GradientMeter(model) as other:
        accumulate(model, batches)
        assert same(expected, meter.read(RAGGED))
        model.body[2].weight.grad.data.mul_(0.5)  # and probed
        with pytest.raises(GradientError, match="not the sum"):
            other.read(RAGGED)


def test_dense_gradients_are_read_where_they_are():
    whole = torch.randn(8, 6, 5, 4)
    for dense in (whole, whole.to(memory_format=torch.channels_last), whole.permute(2, 0, 3, 1)):
        flat = flattened(dense, dense.stride())
        assert flat.data_ptr() == dense.data_ptr()
        assert pytest.approx(float(whole.square().sum())) == float(squared_norm(dense))
    assert pytest.approx(float(whole[:, 1].square().sum())) == float(squared_norm(whole[:, 1]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_autocast_around_a_whole_step_changes_no_sum(device):
    seen = []
    for where in (contextlib.nullcontext(), torch.autocast(device, torch.bfloat16)):
        weight = nn.Parameter(torch.zeros(5000, device=device))
        draw = torch.Generator().manual_seed(2)
        with GradientMeter([weight], confidence=0.9, half_batch_cosine=True) as meter, where:
            for _ in range(4):
                (weight * torch.randn(5000, generator=draw).to(device)).sum().backward()
            seen.append(meter.read([1] * 4))
    assert seen[0] == seen[1]


def normalized():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


def test_batch_normalization_gives_the_gradients_of_each_micro_batch():
    model, batches = normalized(), data([3, 9, 2, 6])
    with GradientMeter(model, **ALL) as meter:
        expected = oracle.weighted(rows_of(model, batches), [3, 9, 2, 6])
        accumulate(model, batches)
        assert same(expected, meter.read([3, 9, 2, 6]))


def test_a_micro_batch_of_one_that_batch_normalization_refuses_spoils_no_later_step():
    model = normalized()
    with GradientMeter(model, **ALL) as meter:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            accumulate(model, data([3, 1]))
        model.zero_grad()
        expected = oracle.weighted(rows_of(model, data([3, 5])), [3, 5])
        accumulate(model, data([3, 5]))
        assert same(expected, meter.read([3, 5]))


@pytest.mark.thorough
def test_compiled_autograd_traces_no_hook_of_ours_and_is_refused():
    compiled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    model = network()
    with GradientMeter(model) as meter:
        with compiled:
            accumulate(model, data())
        with pytest.raises(GradientError, match="ran in compiled autograd"):
            meter.read(RAGGED)


# parameters that come and go


def test_a_model_that_thaws_while_it_is_measured_is_right_or_refused():
    model = network()
    model[0].requires_grad_(False)
    meter = GradientMeter(model, **ALL)
    for thawed in (False, True, True):
        model[0].requires_grad_(thawed)

        def measure():
            accumulate(model, data())
            return meter.read(RAGGED)

        assert right_or_refused(expected_of(model, data()), measure)
        model.zero_grad()
        meter.select(model.parameters())  # looks for parameters that have no hook yet
    accumulate(model, data())
    assert all_right(model, meter.read(RAGGED), data())


def test_a_model_that_freezes_while_it_is_measured_is_right():
    model = network()
    with GradientMeter(model, **ALL) as meter:
        accumulate(model, data())
        assert all_right(model, meter.read(RAGGED), data())
        model.zero_grad()
        model[0].requires_grad_(False)
        accumulate(model, data())
        assert all_right(model, meter.read(RAGGED), data())


class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.extra = network(), nn.Linear(4, 3).double()

    def forward(self, x):
        return self.body(x) + self.extra(x)


def test_parameters_that_are_added_between_steps_are_measured_from_then_on():
    model = Grows()
    with GradientMeter(model.body, confidence=0.9, per_layer=True, half_batch_cosine=True) as meter:
        accumulate(model.body, data())
        assert all_right(model.body, meter.read(RAGGED), data())
        model.zero_grad()
        meter.select([*meter.source.parameters, *model.extra.parameters()])
        accumulate(model, data())
        assert all_right(model, meter.read(RAGGED), data())


def test_parameters_that_are_added_within_a_step_are_refused():
    model, extra = network(), nn.Linear(4, 3).double()
    meter = GradientMeter(model, **ALL)
    total = sum(RAGGED)
    (x, y), *rest = data()
    (cross_entropy(model(x) + extra(x), y) * len(y) / total).backward()
    meter.select([*meter.source.parameters, *extra.parameters()])

    def measure():
        for x, y in rest:
            (cross_entropy(model(x) + extra(x), y) * len(y) / total).backward()
        return meter.read(RAGGED)

    with pytest.raises(GradientError):
        measure()


def test_a_parameter_group_that_an_optimizer_gets_on_the_way_is_measured_and_zeroed():
    both = Grows()
    batches = data([5] * 8)
    own = torch.optim.SGD(both.body.parameters(), lr=0.1)
    meter = GradientMeter(both.body, **ALL)
    train = AdaptiveBatch(
        both.body,
        own,
        batches,
        policy=Fixed(20),
        micro_batch=5,
        meter=meter,
        lr_scaling=None,
        every=1,
    )
    seen = []
    for number, step in enumerate(train):
        model = both.body if number == 0 else both
        expected = expected_of(model, batches[4 * number : 4 * number + 4])
        for x, y in step:
            step.backward(mean_loss(model, x, y))
        noise = step.update().statistics
        assert same(expected, noise)
        seen.append(list(noise.layers))
        assert all(p.grad is None for p in both.parameters())
        if number == 0:
            own.add_param_group({"params": list(both.extra.parameters())})
    assert [["0", "2"], ["0", "2", "others"]] == seen


def test_a_model_that_changes_its_type_between_steps_is_measured():
    model = network(torch.float32)
    with GradientMeter(model, **ALL) as meter:
        accumulate(model, data(dtype=torch.float32))
        meter.read(RAGGED)
        model.zero_grad()
        model.double()
        accumulate(model, data())
        assert all_right(model, meter.read(RAGGED), data())


def test_a_meter_on_a_part_of_the_model_measures_that_part():
    model, batches = network(), data()
    expected = oracle.weighted(rows_of(model, batches)[:, 30:], RAGGED)  # after 4 x 6 + 6
    with GradientMeter(model[2], **ALL) as meter:
        accumulate(model, batches)
        assert same(expected, meter.read(RAGGED))


def test_a_backward_towards_some_parameters_only_counts_those():
    model, batches = network(), data()
    head = list(model[2].parameters())
    with GradientMeter(model, **ALL) as meter:
        for x, y in batches:
            (mean_loss(model, x, y) * len(y) / 19).backward(inputs=head)
        expected = oracle.weighted(rows_of(model, batches)[:, 30:], RAGGED)
        assert same(expected, meter.read(RAGGED))
