"""Optimizers on real ranks under fully_shard: as one process, next to nothing sent, checkpoints."""

import copy
import functools
import warnings
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import counting_groups as counted
from bigbatch.errors import GradientError, SettingError
from bigbatch.optim import VRSGD, VarianceReduced
from optimizer_table import MAKE as TABLE
from optimizer_table import VR
from tensors import difference
from training_on_ranks import sharded, two_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:k = 5 micro-batches:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

K = 5  # micro-batches a step
SAMPLES = 12  # of a micro-batch, over all ranks: 2, 3 and 4 divide it
STEPS = 3
FLOAT64 = 8
LAYERS = 8  # of the network

# Roundings are 1e-16 and 6e-8. What a rank sees of a micro-batch is a difference of sums, which
# costs a digit or two, and the trust ratio of a layer with a small gradient another. A wrong layer
# mean or trust ratio is off by more than 1e-4, as tested below.
CLOSE = {torch.float64: 1e-13, torch.float32: 1e-5}

MAKE = TABLE | {"VRSGD-beta3": partial(VRSGD, lr=0.1, beta3=0.9)}  # p is all its state
SAVED = ["VRAdam", "VRLAMB", "VRMomentum", "VRSGD-beta3"]
every_optimizer = pytest.mark.parametrize("name", TABLE)
every_vr_optimizer = pytest.mark.parametrize("name", VR)
every_saved_optimizer = pytest.mark.parametrize("name", SAVED)
MESHES = {"2": (2, False), "3": (3, False), "4": (4, False), "2x2": (4, True)}
ALWAYS = [("3", torch.float64), ("2x2", torch.float32)]  # the other pairs are slow
meshes = pytest.mark.parametrize(
    ("count", "hybrid", "dtype"),
    [
        pytest.param(
            *MESHES[mesh],
            dtype,
            id=f"{mesh}-{dtype}",
            marks=[] if (mesh, dtype) in ALWAYS else [pytest.mark.thorough],
        )
        for mesh in MESHES
        for dtype in CLOSE
    ],
)


def network(dtype=torch.float64):
    """Rows that 2, 3 and 4 do not divide, and one row alone, which most ranks have nothing of."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 7), nn.LayerNorm(7), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(7, 1)).to(dtype)


def micro_batch(step, number, dtype):
    """Of all ranks together."""
    draw = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(SAMPLES, 5, generator=draw, dtype=torch.float64)
    return x.to(dtype), (x[:, :1] + x[:, 1:2] * x[:, 2:3]).to(dtype)


def accumulate(model, step, rank=0, ranks=1):
    """The backwards of one step on this rank, on its part of the samples."""
    dtype = next(model.parameters()).dtype
    for number in range(K):
        x, y = (whole.chunk(ranks)[rank] for whole in micro_batch(step, number, dtype))
        (mse_loss(model(x), y) / K).backward()


def train(model, optimizer, steps, rank=0, ranks=1):
    for step in steps:
        accumulate(model, step, rank, ranks)
        optimizer.step()
        optimizer.zero_grad()


def whole(tensors):
    """Gathered from all ranks, where they are sharded."""
    return [(x.full_tensor() if isinstance(x, DTensor) else x).detach().clone() for x in tensors]


def fsdp2(ranks, hybrid=False, dtype=torch.float64, **options):
    return sharded(network(dtype), mesh=two_rows(ranks) if hybrid else None, **options)


@functools.cache
def expected(name, dtype=torch.float64, steps=STEPS):
    """The weights of one process."""
    model = network(dtype)
    train(model, MAKE[name](model.parameters()), range(steps))
    return whole(model.parameters())


# as one process


def trained(rank, ranks, name, hybrid, dtype):
    """The gathered weights, and how much of each this rank holds."""
    model = fsdp2(ranks, hybrid, dtype)
    train(model, MAKE[name](model.parameters()), range(STEPS), rank, ranks)
    return whole(model.parameters()), [p.to_local().numel() for p in model.parameters()]


@meshes
@every_optimizer
def test_ranks_step_as_one_process_does(ranks, name, count, hybrid, dtype):
    results = ranks(count)(trained, name, hybrid, dtype)
    for weights, _ in results:
        assert difference(expected(name, dtype), weights) < CLOSE[dtype]
    shards = list(zip(*(sizes for _, sizes in results), strict=True))
    assert any(0 in local_count for local_count in shards)
    assert any(0 not in local_count and len(set(local_count)) > 1 for local_count in shards)


class Rows(nn.Module):
    """A matrix, whole or in shards that each are a layer, and a vector."""

    def __init__(self, shards=1):
        super().__init__()
        torch.manual_seed(0)
        scale = torch.tensor([[1.0]] * 4 + [[0.1]] * 4, dtype=torch.float64)
        matrix = torch.randn(8, 5, dtype=torch.float64) * scale
        self.shards = nn.ParameterList(matrix.chunk(shards))
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return linear(x, torch.cat(list(self.shards))) + self.shift


def train_rows(model, optimizer, rank=0, ranks=1):
    """Targets of the upper rows are a linear function, those of the lower ones pure noise."""
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        for _ in range(K):
            x = torch.randn(SAMPLES, 5, generator=draw, dtype=torch.float64)
            y = torch.randn(SAMPLES, 8, generator=draw, dtype=torch.float64)
            y[:, :4] = x[:, :1] + 0.01 * y[:, :4]
            x, y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
            (mse_loss(model(x), y) / K).backward()
        optimizer.step()
        optimizer.zero_grad()
    _, *shards = whole(model.parameters())
    return torch.cat(shards)


def rows_on_ranks(rank, ranks, name):
    model = fully_shard(Rows())
    return train_rows(model, MAKE[name](model.parameters()), rank, ranks)


@every_optimizer
def test_layer_means_and_trust_ratios_are_those_of_the_whole_layer(ranks, name):
    in_one, in_shards = [
        train_rows(model := Rows(shards), MAKE[name](model.parameters())) for shards in (1, 2)
    ]
    assert difference([in_one], [in_shards]) > 1e-4
    for weights in ranks(2)(rows_on_ranks, name):
        assert difference([in_one], [weights]) < CLOSE[torch.float64]


def one_matrix(rank, ranks, name):
    model = matrix(sharded_over=ranks)
    optimizer = MAKE[name](model.parameters())
    for step in range(STEPS):
        for number in range(K):
            x, y = (part.chunk(ranks)[rank] for part in micro_batch(step, number, torch.float64))
            (mse_loss(model(x), y) / K).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model.parameters())


def matrix(sharded_over):
    torch.manual_seed(0)
    model = nn.Linear(5, 1, bias=False).double()
    return fully_shard(model) if sharded_over > 1 else model


@pytest.mark.parametrize("name", ["VRSGD", "LAMB"])
def test_a_model_may_be_one_parameter(ranks, name):
    expected = one_matrix(0, 1, name)
    for weights in ranks(2)(one_matrix, name):
        assert difference(expected, weights) < CLOSE[torch.float64]


def in_groups(model):
    """Groups that differ in everything, one of them not scaled."""
    first, second, *others = model.parameters()
    groups = [
        {"params": [first], "gamma": 0.3, "r_max": 4.0, "beta3": 0.5},
        {"params": [second, others[0]], "vr": False},
        {"params": others[1:], "lr": 0.05},
    ]
    return VRSGD(groups, lr=0.1, momentum=0.5)


def trained_in_groups(rank, ranks):
    model = fsdp2(ranks)
    for p in model[2].parameters():
        p.requires_grad_(False)
    train(model, in_groups(model), range(STEPS), rank, ranks)
    return whole(model.parameters())


def test_groups_and_frozen_layers_are_those_of_one_process(ranks):
    model = network()
    model[2].requires_grad_(False)
    train(model, in_groups(model), range(STEPS))
    for weights in ranks(3)(trained_in_groups):
        assert difference(model.parameters(), weights) < CLOSE[torch.float64]


def trained_by_ddp(rank, ranks, name):
    model = DistributedDataParallel(network())
    train(model, MAKE[name](model.parameters()), range(STEPS), rank, ranks)
    return whole(model.parameters())


@pytest.mark.parametrize("name", ["LARS", "LAMB"])
def test_baselines_under_ddp_step_as_one_process_does(ranks, name):
    for weights in ranks(2)(trained_by_ddp, name):
        assert difference(expected(name), weights) < CLOSE[torch.float64]


# what a step does to `.grad`, and what is done to it


def zeroed(rank, ranks, name, by, set_to_none):
    """Every step comes after one that is left out, as a scaler does it."""
    model = fsdp2(ranks)
    optimizer = MAKE[name](model.parameters())
    zeroing = {"model": model, "optimizer": optimizer}[by]
    for step in range(STEPS):
        accumulate(model, 100 + step, rank, ranks)
        zeroing.zero_grad(set_to_none=set_to_none)
        accumulate(model, step, rank, ranks)
        optimizer.step()
        zeroing.zero_grad(set_to_none=set_to_none)
    return whole(model.parameters())


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("by", ["model", "optimizer"])
@pytest.mark.parametrize("name", ["VRMomentum", "VRAdam"])
def test_any_zero_grad_forgets_a_step_that_was_left_out(ranks, name, by, set_to_none):
    if by == "model" and not set_to_none:  # whether that is zeroing, its data alone would tell
        with pytest.raises(AssertionError, match="was written to between two backwards of a step"):
            ranks(2)(zeroed, name, by, set_to_none)
        return
    for weights in ranks(2)(zeroed, name, by, set_to_none):
        assert difference(expected(name), weights) < CLOSE[torch.float64]


def watched(rank, ranks, name, hybrid=False, limit=None):
    """What the factors of the last step tell, and the weights after it."""
    model = network() if ranks == 1 else fsdp2(ranks, hybrid)
    optimizer = MAKE[name](model.parameters(), watch=True)
    for step in range(STEPS):
        accumulate(model, step, rank, ranks)
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
    factors = optimizer.gsnr
    summary = [factors.mean, factors.at_gamma, factors.at_r_max, factors.lr_factor]
    return torch.stack(summary).clone(), factors.k, whole(model.parameters())


@pytest.mark.parametrize(("count", "hybrid"), [(3, False), (4, True)], ids=["3", "2x2"])
@pytest.mark.parametrize("name", ["VRSGD", "VRAdam"])
def test_factors_are_those_of_the_whole_layers(ranks, name, count, hybrid):
    alone, k, _ = watched(0, 1, name)
    assert (4, LAYERS) == alone.shape
    assert (alone[1] > 0).any()  # some are at gamma, some at r_max
    assert (alone[2] > 0).any()
    for summary, seen, _ in ranks(count)(watched, name, hybrid):
        assert (K, K) == (k, seen)
        torch.testing.assert_close(alone, summary, rtol=CLOSE[torch.float64], atol=0)


@every_vr_optimizer
def test_clipping_scales_g_and_leaves_r(ranks, name):
    limit = 0.01  # below every norm
    alone, _, weights_alone = watched(0, 1, name, limit=limit)
    for summary, _, weights in ranks(2)(watched, name, False, limit):
        torch.testing.assert_close(alone, summary, rtol=CLOSE[torch.float64], atol=0)
        assert difference(weights_alone, weights) < CLOSE[torch.float64]


def factors_of_one_step(rank, ranks, limit):
    model = fsdp2(ranks)
    optimizer = VRSGD(model.parameters(), lr=0.1, watch=True)
    accumulate(model, 0, rank, ranks)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit).full_tensor().item()
    optimizer.step()
    return optimizer.gsnr.mean, norm


def test_r_of_a_clipped_step_is_that_of_the_unclipped_one(ranks):
    unclipped = ranks(2)(factors_of_one_step, float("inf"))
    for (mean, norm), (expected_mean, _) in zip(
        ranks(2)(factors_of_one_step, 0.01), unclipped, strict=True
    ):
        assert norm > 0.01
        assert torch.equal(expected_mean, mean)


def has_own_sum(state, parameter):
    """Whether S of a parameter has a buffer in addition to that of the gradients' source."""
    (total,), _ = state.moments.sums_and_m2s([parameter], state.sums_of)
    (kept,) = state.sums_of([parameter])
    return kept is None or kept.data_ptr() != total.data_ptr()


def own_sums(rank, ranks, limit):
    """After two steps, in the third: how many parameters have S twice; the first step loses one."""
    model = fsdp2(ranks)
    optimizer = VRSGD(model.parameters(), 0.1)
    for step in range(3):
        accumulate(model, step, rank, ranks)
        if step == 0:
            model[0].weight.grad = None
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    return sum(has_own_sum(optimizer.gsnr_state, p) for p in model.parameters())


@pytest.mark.parametrize("limit", [None, 1e-3], ids=["untouched", "clipped"])
def test_the_reduced_shards_are_summed_once_clipped_or_not(ranks, limit):
    assert [0, 0] == ranks(2)(own_sums, limit)


def scaled(rank, ranks, name, overflow):
    """Under a scaler; before its last step, one whose loss is inf on one rank alone."""
    model = fsdp2(ranks)
    optimizer = MAKE[name](model.parameters())
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(STEPS):
        for spoilt in (True, False) if overflow and step == STEPS - 1 else (False,):
            for number in range(K):
                x, y = (
                    part.chunk(ranks)[rank] for part in micro_batch(step, number, torch.float64)
                )
                loss = mse_loss(model(x), y) / K
                loss = loss * torch.inf if spoilt and rank == 1 and number == 1 else loss
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return whole(model.parameters()), scaler.get_scale()


@pytest.mark.parametrize("overflow", [False, True], ids=["finite", "overflow"])
@pytest.mark.parametrize("name", ["VRSGD", "VRAdam"])
def test_a_scaler_leaves_r_and_leaves_a_step_out_on_all_ranks(ranks, name, overflow):
    for weights, scale in ranks(2)(scaled, name, overflow):
        assert (512.0 if overflow else 1024.0) == scale
        assert difference(expected(name), weights) < CLOSE[torch.float64]


def in_bfloat16(rank, ranks, name, hybrid, reduced_in):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced_in)
    model = fsdp2(ranks, hybrid, torch.float32, mp_policy=policy)
    optimizer = MAKE[name](model.parameters())
    before = whole(model.parameters())
    for step in range(STEPS):
        for number in range(K):
            x, y = (part.chunk(ranks)[rank] for part in micro_batch(step, number, torch.float32))
            (mse_loss(model(x).float(), y) / K).backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, whole(model.parameters())


@pytest.mark.parametrize("reduced_in", [torch.float32, None], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", TABLE)
def test_mixed_precision_trains(ranks, name, reduced_in):
    results = ranks(2)(in_bfloat16, name, False, reduced_in)
    moved = difference(*results[0])
    for before, after in results:
        assert all(torch.equal(a, b) for a, b in zip(results[0][1], after, strict=True))
        # bfloat16 gradients, 4e-3, of k that partly cancel; r of a weight may jump between its ends
        assert difference(expected(name, torch.float32), after) < moved / 2
        assert after[0].dtype is before[0].dtype is torch.float32


# what is sent


def sent_by_phase(rank, ranks, name, engine, **options):
    """Every step's collectives on each of this rank's groups: in its backwards, in its step."""
    model, groups = counted.ENGINES[engine][0](network(torch.float32), ranks)
    make = partial(SGD, lr=0.1) if name == "SGD" else MAKE[name]
    optimizer = make(model.parameters(), **options)
    phases = []
    for step in range(2):
        for phase in (lambda step=step: accumulate(model, step, rank, ranks), optimizer.step):
            for group in groups:
                group.sent.clear()
            phase()
            phases.append([Counter(group.sent) for group in groups])
        optimizer.zero_grad()
    return phases[::2], phases[1::2]


@pytest.fixture(scope="module")
def sent_without(ranks):
    """What the engine alone sends."""
    return functools.cache(
        lambda engine: ranks(counted.ENGINES[engine][1])(
            partial(sent_by_phase, name="SGD", engine=engine)
        )
    )


def all_reduces(numbers):
    """Of so many doubles a layer each."""
    return Counter(("all-reduce", FLOAT64 * of_a_layer * LAYERS) for of_a_layer in numbers)


SENDS = {
    "VRSGD": ({}, [2]),
    "VRMomentum": ({}, [2]),
    "VRAdam": ({}, [2]),
    "VRLARS": ({"exclude_bias_and_norm": False}, [2, 2]),
    "VRLAMB": ({"exclude_bias_and_norm": False}, [2, 2]),
    "VarianceReduced(AdamW)": ({}, [2]),
    "LARS": ({"exclude_bias_and_norm": False}, [2]),
    "LAMB": ({"exclude_bias_and_norm": False}, [2]),
}
ALSO = {"VRAdam, watch": ("VRAdam", {"watch": True}, [2, 5])}
SENT = {name: (name, *settings) for name, settings in SENDS.items()} | ALSO


def sends(engine, ranks, sent_without, name, options, numbers):
    """Whether every rank sends so many doubles a layer in a step, and nothing in its backwards."""
    ours = ranks(counted.ENGINES[engine][1])(
        partial(sent_by_phase, name=name, engine=engine, **options)
    )
    # of HSDP's two groups, copies and shards, the copies need not know of each other
    expected = [all_reduces(numbers)] if engine == "fsdp2" else [Counter(), all_reduces(numbers)]
    for (bare_backwards, bare_steps), (backwards, steps) in zip(
        sent_without(engine), ours, strict=True
    ):
        assert bare_backwards == backwards
        assert any(group for step in backwards for group in step)  # the group does count
        assert not any(group for step in bare_steps for group in step)
        assert [expected] * 2 == steps
    return True


@pytest.mark.parametrize(("name", "options", "numbers"), SENT.values(), ids=SENT)
def test_a_step_sends_two_doubles_a_layer_and_its_backwards_nothing(
    ranks, sent_without, name, options, numbers
):
    assert sends("fsdp2", ranks, sent_without, name, options, numbers)


@pytest.mark.parametrize("name", ["VRAdam", "VRLAMB", "LARS"])
def test_copies_of_a_sharded_model_send_each_other_nothing(ranks, sent_without, name):
    assert sends("hsdp", ranks, sent_without, name, *SENDS[name])


def asked_on_one_rank(rank, ranks, name):
    """The other ranks take no part in what `state_dict` does."""
    model = fsdp2(ranks)
    optimizer = MAKE[name](model.parameters())
    train(model, optimizer, range(2), rank, ranks)
    if rank == 0:
        assert optimizer.state_dict()["state"]
    train(model, optimizer, range(2, STEPS), rank, ranks)
    return whole(model.parameters())


@every_saved_optimizer
def test_one_rank_alone_may_ask_for_the_state(ranks, name):
    for weights in ranks(2)(asked_on_one_rank, name):
        assert difference(expected(name), weights) < CLOSE[torch.float64]


# what is refused


def error_of(function, kind):
    """The message of the error that it has to raise."""
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def unsynchronized(rank, ranks, name, hybrid):
    model = fsdp2(ranks, hybrid)
    optimizer = MAKE[name](model.parameters())
    defer = model.set_requires_all_reduce if hybrid else model.set_requires_gradient_sync
    for number in range(K):
        defer(number == K - 1)
        x, y = (part.chunk(ranks)[rank] for part in micro_batch(0, number, torch.float64))
        (mse_loss(model(x), y) / K).backward()
    return error_of(optimizer.step, GradientError)


@pytest.mark.parametrize(("count", "hybrid"), [(2, False), (4, True)], ids=["2", "2x2"])
@every_vr_optimizer
def test_gradients_that_are_reduced_once_a_step_are_refused(ranks, name, count, hybrid):
    for message in ranks(count)(unsynchronized, name, hybrid):
        assert "saw 1 backward()" in message
        assert "set_requires_gradient_sync" in message


def plain_on_ranks(rank, ranks, name, wrapped):
    model = network()
    if wrapped:
        model = DistributedDataParallel(model)
    optimizer = MAKE[name](model.parameters())
    message = error_of(lambda: accumulate(model, 0, rank, ranks), GradientError)
    del optimizer
    return message


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "ddp"])
@every_vr_optimizer
def test_gradients_whose_ranks_are_not_known_are_refused(ranks, name, wrapped):
    for message in ranks(2)(plain_on_ranks, name, wrapped):
        assert f"{type(MAKE[name](network().parameters())).__name__} on 2 ranks" in message
        assert "attach" in message


def partly_sharded():
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return model


def made_on_a_partly_sharded_model(rank, ranks, name):
    parameters = list(partly_sharded().parameters())
    return [
        error_of(lambda p=p: MAKE[name](p), SettingError) for p in (parameters, parameters[::-1])
    ]


@every_vr_optimizer
def test_a_partly_sharded_model_is_refused(ranks, name):
    for messages in ranks(2)(made_on_a_partly_sharded_model, name):
        for message in messages:
            assert f"4 of {LAYERS} parameters are sharded" in message


def stepped_over_two_meshes(rank, ranks, name):
    model = network()
    for index, dim in enumerate(["first", "second"]):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(dim,))
        for layer in (model[3], model[5]) if index else (model[0], model[2]):
            fully_shard(layer, mesh=mesh)

    def step():
        optimizer = MAKE[name](model.parameters())
        accumulate(model, 0, rank, ranks)
        optimizer.step()

    return error_of(step, SettingError)


@pytest.mark.parametrize("name", ["LARS", "LAMB"])
def test_baselines_refuse_layers_over_two_meshes(ranks, name):
    for message in ranks(2)(stepped_over_two_meshes, name):
        assert f"{LAYERS} of {LAYERS} parameters are sharded, or not over one mesh" in message


def weights_of_a_partly_sharded_model(rank, ranks, name):
    """The sharded layers after one step; the others have no gradient on any rank."""
    model = partly_sharded()
    for layer in (model[3], model[5]):
        layer.requires_grad_(False)
    try:
        optimizer = MAKE[name](list(model.parameters())[::-1])
        for layer in (model[3], model[5]):
            for p in layer.parameters():
                p.grad = torch.ones_like(p)
        accumulate(model, 0, rank, ranks)
        optimizer.step()
    except SettingError:
        return None
    return whole([*model[0].parameters(), *model[2].parameters()])


@pytest.mark.parametrize("name", ["LARS", "LAMB"])
def test_baselines_refuse_a_partly_sharded_model_or_step_along_whole_layers(ranks, name):
    model = network()
    expected = [*model[0].parameters(), *model[2].parameters()]
    optimizer = MAKE[name](expected)
    accumulate(model, 0)
    optimizer.step()
    for weights in ranks(2)(weights_of_a_partly_sharded_model, name):
        assert weights is None or difference(expected, weights) < CLOSE[torch.float64]


def made_before(rank, ranks, name):
    model = network()
    optimizer = MAKE[name](model.parameters())
    sharded(model)
    accumulate(model, 0, rank, ranks)
    return error_of(optimizer.step, GradientError)


@every_vr_optimizer
def test_an_optimizer_made_before_fully_shard_sees_nothing_and_says_so(ranks, name):
    for message in ranks(2)(made_before, name):
        assert "saw 0 backward()" in message


def warned(rank, ranks):
    """On a rank that may hold nothing at all."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(5, 1).double())
    optimizer = VRSGD(model.parameters(), lr=0.1)
    accumulate(model, 0, rank, ranks)
    with warnings.catch_warnings(record=True, action="always") as seen:
        optimizer.step()
    local_count = sum(p.to_local().numel() for p in model.parameters())
    return local_count, [str(w.message) for w in seen]


def test_a_rank_without_any_weight_has_nothing_to_warn_of(ranks):
    results = ranks(2)(warned)
    assert [6, 0] == [local_count for local_count, _ in results]
    for _, messages in results:
        assert ["k = 5 micro-batches"] == [message[:19] for message in messages]


# checkpoints

HALF = 2  # steps before a checkpoint
WAYS = {"optimizer": {}, "flattened": {"flatten_optimizer_state_dict": True}}


def states_of(optimizer):
    """All that it keeps for every parameter, gathered."""
    state = optimizer.state_dict()["state"]
    kept = [state[i] for i in sorted(state) if state[i]]
    return [dict(zip(of_one, whole(of_one.values()), strict=True)) for of_one in kept]


def states_equal(expected, actual):
    return [set(a) for a in expected] == [set(b) for b in actual] and all(
        torch.equal(a[name], b[name]) for a, b in zip(expected, actual, strict=True) for name in a
    )


def started(ranks, name):
    """A model whose weights are not yet those that will be loaded, and its optimizer."""
    model = network() if ranks == 1 else fsdp2(ranks)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    return model, MAKE[name](model.parameters())


def save(rank, ranks, name, way, path):
    """After half of the steps; returns what the optimizer kept."""
    model = network() if ranks == 1 else fsdp2(ranks)
    optimizer = MAKE[name](model.parameters())
    train(model, optimizer, range(HALF), rank, ranks)
    if way == "both":
        weights, state = get_state_dict(model, optimizer)
    else:
        options = StateDictOptions(**WAYS[way])
        weights = model.state_dict()
        state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    return states_of(optimizer)


def resume(rank, ranks, name, way, path):
    """In another process; returns what the optimizer got, and the weights at the end."""
    model, optimizer = started(ranks, name)
    if way == "both":
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    else:
        options = StateDictOptions(**WAYS[way])
        weights = model.state_dict()
        state = get_optimizer_state_dict(model, optimizer, options=options)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
        model.load_state_dict(weights)
        set_optimizer_state_dict(model, optimizer, state, options=options)
    loaded = states_of(optimizer)
    train(model, optimizer, range(HALF, STEPS), rank, ranks)
    return loaded, whole(model.parameters())


@pytest.mark.parametrize(
    "way", ["optimizer", "flattened", pytest.param("both", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("after", [4, 1], ids=["on_4", "on_1"])
@every_saved_optimizer
def test_a_checkpoint_of_two_ranks_continues_elsewhere(ranks, tmp_path, name, after, way):
    saved = ranks(2)(save, name, way, tmp_path)
    launch = ranks(after) if after > 1 else lambda run, *how: [run(0, 1, *how)]
    for loaded, weights in launch(resume, name, way, tmp_path):
        assert states_equal(saved[0], loaded)
        assert difference(expected(name), weights) < CLOSE[torch.float64]


@pytest.mark.parametrize("way", ["optimizer", "flattened", "both"])
@every_saved_optimizer
def test_a_checkpoint_of_one_process_continues_in_another(tmp_path, name, way):
    saved = save(0, 1, name, way, tmp_path)
    loaded, weights = resume(0, 1, name, way, tmp_path)
    assert states_equal(saved, loaded)
    assert all(torch.equal(a, b) for a, b in zip(expected(name), weights, strict=True))


@every_optimizer
def test_a_checkpoint_of_bfloat16_weights_continues_bit_for_bit(tmp_path, name):
    models = [network(torch.bfloat16) for _ in range(2)]
    ours, another = [MAKE[name](model.parameters()) for model in models]
    train(models[0], ours, range(HALF))
    weights, state = get_state_dict(models[0], ours)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    weights, state = get_state_dict(models[1], another)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    set_state_dict(models[1], another, model_state_dict=weights, optim_state_dict=state)
    assert states_equal(states_of(ours), states_of(another))
    for model, optimizer in zip(models, (ours, another), strict=True):
        train(model, optimizer, range(HALF, STEPS))
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def through_rank_0(rank, ranks, name):
    """A whole state dict that rank 0 alone has, spread over the others when loaded."""
    model = fsdp2(ranks)
    optimizer = MAKE[name](model.parameters())
    train(model, optimizer, range(HALF), rank, ranks)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    again = MAKE[name](model.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, again, state if rank == 0 else {}, options=options)
    same = states_equal(states_of(optimizer), states_of(again))
    train(model, again, range(HALF, STEPS), rank, ranks)
    return same, whole(model.parameters())


@every_saved_optimizer
def test_a_whole_state_dict_is_spread_over_the_ranks(ranks, name):
    for same, weights in ranks(2)(through_rank_0, name):
        assert same
        assert difference(expected(name), weights) < CLOSE[torch.float64]


@every_optimizer
def test_asking_for_a_checkpoint_before_any_step_changes_nothing(name):
    model = network()
    optimizer = MAKE[name](model.parameters())
    before = whole(model.parameters())
    get_optimizer_state_dict(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    # all that is momentum is 0; Adam's own step count is 1 then, torch's own doing
    for state in states_of(optimizer):
        for key, value in state.items():
            assert key == "step" or not value.any()


@pytest.mark.parametrize("asked", ["VRSGD", "VRMomentum", "VRLARS", "LARS"])
def test_training_is_the_same_where_a_checkpoint_was_asked_for_before(asked):
    model = network()
    optimizer = MAKE[asked](model.parameters())
    get_optimizer_state_dict(model, optimizer)
    train(model, optimizer, range(STEPS))
    assert all(torch.equal(a, b) for a, b in zip(expected(asked), model.parameters(), strict=True))


def bare_checkpoint(path):
    """AdamW's own, with none of our keys."""
    model = network()
    bare = AdamW(model.parameters(), lr=0.01, fused=True)
    train(model, bare, range(HALF))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, bare)}
    dcp.save(state, checkpoint_id=path)
    return model, bare


def averaging(model):
    return VarianceReduced(AdamW(model.parameters(), lr=0.01, fused=True), gamma=0.3, beta3=0.9)


def test_a_checkpoint_of_a_bare_base_is_refused_by_name_where_nothing_may_miss(tmp_path):
    bare_checkpoint(tmp_path)
    model = network()
    state = {"optimizer": get_optimizer_state_dict(model, averaging(model))}
    with pytest.raises(dcp.api.CheckpointException, match=r"gsnr|gamma"):
        dcp.load(state, checkpoint_id=tmp_path)


def test_a_checkpoint_of_a_bare_base_is_loaded_where_some_may_miss(tmp_path):
    started_bare, bare = bare_checkpoint(tmp_path)
    expected = averaging(started_bare)
    expected.load_state_dict(bare.state_dict())
    model = network()
    optimizer = averaging(model)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    some = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=tmp_path, planner=some)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(started_bare, expected, range(HALF, STEPS))
    train(model, optimizer, range(HALF, STEPS))
    assert 0.3 == optimizer.param_groups[0]["gamma"]
    assert all(
        torch.equal(a, b)
        for a, b in zip(started_bare.parameters(), model.parameters(), strict=True)
    )


def test_the_state_of_a_bare_base_is_set_as_it_is():
    model = network()
    bare = AdamW(model.parameters(), lr=0.01, fused=True)
    train(model, bare, range(HALF))
    state = copy.deepcopy(get_optimizer_state_dict(model, bare))
    replica = copy.deepcopy(model)
    expected, optimizer = averaging(model), averaging(replica)
    expected.load_state_dict(copy.deepcopy(bare.state_dict()))
    set_optimizer_state_dict(replica, optimizer, state, options=StateDictOptions(strict=False))
    assert 0.3 == optimizer.param_groups[0]["gamma"]
    for trainee, by in ((model, expected), (replica, optimizer)):
        train(trainee, by, range(HALF, STEPS))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), replica.parameters(), strict=True)
    )
