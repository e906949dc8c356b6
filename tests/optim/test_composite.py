"""Several optimizers as one: its groups, state, steps, copies, and what it refuses."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, OneCycleLR

import bigbatch as bb
from bigbatch.errors import SettingError, StateError
from bigbatch.optim import VarianceReduced, VRAdam
from bigbatch.optim.composite import ContainerOfOptimizers
from bigbatch.optim.optimizer_settings import name_of, rates_of
from tensors import same

DECAY = lambda tick: 1 / (1 + tick / 7)  # noqa: E731


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def parts(model, **adamw):
    """Muon for the matrices, AdamW for the rest, in two groups with rates of their own."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    first, last = (p for p in model.parameters() if p.ndim < 2)
    groups = [{"params": [first], "lr": 0.02}, {"params": [last], "lr": 0.003}]
    return Muon(matrices, lr=0.05), AdamW(groups, **adamw)


def composite(model):
    return bb.Composite(*parts(model))


def backward(model, step):
    draw = torch.Generator(model[0].weight.device).manual_seed(step)
    x = torch.randn(8, 4, generator=draw, device=draw.device)
    cross_entropy(model(x), torch.arange(8, device=draw.device) % 3).backward()


def stepped(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


# one optimizer


def test_29_steps_of_a_schedule_are_those_of_both_by_hand():
    by_hand, model = network(), network()
    both = parts(by_hand)
    schedules = [LambdaLR(each, DECAY) for each in both]
    optimizer = composite(model)
    schedule = LambdaLR(optimizer, DECAY)
    for step in range(29):
        backward(by_hand, step)
        for each in (*both, *schedules):
            each.step()
        for each in both:
            each.zero_grad()
        stepped(model, optimizer, 1, step)
        schedule.step()
    assert [group["lr"] for each in both for group in each.param_groups] == rates_of(optimizer)
    assert same(weights(by_hand), weights(model))


def test_the_groups_are_one_list_of_the_parts_own():
    optimizer = composite(network())
    muon, adamw = optimizer.optimizers
    assert optimizer.param_groups is optimizer.param_groups
    assert all(
        map(
            lambda one, other: one is other,
            optimizer.param_groups,
            [*muon.param_groups, *adamw.param_groups],
        )
    )
    added = nn.Parameter(torch.zeros(3))
    adamw.add_param_group({"params": [added], "lr": 0.5})
    groups = optimizer.param_groups
    assert groups[-1] is adamw.param_groups[-1]
    adamw.load_state_dict(adamw.state_dict())  # makes new groups
    assert optimizer.param_groups is groups
    assert groups[-1] is adamw.param_groups[-1]
    assert "Composite of Muon and AdamW" == name_of(optimizer)


def test_the_state_is_that_of_the_parts():
    model = network()
    optimizer = composite(model)
    assert not optimizer.state
    stepped(model, optimizer, 1)
    muon, adamw = optimizer.optimizers
    assert {*optimizer.state} == {*muon.state, *adamw.state} == {*model.parameters()}
    assert len(optimizer.state) == 4
    assert optimizer.state[model[0].weight] is muon.state[model[0].weight]
    stranger = nn.Parameter(torch.zeros(1))
    assert optimizer.state.get(stranger, 3) == 3
    with pytest.raises(KeyError):
        optimizer.state[stranger]
    optimizer.state[model[2].bias] = {"step": torch.tensor(5.0)}
    assert adamw.state[model[2].bias]["step"] == 5
    del optimizer.state[model[0].weight]
    assert model[0].weight not in muon.state
    assert optimizer.state.get(model[0].weight) is None
    assert model[0].weight not in muon.state  # asking makes none


def test_hooks_and_closures_are_as_those_of_one_optimizer():
    model, seen = network(), []
    optimizer = composite(model)
    muon, adamw = optimizer.optimizers
    for each in (optimizer, muon, adamw):
        each.register_step_pre_hook(lambda o, *_: seen.append(("before", type(o).__name__)))
        each.register_step_post_hook(lambda o, *_: seen.append(("after", type(o).__name__)))

    def closure():
        assert torch.is_grad_enabled()
        seen.append(("closure", ""))
        backward(model, 0)
        return 7.0

    with torch.no_grad():
        assert 7.0 == optimizer.step(closure)
    assert seen == [
        ("before", "Composite"),
        ("closure", ""),
        ("before", "Muon"),
        ("after", "Muon"),
        ("before", "AdamW"),
        ("after", "AdamW"),
        ("after", "Composite"),
    ]
    optimizer.zero_grad(set_to_none=False)
    assert all((p.grad == 0).all() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_modes_reach_the_parts_that_have_them():
    seen = []

    class Moded(SGD):
        def train(self):
            seen.append("train")

        def eval(self):
            seen.append("eval")

    model = network()
    optimizer = bb.Composite(
        Moded([model[0].weight], lr=0.1), AdamW([model[0].bias, *model[2].parameters()])
    )
    optimizer.eval()
    optimizer.train()
    assert seen == ["eval", "train"]


def test_warm_restarts_set_all_rates():
    model = network()
    optimizer = composite(model)
    schedule = CosineAnnealingWarmRestarts(optimizer, 3)
    rates = []
    for step in range(5):
        stepped(model, optimizer, 1, step)
        schedule.step()
        rates.append(rates_of(optimizer))
    shares = [(1 + math.cos(math.pi * (t % 3) / 3)) / 2 for t in range(1, 6)]
    expected = [pytest.approx([s * lr for lr in (0.05, 0.02, 0.003)]) for s in shares]
    assert expected == rates


def test_one_cycle_needs_rates_alone():
    optimizer = composite(network())
    with pytest.raises(ValueError, match="cycle_momentum"):
        OneCycleLR(optimizer, [0.1, 0.2, 0.3], total_steps=9)
    OneCycleLR(optimizer, [0.1, 0.2, 0.3], total_steps=9, cycle_momentum=False)


# states


@pytest.mark.parametrize("way", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_trains_on_alike(way):
    model = network()
    optimizer = composite(model)
    stepped(model, optimizer, 3)
    other, copied = way((model, optimizer))
    assert ["Muon", "AdamW"] == [type(part).__name__ for part in copied.optimizers]
    for each in ((model, optimizer), (other, copied)):
        stepped(*each, 3, first=3)
    assert same(weights(model), weights(other))


def test_a_state_dict_loads_to_the_last_bit():
    model = network()
    optimizer = composite(model)
    stepped(model, optimizer, 3)
    saved, kept = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
    assert [0, 1, 2, 3] == sorted(saved["state"])
    assert [[0, 1], [2], [3]] == [group["params"] for group in saved["param_groups"]]
    stepped(model, optimizer, 3, first=3)
    resumed = composite(kept)
    resumed.load_state_dict(saved)
    stepped(kept, resumed, 3, first=3)
    assert same(weights(model), weights(kept))


def test_hooks_of_state_dicts_are_called():
    model, seen = network(), []
    optimizer = composite(model)
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("saving"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "own": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda o, state: {name: state[name] for name in ("state", "param_groups")}
    )
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    state = optimizer.state_dict()
    assert 1 == state["own"]
    optimizer.load_state_dict(state)
    assert ["saving", "loaded"] == seen


class Counting(SGD):
    """An optimizer whose state has an entry that is of no parameter."""

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


def test_entries_of_no_parameter_stay_with_their_optimizer():
    model = network()
    optimizer = bb.Composite(
        Counting(model[0].parameters(), lr=0.1), Counting(model[2].parameters(), lr=0.1)
    )
    backward(model, 0)
    optimizer.optimizers[1].step()
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.step()
    optimizer.load_state_dict(saved)
    assert [1, 2] == [part.state["steps"] for part in optimizer.optimizers]


def swapped(model):
    return bb.Composite(*reversed(parts(model)))


def one_group_less(model):
    muon, _ = parts(model)
    return bb.Composite(muon, AdamW([model[0].bias, model[2].bias]))


def other_optimizers(model):
    muon, adamw = parts(model)
    return bb.Composite(SGD(muon.param_groups[0]["params"], lr=0.1), adamw)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (swapped, r"groups of \[1, 1, 2\] parameters, and Composite of Muon and AdamW has"),
        (one_group_less, r"groups of \[2, 2\] parameters"),
        (other_optimizers, "ns_coefficients, ns_steps: it is of another optimizer than Muon"),
        (lambda model: SGD(model.parameters(), lr=0.1), r"groups of \[4\] parameters"),
    ],
)
def test_the_state_of_other_optimizers_is_refused_and_changes_nothing(made, message):
    model = network()
    optimizer = composite(model)
    stepped(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    other_model = network()
    other = made(other_model)
    stepped(other_model, other, 1)
    with pytest.raises(StateError, match=message):
        optimizer.load_state_dict(other.state_dict())
    assert repr(before) == repr(optimizer.state_dict())
    groups = [group for part in optimizer.optimizers for group in part.param_groups]
    assert all(map(lambda one, two: one is two, groups, optimizer.param_groups))


def test_an_error_of_the_last_optimizer_leaves_the_first_as_it_was():
    model = network()
    optimizer = composite(model)
    stepped(model, optimizer, 2)
    saved = optimizer.state_dict()
    stepped(model, optimizer, 2, first=2)
    before = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][2]["betas"]
    with pytest.raises(StateError, match="no betas: it is of another optimizer than AdamW"):
        optimizer.load_state_dict(saved)
    assert repr(before) == repr(optimizer.state_dict())


@pytest.mark.cpu
@pytest.mark.parametrize("flat", [False, True])
def test_torchs_distributed_checkpoints_save_and_load_it_exactly(flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = network()
    optimizer = composite(model)
    stepped(model, optimizer, 3)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    kept = copy.deepcopy(model)
    stepped(model, optimizer, 3, first=3)
    resumed = composite(kept)
    set_optimizer_state_dict(kept, resumed, saved, options=options)
    assert rates_of(optimizer) == rates_of(resumed)
    stepped(kept, resumed, 3, first=3)
    assert same(weights(model), weights(kept))


# scaled by GSNR


def without_matrices(optimizer):
    optimizer.param_groups[0]["vr"] = False
    return optimizer


def test_variance_reduction_scales_each_parameter_of_its_groups():
    """r g by hand: that of VarianceReduced(SGD) of the same micro-batches, then both optimizers."""
    model, by_hand = network(), network()
    matrices = [{"params": parts(model)[0].param_groups[0]["params"], "vr": False}]
    _, adamw = parts(model)
    optimizer = VarianceReduced(bb.Composite(Muon(matrices, lr=0.05), adamw), gamma=0.3)
    muon, plain = parts(by_hand)
    biases = [by_hand[0].bias, by_hand[2].bias]
    reader = VarianceReduced(SGD(biases, lr=0.0), gamma=0.3)
    for step in range(4):
        for each in (model, by_hand):
            for micro in range(8):
                backward(each, 8 * step + micro)
        optimizer.step()
        optimizer.zero_grad()
        reader.scale_gradients()
        muon.step()
        plain.step()
        muon.zero_grad()
        reader.zero_grad()
    torch.testing.assert_close(weights(by_hand), weights(model), rtol=1e-5, atol=1e-6)
    unscaled = network()
    both = composite(unscaled)
    for step in range(4):
        for micro in range(8):
            backward(unscaled, 8 * step + micro)
        both.step()
        both.zero_grad()
    assert not torch.allclose(unscaled[2].bias, model[2].bias, rtol=1e-3)


def test_a_variance_reduced_composite_saves_p_and_copies():
    model = network()
    optimizer = VarianceReduced(composite(model), beta3=0.9)

    def train(net, by, first):
        for step in range(3):
            for micro in range(8):
                backward(net, 100 * first + 8 * step + micro)
            by.step()
            by.zero_grad()

    train(model, optimizer, 0)
    other, copied = copy.deepcopy((model, optimizer))
    kept = copy.deepcopy(model)
    resumed = VarianceReduced(composite(kept), beta3=0.9)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for net, by in ((model, optimizer), (other, copied), (kept, resumed)):
        train(net, by, 1)
    assert same(weights(model), weights(other))
    assert same(weights(model), weights(kept))
    assert "VarianceReduced of Composite of Muon and AdamW" == optimizer.describe()
    assert {"gsnr_average", "exp_avg"} <= {*optimizer.state[model[2].bias]}


def test_a_fused_part_steps_unfused_where_it_would_misread_memory():
    """torch's fused SGD skips elements of half types on a CPU; so does it inside a Composite."""
    weight = nn.Parameter(torch.ones(33, dtype=torch.bfloat16, device="cpu"))
    bias = nn.Parameter(torch.ones(2, device="cpu"))
    base = bb.Composite(SGD([weight], lr=0.5, fused=True), AdamW([bias]))
    optimizer = VarianceReduced(base, gamma=1.0)
    for _ in range(8):
        (weight.sum() / 8 + bias.sum()).backward()
    with pytest.warns(UserWarning, match=r"SGD\(fused=True\) does not move most of a torch.bfl"):
        optimizer.step()
    assert (weight == 0.5).all()


# containers of other packages


class Container(Optimizer):
    """As torchtitan's OptimizersContainer: its own groups are copies that no step reads."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        everything = [p for o in optimizers for g in o.param_groups for p in g["params"]]
        super().__init__(everything, {"lr": 99.0})
        self.steps = 0

    def step(self, *args, **kwargs):
        self.steps += 1
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args, **kwargs):
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)


def test_a_container_is_stepped_by_itself_and_read_by_its_optimizers():
    model, other = network(), network()
    container = Container([*parts(model)])
    optimizer = VarianceReduced(container, gamma=1.0)
    plain = composite(other)
    assert [0.05, 0.02, 0.003] == rates_of(optimizer)
    for step in range(3):
        for micro in range(2):
            backward(model, 2 * step + micro)
            backward(other, 2 * step + micro)
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
    assert 3 == container.steps
    torch.testing.assert_close(weights(other), weights(model), rtol=1e-5, atol=1e-6)
    with pytest.raises(SettingError, match="a Container does not copy the optimizers in it"):
        copy.deepcopy(ContainerOfOptimizers(container))


# refusals


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda model: bb.Composite(), "Composite has no optimizers; pass two or more"),
        (lambda model: bb.Composite([*parts(model)]), r"a list.*bb.Composite\(\*optimizers\)"),
        (lambda model: bb.Composite(model), "Sequential is not a torch.optim.Optimizer"),
        (
            lambda model: bb.Composite(AdamW(model.parameters()), parts(model)[0]),
            r"shape \(6, 4\) is in AdamW and in Muon",
        ),
        (
            lambda model: bb.Composite(VRAdam(model.parameters()), AdamW([torch.zeros(1)])),
            r"VRAdam inside a Composite.*VarianceReduced\(Composite\(\.\.\.\)\), with vr=False",
        ),
        (lambda model: bb.Composite(LBFGS(model.parameters())), r"LBFGS\.step\(\) needs a closure"),
        (lambda model: bb.Composite(Extra(model.parameters(), lr=1.0)), "Extra saves rounds next"),
        (
            lambda model: composite(model).add_param_group({"params": [torch.zeros(1)]}),
            r"add it to that: composite.optimizers\[0\].add_param_group",
        ),
        (
            lambda model: VarianceReduced(composite(model)).add_param_group({"params": []}),
            r"all their groups before VarianceReduced\(\.\.\.\), frozen ones too",
        ),
        (lambda model: VarianceReduced([*parts(model)]), r"a list.*bb.Composite\(\*optimizers\)"),
    ],
)
def test_what_cannot_be_one_optimizer_is_refused_by_name(made, message):
    with pytest.raises(SettingError, match=message):
        made(network())


class Extra(SGD):
    """An optimizer that saves more than a state and groups."""

    def state_dict(self):
        return {**super().state_dict(), "rounds": 3}


def test_groups_cannot_be_replaced():
    with pytest.raises(AttributeError):
        composite(network()).param_groups = []
