"""GradientMeter on real processes under the options of DDP, FSDP2 and HSDP that people use."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bigbatch import GradientMeter
from bigbatch.errors import GradientError
from training_on_ranks import (
    ENGINES,
    EQUAL,
    SAME_COUNT,
    SAME_TOTAL,
    accumulate,
    all_close,
    batch,
    close,
    ddp,
    expected,
    fsdp2,
    hsdp,
    in_bfloat16,
    in_float64,
    in_own_precision,
    network,
    one_step,
    sharded,
    synchronized,
    train,
    two_rows,
)

# networks; each takes (n, 5) and gives three logits


class Attentive(nn.Module):
    """Attention reads the weight of its out_proj, whose forward nobody calls."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        tokens = self.embed(x.unsqueeze(-1))
        return self.head(self.attention(tokens, tokens, tokens)[0].mean(1))


class Tied(nn.Module):
    """One weight, two modules."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Branchy(nn.Module):
    """The branch is taken by micro-batches whose first number is positive."""

    def __init__(self):
        super().__init__()
        self.trunk, self.branch = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return self.trunk(x) + self.branch(x) if x[0, 0] > 0 else self.trunk(x)


class Routed(Branchy):
    """The branch holds most of the weights; only some ranks take it, in some steps none does."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 3))

    def forward(self, x):
        return self.trunk(x) + self.branch(x) if x[0, 0] > 1 else self.trunk(x)


class Nested(nn.Module):
    """Own parameters at every level, a block within a block."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.block = nn.Sequential(nn.Linear(5, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)))
        self.head = nn.Linear(8, 3)
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.head(torch.tanh(self.block(x * self.scale))) + self.shift


class Checkpointed(nn.Module):
    """Recomputes its two layers in the backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False)
        x = checkpoint(lambda x: torch.tanh(self.second(x)), x, use_reentrant=False)
        return self.head(x)


class Autocast(nn.Module):
    """Matrix products in bfloat16, weights and their gradients in float32."""

    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x).float()


def made(kind, seed=0):
    def build():
        torch.manual_seed(seed)
        return kind()

    return build


def partly_frozen():
    model = network()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


# engines, each a function of the model and the number of ranks


def with_hook(hook):
    def wrap(model, ranks):
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, hook)
        return wrapped

    return wrap


def added_up(state, bucket):
    """A communication hook that adds ranks up and does not divide."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def in_one_unit(model, ranks):
    return fully_shard(model)


def every_child(model, ranks):
    for child in model.children():
        fully_shard(child)
    return fully_shard(model)


def checkpoint_wrapped(model, ranks):
    """As trainers apply it: the block recomputes, and the unit is around it, or within."""
    model[0] = fully_shard(checkpoint_wrapper(model[0]))
    model[2] = checkpoint_wrapper(fully_shard(model[2]))
    return fully_shard(model)


def nested(model, ranks, **options):
    fully_shard(model.block[1], **options)
    fully_shard(model.block, **options)
    return fully_shard(model, **options)


def nested_on_two_rows(model, ranks):
    return nested(model, ranks, mesh=two_rows(ranks))


def of_compiled_layers(model, ranks, backend="aot_eager"):
    for layer in (model[0], model[2]):
        layer.compile(backend=backend)
    return sharded(model)


def of_compiled_modules(model, ranks):
    for place in (0, 2):
        model[place] = torch.compile(model[place], backend="aot_eager")
    return sharded(model)


def summing(model, ranks):
    for unit in (model := sharded(model)).modules():
        if hasattr(unit, "set_gradient_divide_factor"):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    return model


def over_rows_only_at_the_end(model, ranks):
    """HSDP that adds up over its copies in the last backward only."""
    return CopiesLast(hsdp()(model, ranks))


class CopiesLast(nn.Module):
    """Scatters in each backward, and joins the copies where it is asked to synchronize."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)

    def set_requires_gradient_sync(self, now):
        self.inner.set_requires_all_reduce(now)


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
COMPILED = {"backend": "aot_eager"}

CASES = {  # name: (network, engine)
    "ddp compiled": (network, lambda m, ranks: torch.compile(ddp()(m, ranks), **COMPILED)),
    "ddp of compiled": (network, lambda m, ranks: ddp()(torch.compile(m, **COMPILED), ranks)),
    "ddp checkpointed": (made(Checkpointed), ddp()),
    "ddp tied": (made(Tied), ddp()),
    "ddp attention": (made(Attentive), ddp()),
    "ddp frozen": (partly_frozen, ddp()),
    "ddp frozen views": (partly_frozen, ddp(gradient_as_bucket_view=True)),
    "ddp branches": (made(Branchy), ddp(find_unused_parameters=True)),
    "ddp branches views": (
        made(Branchy),
        ddp(find_unused_parameters=True, gradient_as_bucket_view=True),
    ),
    "ddp routed": (made(Routed), ddp(find_unused_parameters=True)),
    "fsdp2 one unit": (network, in_one_unit),
    "fsdp2 every child": (made(Nested), every_child),
    "fsdp2 nested": (made(Nested), nested),
    "fsdp2 nested kept": (made(Nested), partial(nested, reshard_after_forward=False)),
    "fsdp2 attention": (made(Attentive), every_child),
    "fsdp2 attention one unit": (made(Attentive), in_one_unit),
    "fsdp2 tied": (made(Tied), in_one_unit),
    "fsdp2 checkpointed": (made(Checkpointed), in_one_unit),
    "fsdp2 checkpointed children": (made(Checkpointed), every_child),
    "fsdp2 checkpoint wrapped": (network, checkpoint_wrapped),
    "fsdp2 frozen": (partly_frozen, fsdp2()),
    "fsdp2 compiled layers": (network, of_compiled_layers),
    "fsdp2 compiled modules": (network, of_compiled_modules),
}
ON_FOUR = {
    "fsdp2 partly resharded": (network, fsdp2(reshard_after_forward=2)),
    "hsdp nested": (made(Nested), nested_on_two_rows),
    "hsdp kept": (network, hsdp(reshard_after_forward=False)),
    "hsdp frozen": (partly_frozen, hsdp()),
    "hsdp joined late": (network, over_rows_only_at_the_end),
}
ROUNDED = {  # name: (network, engine, how the oracle computes, tolerance)
    # The oracle's gradients are rounded as the ranks' are; what is left is the order of float32
    # sums, before or after a rounding to bfloat16 (2^-9) of a few of some hundred elements.
    "ddp autocast": (made(Autocast), ddp(), in_own_precision, 2e-3),
    "fsdp2 bfloat16": (network, fsdp2(mp_policy=BFLOAT16), in_bfloat16, 2e-3),
    "fsdp2 bfloat16 nested": (made(Nested), partial(nested, mp_policy=BFLOAT16), in_bfloat16, 2e-3),
    # Only what is sent is rounded, to 2^-11 of each element of the sum; the micro-batches are not.
    "ddp fp16 hook": (network, with_hook(fp16_compress_hook), in_float64, 2e-3),
}
ADDED_UP = {"ddp hook": (network, with_hook(added_up)), "fsdp2": (network, summing)}
TABLE = CASES | ON_FOUR | ROUNDED


def measured(rank, ranks, *, case, table=None, sizes, loss="weighted", **how):
    build, wrap, *_ = (ADDED_UP if table == "added up" else TABLE)[case]
    torch.compiler.reset()
    return train(rank, ranks, wrap(build(), ranks), sizes, loss, **how)


@pytest.mark.parametrize("always_sync", [False, True], ids=["no_sync", "sync"])
@pytest.mark.parametrize("case", CASES)
def test_every_option_of_an_engine_measures_what_one_process_would(ranks, case, always_sync):
    sizes = SAME_TOTAL[:3]
    run = partial(measured, case=case, sizes=sizes, always_sync=always_sync)
    assert all_close(expected(CASES[case][0], sizes), ranks(3)(run))


@pytest.mark.parametrize("case", CASES)
def test_every_option_of_an_engine_measures_plain_mean_losses(ranks, case):
    sizes = SAME_COUNT[:2]
    run = partial(measured, case=case, sizes=sizes, loss="mean")
    assert all_close(expected(CASES[case][0], sizes, "mean"), ranks(2)(run))


@pytest.mark.parametrize("always_sync", [False, True], ids=["no_sync", "sync"])
@pytest.mark.parametrize("case", ON_FOUR)
def test_what_needs_four_ranks_measures_what_one_process_would(ranks, case, always_sync):
    run = partial(measured, case=case, sizes=SAME_TOTAL, always_sync=always_sync)
    assert all_close(expected(ON_FOUR[case][0], SAME_TOTAL), ranks(4)(run))


@pytest.mark.parametrize("case", ROUNDED)
def test_low_precision_measures_the_gradients_it_makes(ranks, case):
    build, _, of_one, rel = ROUNDED[case]
    sizes = SAME_TOTAL[:3]
    answers = expected(build, sizes, of_one=of_one)
    assert all_close(answers, ranks(3)(partial(measured, case=case, sizes=sizes)), rel)


@pytest.mark.parametrize("case", ADDED_UP)
def test_ranks_that_are_added_up_give_the_same_numbers_whatever_their_samples(ranks, case):
    sizes = SAME_COUNT[:3]
    run = partial(measured, case=case, table="added up", sizes=sizes, loss="summed")
    assert all_close(expected(network, sizes, "summed"), ranks(3)(run))


@pytest.mark.parametrize("case", ADDED_UP)
def test_plain_mean_losses_that_are_added_up_give_the_same_numbers(ranks, case):
    sizes = SAME_COUNT[:3]
    # the same gradients a step; weights then move three times as far, so only the first is asked
    run = partial(measured, case=case, table="added up", sizes=sizes, loss="mean", steps=1)
    assert all_close(expected(network, sizes, "mean", steps=1), ranks(3)(run))


def inductor(rank, ranks):
    torch.compiler.reset()
    return train(rank, ranks, of_compiled_layers(network(), ranks, "inductor"), EQUAL)


def test_layers_compiled_by_inductor_are_measured_under_fsdp2(ranks):
    assert all_close(expected(network, EQUAL[:2]), ranks(2)(inductor))


# micro-batches of several backwards


def two_losses(rank, ranks, *, wrapper):
    """Half of each micro-batch's loss after the other."""
    model = ENGINES[wrapper](network(), ranks)
    readings = []
    with GradientMeter(model) as meter:
        for step in range(2):
            model.zero_grad()
            for number, n in enumerate(EQUAL[rank]):
                x, y = batch(rank, step, number, n)
                last = number == len(EQUAL[rank]) - 1
                with meter.micro_batch():
                    for half, final in ((slice(None, n // 2), False), (slice(n // 2, None), last)):
                        with synchronized(model, final):
                            loss = cross_entropy(model(x[half]), y[half], reduction="sum")
                            (loss / sum(EQUAL[rank])).backward()
            readings.append(meter.read(EQUAL[rank]))
    return readings


@pytest.mark.parametrize("wrapper", ENGINES)
def test_two_losses_in_micro_batch_are_one_micro_batch(ranks, wrapper):
    count = 4 if wrapper == "hsdp" else 3
    answers = [one_step(network, step, EQUAL[:count]) for step in range(2)]
    assert all_close(answers, ranks(count)(partial(two_losses, wrapper=wrapper)))


class Reentrant(Checkpointed):
    """A reentrant checkpoint runs backwards within the backward."""

    def forward(self, x):
        x = x.requires_grad_() if torch.is_grad_enabled() else x
        x = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=True)
        x = checkpoint(lambda x: torch.tanh(self.second(x)), x, use_reentrant=True)
        return self.head(x)


def reentrant(rank, ranks):
    model = ddp()(made(Reentrant)(), ranks)
    with GradientMeter(model) as meter:
        for number, n in enumerate(EQUAL[rank]):
            x, y = batch(rank, 0, number, n)
            with synchronized(model, number == len(EQUAL[rank]) - 1), meter.micro_batch():
                (cross_entropy(model(x), y) * n / sum(EQUAL[rank])).backward()
        return meter.read(EQUAL[rank])


def test_reentrant_checkpoints_in_micro_batch_are_one_micro_batch(ranks):
    answer = one_step(made(Checkpointed), 0, EQUAL[:3])
    assert all(close(answer, reading) for reading in ranks(3)(reentrant))


class LastReentrant(Reentrant):
    """The layer that the backward reaches first is in a reentrant checkpoint."""

    def forward(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return checkpoint(self.head, x, use_reentrant=True)


def last_reentrant(rank, ranks):
    model = ddp()(made(LastReentrant)(), ranks)
    x, y = batch(rank, 0, 0, 4)
    with GradientMeter(model):
        loss = cross_entropy(model(x), y)
        with pytest.raises(GradientError, match="use_reentrant=False avoids"):
            loss.backward()


def test_a_reentrant_checkpoint_that_is_reached_first_is_refused(ranks):
    ranks(2)(last_reentrant)


# loss scaling


def scaled(rank, ranks, *, wrapper):
    """As with float16: scaled losses, read, unscale, clip, step."""
    model = ENGINES[wrapper](network(), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    readings = []
    with GradientMeter(model, scaler=scaler) as meter:
        for step in range(3):
            for number, n in enumerate(EQUAL[rank]):
                with synchronized(model, number == len(EQUAL[rank]) - 1):
                    x, y = batch(rank, step, number, n)
                    loss = cross_entropy(model(x), y) * n / sum(EQUAL[rank])
                    scaler.scale(loss).backward()
            readings.append(meter.read(EQUAL[rank]))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e3)  # longer than any: changes nothing
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return readings


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_the_scale_of_a_grad_scaler_is_taken_out(ranks, wrapper):
    run = partial(scaled, wrapper=wrapper)
    assert all_close(expected(network, EQUAL[:3]), ranks(3)(run))


# who takes part


def among_two(rank, ranks):
    """DDP over ranks 0 and 1; rank 2 trains nothing."""
    group = dist.new_group([0, 1])
    if rank == 2:
        return None
    model = DistributedDataParallel(network(), process_group=group)
    return train(rank, 2, model, EQUAL)


def test_ddp_over_some_of_the_ranks_measures_those(ranks):
    first, second, nothing = ranks(3)(among_two)
    assert nothing is None
    assert all_close(expected(network, EQUAL[:2]), [first, second])


def last_two_of_three(rank, ranks):
    """The group's numbers of ranks are not the world's."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    model = DistributedDataParallel(network(), process_group=group)
    return train(rank - 1, 2, model, EQUAL)


def test_ranks_are_numbered_as_in_the_models_group(ranks):
    _, first, second = ranks(3)(last_two_of_three)
    assert all_close(expected(network, EQUAL[:2]), [first, second])


def alone(rank, ranks):
    """Every rank a DDP model of its own, on a group of one."""
    groups = [dist.new_group([r]) for r in range(ranks)]
    model = DistributedDataParallel(network(), process_group=groups[rank])
    return train(0, 1, model, [[4, 6, 2]], confidence=0.9, half_batch_cosine=True)


def test_ddp_over_one_rank_is_one_process(ranks):
    assert all_close(expected(network, [[4, 6, 2]]), ranks(2)(alone))


def unfrozen_between(rank, ranks, *, wrapper):
    """Frozen in the first step, and again seen in the second."""
    model = UNFREEZABLE[wrapper](network())
    readings = []
    with GradientMeter(model) as meter:
        for step in range(2):
            for p in list(model.parameters())[:2]:
                p.requires_grad_(bool(step))
            model.zero_grad()
            accumulate(model, rank, step, EQUAL)
            readings.append(meter.read(EQUAL[rank]))
    return readings


def first_frozen():
    model = network()
    for p in list(model.parameters())[:2]:
        p.requires_grad_(False)
    return model


UNFREEZABLE = {
    "ddp": lambda m: ddp(find_unused_parameters=True)(m, 2),
    "fsdp2": sharded,
    "fsdp2 one unit": fully_shard,
}


@pytest.mark.parametrize("wrapper", UNFREEZABLE)
def test_parameters_may_be_frozen_for_a_step(ranks, wrapper):
    answers = [one_step(first_frozen, 0, EQUAL[:2]), one_step(network, 1, EQUAL[:2])]
    assert all_close(answers, ranks(2)(partial(unfrozen_between, wrapper=wrapper)))


def unfrozen_late(rank, ranks, *, wrapper):
    model = ENGINES[wrapper](first_frozen(), ranks)
    with GradientMeter(model) as meter:
        accumulate(model, rank, 0, EQUAL)
        meter.read(EQUAL[rank])
        model.zero_grad()
        for p in model.parameters():
            p.requires_grad_(True)
        try:
            accumulate(model, rank, 1, EQUAL)
            return [meter.read(EQUAL[rank])]
        except GradientError as error:
            return str(error)


def test_a_parameter_unfrozen_late_is_not_reduced_by_ddp_and_refused_on_every_rank(ranks):
    messages = ranks(2)(partial(unfrozen_late, wrapper="ddp"))
    assert [True, True] == ["differs between ranks" in message for message in messages]


def unfrozen_within(rank, ranks):
    """Between two micro-batches; then a step of its own is measured."""
    model = UNFREEZABLE["ddp"](network())
    first = next(model.parameters())
    first.requires_grad_(False)
    with GradientMeter(model) as meter:
        accumulate(model, rank, 0, [[4]] * 2)
        first.requires_grad_(True)
        with pytest.raises(GradientError, match="was unfrozen, or its hooks were removed"):
            accumulate(model, rank, 0, [[6]] * 2)
        model.zero_grad()
        accumulate(model, rank, 1, EQUAL)
        return [meter.read(EQUAL[rank])]


def test_a_parameter_unfrozen_within_a_step_is_refused_under_ddp_and_the_next_step_is_right(ranks):
    assert all_close([one_step(network, 1, EQUAL[:2])], ranks(2)(unfrozen_within))


@pytest.mark.parametrize("wrapper", ["fsdp2", "hsdp"])
def test_a_parameter_unfrozen_late_is_reduced_by_fsdp2_and_seen(ranks, wrapper):
    answers = [one_step(network, 1, EQUAL)]
    assert all_close(answers, ranks(4)(partial(unfrozen_late, wrapper=wrapper)))
