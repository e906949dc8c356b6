"""What is measured is what the optimizer trains, and what it trains is the model's."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import prune
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.errors import GradientError
from bigbatch.optim import VRSGD

torch.set_num_threads(1)
SEED = 11

pytestmark = pytest.mark.filterwarnings("ignore:k = ")


def network():
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)).double()


def loader(samples=96):
    torch.manual_seed(SEED + 1)
    x = torch.randn(samples, 5, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.randint(3, (samples,))), 16)


def loop(model, parameters=None, kind=SGD, **settings):
    opt = kind(model.parameters() if parameters is None else parameters, lr=0.1)
    return bb.AdaptiveBatch(model, opt, loader(), policy=bb.Fixed(16), **{"every": 1, **settings})


def one_step(train, forward=None):
    """The next step, and its micro-batches."""
    step, parts = next(iter(train)), []
    for x, y in step:
        parts.append((x, y))
        step.backward(cross_entropy((forward or train.model)(x), y))
    return step.update(), parts


def measured(model, parts, **options):
    """What a meter of its own says of these micro-batches."""
    sizes = [len(y) for _, y in parts]
    with bb.GradientMeter(model, **options) as meter:
        for x, y in parts:
            (cross_entropy(model(x), y) * len(y) / sum(sizes)).backward()
        return meter.read(samples=sizes)


def assert_same(expected, actual):
    """Equal but for the order of float64 sums."""
    assert pytest.approx(expected.grad_sqnorm, rel=1e-9, abs=1e-12) == actual.grad_sqnorm
    assert pytest.approx(expected.grad_variance, rel=1e-9, abs=1e-12) == actual.grad_variance


def headed(model):
    """The model with only its last layer to be trained."""
    model[:-1].requires_grad_(False)
    return model


def test_an_interval_and_layers_are_those_of_what_the_optimizer_trains():
    model = network()
    replica = headed(copy.deepcopy(model))
    options = {"per_layer": True, "confidence": 0.9, "half_batch_cosine": True}
    train = loop(model, model[3].parameters(), meter=bb.GradientMeter(model, **options))
    record, parts = one_step(train)
    expected = measured(replica, parts, **options)
    assert_same(expected, record.statistics)
    assert expected.half_batch_cosine == pytest.approx(
        record.statistics.half_batch_cosine, rel=1e-9
    )
    assert list(expected.layers) == list(record.statistics.layers) == ["0", "2", "3"]
    for name, layer in expected.layers.items():
        assert_same(layer, record.statistics.layers[name])
    assert expected.interval == record.statistics.interval


@pytest.mark.parametrize("every", [1, 2])
def test_a_gradient_that_is_not_finite_where_nothing_is_trained_skips_no_step(every):
    model = network()
    train = loop(model, model[3].parameters(), every=every)
    model[0].weight.register_hook(lambda gradient: gradient * torch.nan)
    before = model[3].weight.detach().clone()
    for _ in range(2):
        record, _ = one_step(train)
        assert not record.skipped
    assert not torch.equal(before, model[3].weight)
    assert all(p.grad is None for p in model.parameters())


def test_a_layer_that_the_optimizer_gets_later_is_measured_from_then_on():
    model = network()
    train = loop(model, model[3].parameters())
    one_step(train)
    train.optimizer.add_param_group({"params": list(model[2].parameters())})
    replica = copy.deepcopy(model)
    replica[0].requires_grad_(False)
    record, parts = one_step(train)
    assert_same(measured(replica, parts), record.statistics)


def test_a_layer_that_the_optimizer_loses_is_measured_until_then():
    model = network()
    opt = SGD([{"params": model[:3].parameters()}, {"params": model[3].parameters()}], lr=0.1)
    train = bb.AdaptiveBatch(model, opt, loader(), policy=bb.Fixed(16), every=1)
    replica = copy.deepcopy(model)
    record, parts = one_step(train)
    assert_same(measured(replica, parts), record.statistics)
    del opt.param_groups[0]
    replica = headed(copy.deepcopy(model))
    record, parts = one_step(train)
    assert_same(measured(replica, parts), record.statistics)


# parameters that are replaced


def assigned(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def layer_replaced(model):
    model[2] = nn.Linear(6, 6).double()


def layer_wrapped(model):
    model[2] = nn.Sequential(nn.Linear(6, 6).double(), nn.Tanh())


def weight_normalized(model):
    torch.nn.utils.weight_norm(model[2])


REPLACED = [assigned, layer_replaced, layer_wrapped, weight_normalized]
replaced = pytest.mark.parametrize("replace", REPLACED, ids=lambda f: f.__name__)
deprecated = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


@deprecated
@replaced
@pytest.mark.parametrize("kind", [SGD, VRSGD])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_parameter_that_was_replaced_is_an_error_at_the_next_step(replace, kind, steps):
    train = loop(network(), kind=kind)
    for _ in range(steps):
        one_step(train)
    replace(train.model)
    with pytest.raises(GradientError, match=r"not the model's any more.*build the optimizer"):
        one_step(train)
    assert steps == train.steps


def test_the_error_names_what_was_replaced():
    train = loop(network())
    train.model[2].weight = nn.Parameter(torch.zeros(6, 6, dtype=torch.float64))
    with pytest.raises(GradientError, match=r"1 of the parameters .*\(2\.weight\) are not"):
        one_step(train)


@deprecated
@replaced
def test_a_meter_refuses_to_read_a_model_whose_parameters_were_replaced(replace):
    model, batches = network(), list(loader(32))
    with bb.GradientMeter(model) as meter:
        replace(model)
        for x, y in batches:
            (cross_entropy(model(x), y) / len(batches)).backward()
        with pytest.raises(GradientError, match=r"not the model's any more.*GradientMeter"):
            meter.read(samples=[16, 16])


@pytest.mark.parametrize("number", [0, 1], ids=["measured", "not measured"])
def test_a_step_in_which_nothing_that_is_trained_has_a_gradient_is_an_error(number):
    model = network()
    train = loop(model, every=2)
    for _ in range(number):
        one_step(train)
    with pytest.raises(GradientError, match=r"no parameter that is trained .* got a gradient"):
        one_step(train, forward=copy.deepcopy(model))
    assert number == train.steps


def test_a_meter_that_sees_no_gradient_in_a_marked_micro_batch_refuses_to_read():
    model, other = network(), network()
    with bb.GradientMeter(model) as meter:
        for x, y in loader(32):
            with meter.micro_batch():
                cross_entropy(other(x), y).backward()
        with pytest.raises(GradientError, match="no parameter that is trained or measured"):
            meter.read(samples=[16, 16])


def test_a_gradient_of_zero_is_one():
    train = loop(network())
    step = next(iter(train))
    for x, y in step:
        step.backward(0 * cross_entropy(train.model(x), y))
    assert not step.update().skipped


# what is no replacement


def tie_later(model):
    model[2].bias = model[0].bias


def layer_removed(model):
    del model[2]


def frozen(model):
    model[0].requires_grad_(False)


def other_type(model):
    model.to(torch.float64)


def parametrized(model):
    torch.nn.utils.parametrizations.orthogonal(model[2])


def pruned(model):
    prune.random_unstructured(model[2], "weight", amount=0.5)


def layer_added(model):
    model.append(nn.Linear(3, 3).double())


@pytest.mark.parametrize(
    "change",
    [tie_later, layer_removed, frozen, other_type, parametrized, pruned, layer_added],
    ids=lambda f: f.__name__,
)
def test_other_changes_of_the_model_are_no_replacement(change):
    train = loop(network())
    one_step(train)
    change(train.model)
    for _ in range(2):
        assert not one_step(train)[0].skipped
    layer_added(train.model)  # what was lost before is not thought to be replaced by it
    assert not one_step(train)[0].skipped


def test_a_new_layer_that_is_handed_to_the_optimizer_is_trained():
    train = loop(network())
    one_step(train)
    layer_replaced(train.model)
    train.optimizer.add_param_group({"params": list(train.model[2].parameters())})
    before = train.model[2].weight.detach().clone()
    assert not one_step(train)[0].skipped
    assert not torch.equal(before, train.model[2].weight)


def test_a_compiled_model_is_none_that_was_replaced():
    model = network()
    train = loop(model)
    train.model = torch.compile(model, backend="eager")
    one_step(train)
    compiled = loop(train.model)
    for _ in range(2):
        assert not one_step(compiled)[0].skipped
    assigned(model)
    with pytest.raises(GradientError, match="not the model's any more"):
        one_step(compiled)
