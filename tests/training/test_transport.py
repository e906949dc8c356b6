"""Betas, weight decay and weight averages whose half-lives stay the same in samples."""

import copy
import math
from contextlib import nullcontext, suppress

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.optim import VarianceReduced, VRAdam
from bigbatch.training.step_rates import transported

BASE, SIZES = 16, (16, 40, 8, 64, 33, 4)


class Walk:
    """Takes one batch size after another."""

    needs = bb.Needs(statistics=False, min_batch=4, max_batch=64)

    def decide(self, statistics, now):
        return bb.Decision(SIZES[now.steps % len(SIZES)], "the next one")


def model_of():
    torch.manual_seed(3)
    return torch.nn.Linear(3, 1, dtype=torch.float64)


def groups_of(model):
    betas = (0.9, 0.99), (0.8, 0.95)
    rates = (0.05, 0.02)
    return [
        {"params": [p], "lr": lr, "betas": pair, "weight_decay": decay}
        for p, lr, pair, decay in zip(model.parameters(), rates, betas, (0.3, 0.0), strict=True)
    ]


def tensor_betas(parameters):
    return AdamW(parameters, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False)


def samples():
    return torch.randn(640, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss_of(model, x):
    return (model(x) - x.sum(1, keepdim=True).sin()).square().mean()


def adaptive(policy=None, kernel=None, **options):
    model = model_of()
    optimizer = AdamW(groups_of(model), **(kernel or {}))
    loader = torch.utils.data.DataLoader(samples(), BASE)
    options = {"transport": True, "every": 0, "micro_batch": 64} | options
    if not isinstance(policy, bb.Controller):
        options = {"batch_size": BASE} | options
    return bb.AdaptiveBatch(model, optimizer, loader, policy=policy or Walk(), **options)


def walk(train, steps):
    for step in train:
        for x in step:
            step.backward(loss_of(train.model, x))
        yield step.update()
        if train.steps == steps:
            break


@pytest.mark.parametrize(
    ("lr_scaling", "kernel"),
    [
        ("sqrt", {}),
        ("linear", {"foreach": True}),
        (None, {"foreach": False}),
        (None, {"fused": True}),
    ],
)
def test_the_loop_is_a_plain_one_with_betas_and_decay_set_by_hand(lr_scaling, kernel):
    model, data, seen = model_of(), samples(), 0
    optimizer = AdamW(groups_of(model), foreach=False)
    own = [dict(group) for group in optimizer.param_groups]
    for size in SIZES:
        optimizer.zero_grad()
        loss_of(model, data[seen : seen + size]).backward()
        ratio, seen = size / BASE, seen + size
        factor = {"sqrt": math.sqrt(ratio), "linear": ratio, None: 1.0}[lr_scaling]
        for group, base in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = base["lr"] * factor
            group["betas"] = tuple(beta**ratio for beta in base["betas"])
            group["weight_decay"] = base["weight_decay"] * ratio / factor
        optimizer.step()
    train = adaptive(lr_scaling=lr_scaling, kernel=kernel)
    assert list(SIZES) == [record.batch_size for record in walk(train, len(SIZES))]
    for expected, actual in zip(model.parameters(), train.model.parameters(), strict=True):
        torch.testing.assert_close(expected, actual, rtol=1e-12, atol=0)  # orders of sums


def test_one_step_of_four_base_batches_decays_as_four_steps_and_a_cut_of_the_schedule_stays():
    class Cut(Walk):
        def decide(self, statistics, now):
            return bb.Decision(64, "at once", lr_factor=0.1)

    train, seen = adaptive(policy=Cut()), []
    train.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append([dict(g) for g in optimizer.param_groups])
    )
    list(walk(train, 2))
    decays = [groups[0]["lr"] * groups[0]["weight_decay"] for groups in seen]
    assert pytest.approx([0.05 * 0.3, 4 * 0.1 * 0.05 * 0.3]) == decays


def test_afterwards_every_value_is_the_same_object_to_the_last_bit():
    optimizer = AdamW(groups_of(model_of()))
    before = [dict(group) for group in optimizer.param_groups]
    values = copy.deepcopy([group["betas"] for group in before])
    with suppress(KeyError), transported(nullcontext(), optimizer, 3.0, 1.7):
        for group, pair in zip(optimizer.param_groups, values, strict=True):
            inside = [float(beta) for beta in group["betas"]]
            assert pytest.approx([float(beta) ** 3 for beta in pair], rel=1e-15) == inside
        raise KeyError  # a step that fails
    for group, own, pair in zip(optimizer.param_groups, before, values, strict=True):
        assert group["betas"] is own["betas"]
        assert pair == own["betas"]
        assert group["weight_decay"] is own["weight_decay"]


def test_without_transport_nothing_is_changed():
    train, seen = adaptive(transport=False), []
    train.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append([g["betas"] for g in optimizer.param_groups])
    )
    list(walk(train, len(SIZES)))
    assert [[(0.9, 0.99), (0.8, 0.95)]] * len(SIZES) == seen


def test_a_scheduler_that_cycles_beta_1_is_followed():
    train, seen = adaptive(lr_scaling=None), []
    optimizer = train.optimizer
    train.scheduler = OneCycleLR(optimizer, [0.05, 0.02], total_steps=40)
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["betas"]))
    for record in walk(train, 4):
        ratio = record.batch_size / BASE
        assert all(isinstance(beta, float) for beta in seen[-1])
        assert pytest.approx(0.99**ratio) == seen[-1][1]
    assert 0.85 < optimizer.param_groups[0]["betas"][0] < 0.95  # the schedule's own


def test_a_short_last_step_counts_as_a_quarter_of_the_base_batch():
    optimizer = AdamW(groups_of(model_of()))
    for ratio, inside in ((0.01, 0.25), (70.0, 4.0)):
        with transported(nullcontext(), optimizer, ratio, 1.0):
            assert 0.9**inside == optimizer.param_groups[0]["betas"][0]


def test_a_factor_of_zero_leaves_the_decay():
    optimizer = AdamW(groups_of(model_of()))
    with transported(nullcontext(), optimizer, 2.0, 0.0):
        assert 0.3 == optimizer.param_groups[0]["weight_decay"]


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({}, "from 2 to 640 around base_batch=16"),
        ({"min_batch": 4}, "from 4 to 640"),
        ({"min_batch": 3, "max_batch": 64}, "from 3 to 64"),
        ({"min_batch": 4, "max_batch": 65}, "min_batch=4 and max_batch=64"),
    ],
)
def test_a_range_that_was_not_measured_is_refused(bounds, words):
    with pytest.raises(SettingError, match=words):
        adaptive(bb.Controller(bb.Schedule("16"), BASE, BASE, **bounds), min_micro_batches=2)


@pytest.mark.parametrize(("size", "allowed"), [(64, True), (4, True), (65, False)])
def test_a_fixed_batch_needs_no_bounds(size, allowed):
    with nullcontext() if allowed else pytest.raises(SettingError, match="from 65 to 65"):
        adaptive(bb.Fixed(size), batch_size=None, base_batch=BASE)


@pytest.mark.parametrize(
    ("optimizer_of", "words"),
    [
        (lambda p: SGD(p, lr=0.1), "parameter group 0 of SGD has no betas"),
        (tensor_betas, "parameter group 0 of AdamW has betas that are tensors"),
        (lambda p: Adam(p, weight_decay=0.3), "weight_decay=0.3 of Adam is added to the gradient"),
        (lambda p: VarianceReduced(AdamW(p)), "VarianceReduced, whose own averages"),
        (VRAdam, "VRAdam, whose own averages"),
    ],
)
def test_what_transport_does_not_know_is_refused_by_name(optimizer_of, words):
    model = model_of()
    optimizer = optimizer_of(model.parameters())
    loader = torch.utils.data.DataLoader(samples(), BASE)
    options = {"batch_size": BASE, "transport": True, "every": 1}
    with pytest.raises(SettingError, match=words):
        bb.AdaptiveBatch(model, optimizer, loader, policy=Walk(), **options)


def test_adam_without_or_with_decoupled_weight_decay_is_allowed():
    for decay, decoupled in ((0.0, False), (0.3, True)):
        optimizer = Adam(model_of().parameters(), weight_decay=decay)
        optimizer.param_groups[0]["decoupled_weight_decay"] = decoupled
        with transported(nullcontext(), optimizer, 4.0, 2.0):
            assert 2 * decay == optimizer.param_groups[0]["weight_decay"]


def test_a_weight_average_forgets_as_much_per_sample():
    def average(batch):
        model, train = torch.nn.Linear(1, 1, bias=False), 0
        averaged = AveragedModel(
            model, avg_fn=lambda a, p, n: p + bb.ema_decay(0.9, batch, BASE) * (a - p)
        )
        averaged.update_parameters(model)  # the first update copies
        with torch.no_grad():
            model.weight += 1
        while train < 64:
            averaged.update_parameters(model)
            train += batch
        return float((averaged.module.weight - model.weight).detach())

    assert pytest.approx(-(0.9**4), rel=1e-5) == average(16)
    assert pytest.approx(-(0.9**4), rel=1e-5) == average(64) == pytest.approx(average(32))


def test_the_average_that_docs_policies_shows_follows_every_step():
    train, expected = adaptive(), None
    averaged = AveragedModel(
        train.model,
        avg_fn=lambda a, p, n: p + bb.ema_decay(0.9, train.record.batch_size, BASE) * (a - p),
    )
    for record in walk(train, len(SIZES)):
        averaged.update_parameters(train.model)
        weight, decay = train.model.weight.detach().clone(), 0.9 ** (record.batch_size / BASE)
        expected = weight if expected is None else weight + decay * (expected - weight)
    torch.testing.assert_close(expected, averaged.module.weight.detach(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("wrong", [{"decay": 1.0}, {"batch_size": 0}, {"base_batch": 1.5}])
def test_what_is_no_decay_is_refused(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        bb.ema_decay(**{"decay": 0.9, "batch_size": 8, "base_batch": 8, **wrong})


def test_a_resume_with_or_without_transport_says_so():
    train, other = adaptive(), adaptive(transport=False)
    with pytest.warns(UserWarning, match="transport was True, is False"):
        other.load_state_dict(train.state_dict())
