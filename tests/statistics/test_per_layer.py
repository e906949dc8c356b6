"""Each layer measured by itself, under the name that the model gives it."""

import copy
import math
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bigbatch import AdaptiveBatch, Fixed, GradientMeter
from bigbatch.errors import SettingError
from oracles import noise as oracle
from single_process_training import RAGGED, Experts, accumulate, data

torch.set_num_threads(1)  # small tensors: a second thread only waits


def measured(model, *, loss="weighted", **options):
    with GradientMeter(model, loss=loss, per_layer=True, **options) as meter:
        accumulate(model, data(), loss)
        return meter.read(RAGGED)


def expected_of(model, layers, loss="weighted"):
    """The oracle's answer of each layer, from the gradients of the parameters named for it."""
    model = copy.deepcopy(model)
    named = dict(model.named_parameters())
    expected = {}
    for layer, names in layers.items():
        rows = []
        for x, y in data():
            parts = torch.autograd.grad(
                cross_entropy(model(x), y), [named[n] for n in names], materialize_grads=True
            )
            rows.append(torch.cat([part.flatten() for part in parts]))
        expected[layer] = getattr(oracle, loss)(torch.stack(rows), RAGGED)
    return expected


def same(expected, actual):
    """float64 sums in another order: 1e-12, and a signal is a difference of two of them."""
    seen = {name: (one.grad_sqnorm, one.grad_variance) for name, one in actual.layers.items()}
    assert list(expected) == list(seen)
    for name, one in expected.items():
        assert pytest.approx((one.grad_sqnorm, one.grad_variance), rel=1e-9) == seen[name]
    return True


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


class Nested(nn.Module):
    """A parameter of the root, one of a block, and layers within the block."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.block = nn.Module()
        self.block.gate = nn.Parameter(torch.randn(6))
        self.block.first = nn.Linear(4, 6)
        self.block.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6))
        self.head = nn.Linear(6, 3, bias=False)
        self.double()

    def forward(self, x):
        hidden = torch.tanh(self.block.first(self.scale * x)) * self.block.gate
        return self.head(self.block.second(hidden))


OF_PLAIN = {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]}
OF_NESTED = {
    "": ["scale"],
    "block": ["block.gate"],
    "block.first": ["block.first.weight", "block.first.bias"],
    "block.second.0": ["block.second.0.weight", "block.second.0.bias"],
    "block.second.2": ["block.second.2.weight", "block.second.2.bias"],
    "head": ["head.weight"],
}


@pytest.mark.parametrize("loss", ["weighted", "mean"])
@pytest.mark.parametrize(("make", "layers"), [(plain, OF_PLAIN), (Nested, OF_NESTED)])
def test_each_layer_has_the_oracles_numbers_of_its_own_parameters(make, layers, loss):
    assert same(expected_of(make(), layers, loss), measured(make(), loss=loss))


@pytest.mark.parametrize("loss", ["weighted", "mean"])
def test_the_whole_is_what_it_is_without_layers_and_the_sum_of_them(loss):
    step = measured(Nested(), loss=loss, confidence=0.9, half_batch_cosine=True)
    with GradientMeter(
        model := Nested(), loss=loss, confidence=0.9, half_batch_cosine=True
    ) as meter:
        accumulate(model, data(), loss)
        whole = meter.read(RAGGED)
    assert pytest.approx((whole.grad_sqnorm, whole.grad_variance)) == (
        step.grad_sqnorm,
        step.grad_variance,
    )
    layers = step.layers.values()
    assert pytest.approx(whole.grad_sqnorm) == math.fsum(one.grad_sqnorm for one in layers)
    assert pytest.approx(whole.grad_variance) == math.fsum(one.grad_variance for one in layers)
    # sketches are float32
    assert pytest.approx(whole.similarity_interval, rel=1e-5) == step.similarity_interval
    assert pytest.approx(whole.half_batch_cosine) == step.half_batch_cosine
    assert {(19, 4)} == {(one.samples, one.micro_batches) for one in layers}


def test_without_asking_there_are_none():
    with GradientMeter(model := plain()) as meter:
        accumulate(model, data())
        assert {} == meter.read(RAGGED).layers


def test_a_compiled_model_has_the_names_of_the_plain_one():
    model = plain()
    compiled = torch.compile(model, backend="eager")
    assert same(expected_of(plain(), OF_PLAIN), measured(compiled))


def test_a_compiled_part_of_a_model_has_the_names_of_the_plain_one():
    model = Nested()
    model.block.second = torch.compile(model.block.second, backend="eager")
    assert same(expected_of(Nested(), OF_NESTED), measured(model))


def test_a_tied_weight_belongs_to_the_layer_that_has_it_first():
    def tied():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
        model[2].weight = model[0].weight
        return model.double()

    layers = {"0": ["0.weight", "0.bias"], "2": ["2.bias"], "3": ["3.weight", "3.bias"]}
    assert same(expected_of(tied(), layers), measured(tied()))


def test_the_root_alone_is_a_layer_without_name():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    assert same(expected_of(model, {"": ["weight", "bias"]}), measured(model))


def test_a_layer_of_one_parameter_is_as_the_model_of_one_parameter():
    step = measured(nn.Linear(4, 3, bias=False).double())
    assert (step.grad_sqnorm, step.grad_variance) == (
        step.layers[""].grad_sqnorm,
        step.layers[""].grad_variance,
    )


def test_a_frozen_layer_measures_nothing_and_the_others_are_right():
    model = plain()
    model[0].requires_grad_(False)
    step = measured(model)
    expected = expected_of(model, {"2": OF_PLAIN["2"]})
    frozen = step.layers.get("0")
    assert frozen is None or (0.0, 0.0) == (frozen.grad_sqnorm, frozen.grad_variance)
    assert pytest.approx(tuple(expected["2"])[:2]) == (
        step.layers["2"].grad_sqnorm,
        step.layers["2"].grad_variance,
    )
    assert pytest.approx((step.grad_sqnorm, step.grad_variance)) == tuple(expected["2"])[:2]


def test_a_layer_that_thaws_has_numbers_from_then_on():
    model = plain()
    model[0].requires_grad_(False)
    with GradientMeter(model, per_layer=True) as meter:
        accumulate(model, data())
        meter.read(RAGGED)
        model.zero_grad()
        model[0].requires_grad_(True)
        expected = expected_of(model, OF_PLAIN)
        for x, y in data():
            with meter.micro_batch():
                (cross_entropy(model(x), y) * len(y) / 19).backward()
        assert same(expected, meter.read(RAGGED))


def test_a_layer_that_no_micro_batch_reaches_is_there_without_noise():
    model = plain()
    model.register_module("unused", nn.Linear(2, 2))
    model.forward = lambda x: model[2](model[1](model[0](x)))
    step = measured(model)
    assert ["0", "2", "unused"] == list(step.layers)
    assert (0.0, 0.0) == (step.layers["unused"].grad_sqnorm, step.layers["unused"].grad_variance)
    assert math.isnan(step.layers["unused"].similarity)


def test_a_layer_that_some_micro_batches_do_not_reach_counts_as_zero_there():
    layers = {
        "shared": ["shared.weight", "shared.bias"],
        "experts.0": ["experts.0.weight", "experts.0.bias"],  # one micro-batch of four
        "experts.1": ["experts.1.weight", "experts.1.bias"],
        "experts.2": ["experts.2.weight", "experts.2.bias"],  # none
    }
    assert same(expected_of(Experts(), layers), measured(Experts()))


def test_parameters_that_are_added_are_one_layer_of_others():
    class Both(nn.Module):
        def __init__(self, model, head):
            super().__init__()
            self.model, self.head = model, head

        def forward(self, x):
            return self.head(self.model(x))

    torch.manual_seed(1)
    model, head = plain(), nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)).double()
    expected = expected_of(
        Both(model, head),
        {
            "0": ["model.0.weight", "model.0.bias"],
            "2": ["model.2.weight", "model.2.bias"],
            "others": [f"head.{i}.{name}" for i in (0, 1) for name in ("weight", "bias")],
        },
    )
    with GradientMeter(model, per_layer=True) as meter:
        meter.select([*meter.source.parameters, *head[0].parameters()])
        # known ones stay where they are
        meter.select([*meter.source.parameters, *head.parameters()])
        accumulate(Both(model, head), data())
        assert same(expected, meter.read(RAGGED))


def test_parameters_that_the_model_holds_already_are_no_others():
    model = plain()
    with GradientMeter(model, per_layer=True) as meter:
        meter.select([*meter.source.parameters, *model.parameters()])
        accumulate(model, data())
        assert ["0", "2"] == list(meter.read(RAGGED).layers)


def test_layers_of_types_of_their_own_are_measured_together():
    model = plain()
    model[2].float()
    model.forward = lambda x: model[2](model[1](model[0](x)).float())
    reference = plain()
    reference[2].float()
    reference.forward = lambda x: reference[2](reference[1](reference[0](x)).float())
    expected = {}
    rows = defaultdict(list)
    for x, y in data():
        parts = torch.autograd.grad(cross_entropy(reference(x), y), list(reference.parameters()))
        for name, pair in (("0", parts[:2]), ("2", parts[2:])):
            rows[name].append(torch.cat([part.flatten().double() for part in pair]))
    expected = {name: oracle.weighted(torch.stack(of), RAGGED) for name, of in rows.items()}
    step = measured(model)
    for name, one in expected.items():
        # float32: sums of 50 squares
        assert pytest.approx((one.grad_sqnorm, one.grad_variance), rel=1e-4) == (
            step.layers[name].grad_sqnorm,
            step.layers[name].grad_variance,
        )


def test_a_step_of_a_loop_records_its_layers():
    model, (x, y) = plain(), data([16])[0]
    meter = GradientMeter(model, per_layer=True)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    train = AdaptiveBatch(
        model, own, [(x, y)], policy=Fixed(16), micro_batch=4, meter=meter, every=1
    )
    for step in train:
        for batch in step:
            step.backward(cross_entropy(model(batch[0]), batch[1]))
        noise = step.update().statistics
        assert ["0", "2"] == list(noise.layers)
        assert pytest.approx(noise.grad_variance) == math.fsum(
            n.grad_variance for n in noise.layers.values()
        )


def test_layers_of_a_bare_list_of_parameters_are_refused():
    with pytest.raises(SettingError, match="per_layer=True needs the model"):
        GradientMeter(list(plain().parameters()), per_layer=True)
