"""GradientMeter on real processes: what it refuses, on every rank, and that none hangs."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import bigbatch as bb
from bigbatch import GradientMeter
from bigbatch.errors import GradientError, SettingError
from bigbatch.optim import VRSGD
from training_on_ranks import (
    ENGINES,
    EQUAL,
    RAGGED,
    accumulate,
    all_close,
    batch,
    ddp,
    fsdp2,
    network,
    one_step,
)

# steps that are spoilt, each a function (model, rank) -> the sizes stated; and the words of the
# error on the ranks where it happened, and on the others


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def as_it_should_be(model, rank):
    accumulate(model, rank, 0, EQUAL)
    return EQUAL[rank]


def last_under_no_sync(model, rank):
    for number, n in enumerate(EQUAL[rank]):
        with model.no_sync():
            x, y = batch(rank, 0, number, n)
            (cross_entropy(model(x), y) * n / sum(EQUAL[rank])).backward()
    return EQUAL[rank]


def clipped(model, rank):
    accumulate(model, rank, 0, EQUAL)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    return EQUAL[rank]


def zeroed(model, rank):
    accumulate(model, rank, 0, EQUAL)
    model.zero_grad()
    return EQUAL[rank]


def zeroed_in_place(model, rank):
    accumulate(model, rank, 0, EQUAL)
    model.zero_grad(set_to_none=False)
    return EQUAL[rank]


def unscaled(model, rank):
    """Moves no version counter."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate(model, rank, 0, EQUAL)
    scaler.unscale_(optimizer)
    return EQUAL[rank]


def edited(model, rank):
    """One value, in place."""
    accumulate(model, rank, 0, EQUAL)
    local(next(model.parameters()).grad).mul_(2.0)
    return EQUAL[rank]


def edited_silently(model, rank):
    """All values, past the version counters."""
    accumulate(model, rank, 0, EQUAL)
    for p in model.parameters():
        local(p.grad).data.mul_(2.0)
    return EQUAL[rank]


def one_size_too_few(model, rank):
    accumulate(model, rank, 0, EQUAL)
    return EQUAL[rank][:-1]


def a_size_of_zero(model, rank):
    accumulate(model, rank, 0, EQUAL)
    return [*EQUAL[rank][:-1], 0]


def one_micro_batch_too_few(model, rank):
    accumulate(model, rank, 0, [sizes[1:] for sizes in EQUAL])
    return EQUAL[rank]


def a_sum(model, rank):
    accumulate(model, rank, 0, EQUAL)
    return sum(EQUAL[rank])


OTHER = "could not read its step"
ALL = {  # on every rank, the words there
    "last under no_sync": ("ddp", last_under_no_sync, "no_sync"),
    "clipped": ("ddp", clipped, "was changed"),
    "clipped fsdp2": ("fsdp2", clipped, "clipping"),
    "zeroed": ("ddp", zeroed, "was changed"),
    "zeroed fsdp2": ("fsdp2", zeroed, "was changed"),
    "zeroed in place": ("ddp", zeroed_in_place, "was changed"),
    "zeroed in place fsdp2": ("fsdp2", zeroed_in_place, "was changed"),
    "unscaled": ("ddp", unscaled, "read before unscale_"),
    "unscaled fsdp2": ("fsdp2", unscaled, "read before unscale_"),
    "unscaled hsdp": ("hsdp", unscaled, "read before unscale_"),
    "edited": ("ddp", edited, "was changed"),
    "one size too few": ("ddp", one_size_too_few, "3 backwards were seen but 2 sizes stated"),
    "a sum": ("fsdp2", a_sum, "samples=12 must be positive numbers, the size of each"),
}
ONE = {  # on one rank: the words there and on the others
    "clipped": ("ddp", clipped, "was changed", OTHER),
    "zeroed": ("ddp", zeroed, "was changed", OTHER),
    "zeroed fsdp2": ("fsdp2", zeroed, "was changed", OTHER),
    "edited fsdp2": ("fsdp2", edited, "was changed", OTHER),
    "edited hsdp": ("hsdp", edited, "was changed", OTHER),
    "unscaled": ("ddp", unscaled, "differs between ranks", "differs between ranks"),
    "edited silently": ("ddp", edited_silently, "differs between ranks", "differs between ranks"),
    "edited silently fsdp2": ("fsdp2", edited_silently, "not the sum", "not the sum"),
    "edited silently hsdp": ("hsdp", edited_silently, "not the sum", "not the sum"),
    "one size too few": ("ddp", one_size_too_few, "seen but 2 sizes stated", OTHER),
    "one size too few fsdp2": ("fsdp2", one_size_too_few, "seen but 2 sizes stated", OTHER),
    "a size of zero": ("hsdp", a_size_of_zero, "must be positive", OTHER),
    "one micro-batch too few": ("ddp", one_micro_batch_too_few, "2 backwards were seen", OTHER),
}


def spoilt(rank, ranks, *, table, case, culprits, options):
    """The message of this rank's error; then, after zero_grad, what the next steps read."""
    engine, spoil = (ALL if table == "all" else ONE)[case][:2]
    model = ENGINES[engine](network(), ranks)
    with GradientMeter(model, **options) as meter:
        sizes = (spoil if rank in culprits else as_it_should_be)(model, rank)
        try:
            meter.read(sizes)
            message = "no error"
        except GradientError as error:
            message = str(error)
        readings = []
        for step in (1, 2):
            model.zero_grad()
            accumulate(model, rank, step, EQUAL)
            readings.append(meter.read(EQUAL[rank]))
    return message, readings


def next_steps_are_right(count, results):
    answers = [one_step(network, step, EQUAL[:count]) for step in (1, 2)]
    return all_close(answers, [readings for _, readings in results])


OPTIONS = {
    "plain": {},
    "everything": {"confidence": 0.9, "per_layer": True, "half_batch_cosine": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", ALL)
def test_a_step_spoilt_on_all_ranks_is_refused_and_the_next_one_is_right(ranks, case, options):
    engine, _, words = ALL[case]
    count = 4 if engine == "hsdp" else 3
    results = ranks(count)(
        partial(spoilt, table="all", case=case, culprits=range(count), options=OPTIONS[options])
    )
    assert [words] * count == [words if words in message else message for message, _ in results]
    assert next_steps_are_right(count, results)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", ONE)
def test_a_step_spoilt_on_one_rank_is_refused_on_all_and_the_next_one_is_right(
    ranks, case, options
):
    engine, _, expected_there, elsewhere = ONE[case]
    count = 4 if engine == "hsdp" else 3
    results = ranks(count)(
        partial(spoilt, table="one", case=case, culprits=[1], options=OPTIONS[options])
    )
    words = [expected_there if rank == 1 else elsewhere for rank in range(count)]
    assert words == [
        w if w in message else message for w, (message, _) in zip(words, results, strict=True)
    ]
    assert next_steps_are_right(count, results)
    if elsewhere == OTHER:
        assert all("rank 1 " in message for rank, (message, _) in enumerate(results) if rank != 1)


# unlike numbers of samples, and reductions that are neither mean nor sum


def refused(rank, ranks, *, case):
    """The type and message of the error on this rank, at construction or reading."""
    try:
        REFUSED[case](rank, ranks)
    except (GradientError, SettingError) as error:
        return type(error).__name__, str(error)
    return "no error", ""


def read_step(model, rank, sizes, loss="weighted"):
    with GradientMeter(model, loss=loss) as meter:
        accumulate(model, rank, 0, sizes, loss)
        meter.read(sizes[rank])


def unlike_samples(engine):
    return lambda rank, ranks: read_step(
        ENGINES[engine](network(), ranks), rank, [[4, 6, 2], [4, 6, 3], [4, 6, 2], [4, 6, 2]]
    )


def divided_by_three(rank, ranks):
    model = fsdp2()(network(), ranks)
    for unit in model.modules():
        if hasattr(unit, "set_gradient_divide_factor"):
            unit.set_gradient_divide_factor(3.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no other way
    read_step(model, rank, EQUAL)


def halved(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / (2 * dist.get_world_size()))


def halved_by_a_hook(rank, ranks):
    model = ddp()(network(), ranks)
    model.register_comm_hook(None, halved)
    read_step(model, rank, EQUAL)


def not_wrapped(handed_over):
    def run(rank, ranks):
        model = network()
        with GradientMeter(handed_over(model)) as meter:
            x, y = batch(rank, 0, 0, 4)
            cross_entropy(model(x), y).backward()
            meter.read([4])

    return run


def inside_of_ddp(rank, ranks):
    model = ddp()(network(), ranks)
    with GradientMeter(model.module) as meter:
        accumulate(model, rank, 0, EQUAL)
        meter.read(EQUAL[rank])


def part_in_ddp(rank, ranks):
    model = network()
    model[0] = DistributedDataParallel(model[0])
    GradientMeter(model)


def part_ignored_by_ddp(rank, ranks):
    model = network()
    ignored = ["0.weight"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    GradientMeter(DistributedDataParallel(model))


def two_in_ddp(rank, ranks):
    model = network()
    model[0], model[2] = DistributedDataParallel(model[0]), DistributedDataParallel(model[2])
    GradientMeter(model)


def part_in_fsdp2(rank, ranks):
    model = network()
    fully_shard(model[0])
    GradientMeter(model)


def two_meshes(rank, ranks):
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("experts", "data"))
    model = network()
    fully_shard(model[0], mesh=mesh["data"])
    GradientMeter(fully_shard(model))


def fsdp1(rank, ranks):
    GradientMeter(FullyShardedDataParallel(network(), device_id=torch.device("cpu")))


def last_unreduced(rank, ranks):
    """FSDP2 keeps what it did not reduce for the next step, so this is the last thing done."""
    model = fsdp2()(network(), ranks)
    with GradientMeter(model) as meter:
        model.set_requires_gradient_sync(False)
        for number in range(2):
            x, y = batch(rank, 0, number, 4)
            (cross_entropy(model(x), y) / 2).backward()
        meter.read([4, 4])


def step_after_unreduced(rank, ranks):
    """A gradient left over from a step that was not reduced is in the next one's."""
    model = fsdp2()(network(), ranks)
    with GradientMeter(model) as meter:
        model.set_requires_gradient_sync(False)
        x, y = batch(rank, 0, 0, 4)
        cross_entropy(model(x), y).backward()
        try:
            meter.read([4])
        except GradientError:
            model.zero_grad()
        accumulate(model, rank, 1, EQUAL)
        meter.read(EQUAL[rank])


def single_micro_batch(rank, ranks):
    group = [dist.new_group([r]) for r in range(ranks)][rank]
    model = DistributedDataParallel(network(), process_group=group)
    read_step(model, 0, [[4]])


REFUSED = {
    "unlike samples ddp": unlike_samples("ddp"),
    "unlike samples fsdp2": unlike_samples("fsdp2"),
    "unlike samples hsdp": unlike_samples("hsdp"),
    "divided by three": divided_by_three,
    "halved by a hook": halved_by_a_hook,
    "not wrapped": not_wrapped(lambda model: model),
    "parameters not wrapped": not_wrapped(lambda model: model.parameters()),
    "inside of ddp": inside_of_ddp,
    "part in ddp": part_in_ddp,
    "part ignored by ddp": part_ignored_by_ddp,
    "two in ddp": two_in_ddp,
    "part in fsdp2": part_in_fsdp2,
    "two meshes": two_meshes,
    "fsdp1": fsdp1,
    "last unreduced": last_unreduced,
    "step after unreduced": step_after_unreduced,
    "single micro-batch": single_micro_batch,
}
WORDS = {  # case: ranks, error, words
    "unlike samples ddp": (3, "GradientError", 'loss="mean"'),
    "unlike samples fsdp2": (3, "GradientError", "give each rank as many"),
    "unlike samples hsdp": (4, "GradientError", "give each rank as many"),
    "divided by three": (2, "GradientError", "nor their mean over 2 ranks"),
    "halved by a hook": (3, "GradientError", "nor their mean over 3 ranks"),
    "not wrapped": (2, "GradientError", "wrap it in DistributedDataParallel or fully_shard"),
    "parameters not wrapped": (2, "GradientError", "hand over the wrapped model"),
    "inside of ddp": (2, "GradientError", "hand over the wrapped model"),
    "part in ddp": (2, "SettingError", "outside the DDP wrapper"),
    "part ignored by ddp": (2, "SettingError", "or DDP ignores it"),
    "two in ddp": (2, "SettingError", "2 DDP wrappers"),
    "part in fsdp2": (2, "SettingError", "not sharded by fully_shard"),
    "two meshes": (4, "SettingError", "two meshes"),
    "fsdp1": (2, "SettingError", "FSDP1"),
    "last unreduced": (3, "GradientError", "not the sum"),
    "step after unreduced": (3, "GradientError", "not the sum"),
    "single micro-batch": (2, "GradientError", "1 micro-batch seen"),
}


@pytest.mark.early
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_give_a_wrong_number_is_refused_on_every_rank(ranks, case):
    count, error, words = WORDS[case]
    results = ranks(count)(partial(refused, case=case))
    assert [(error, words)] * count == [
        (kind, words if words in message else message) for kind, message in results
    ]


def unlike_then_alike(rank, ranks):
    """The step after unlike numbers of samples."""
    model = ENGINES["ddp"](network(), ranks)
    with GradientMeter(model) as meter:
        accumulate(model, rank, 0, RAGGED)
        with pytest.raises(GradientError, match="samples"):
            meter.read(RAGGED[rank])
        model.zero_grad()
        accumulate(model, rank, 1, EQUAL)
        return [meter.read(EQUAL[rank])]


def test_a_step_after_unlike_numbers_of_samples_is_right(ranks):
    assert all_close([one_step(network, 1, EQUAL[:3])], ranks(3)(unlike_then_alike))


def abandoned(rank, ranks, *, wrapper):
    """Two steps that nobody reads, zeroed in place, then one that is read."""
    model = ENGINES[wrapper](network(), ranks)
    with GradientMeter(model) as meter:
        for step in range(3):
            model.zero_grad(set_to_none=False)
            accumulate(model, rank, step, EQUAL)
        return [meter.read(EQUAL[rank])]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_steps_that_nobody_reads_do_not_add_up(ranks, wrapper):
    answers = [one_step(network, 2, EQUAL[:3])]
    assert all_close(answers, ranks(3)(partial(abandoned, wrapper=wrapper)))


# torch's composable replicate()


def replicated(rank, ranks, newer):
    """What is said by everything that takes the model, and by an optimizer that does not."""
    if newer:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        model = replicate(network(), mesh=init_device_mesh("cpu", (ranks,)))
    else:
        from torch.distributed._composable import replicate

        model = replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.zeros(64, 5), 8)
    messages = []
    for make in (
        lambda: GradientMeter(model),
        lambda: bb.AdaptiveBatch(model, optimizer, loader, policy=bb.SimiGrad()),
        lambda: bb.AdaptiveBatch(nn.Sequential(model), optimizer, loader, policy=bb.SimiGrad()),
        lambda: trained_by_itself(model),
    ):
        with pytest.raises((SettingError, GradientError)) as refused:
            make()
        messages.append(str(refused.value))
    return messages


def trained_by_itself(model):
    optimizer = VRSGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("newer", [False, True], ids=["over ddp", "over fsdp2"])
def test_composable_replicate_is_refused_by_its_name(ranks, newer):
    by_itself = "DistributedDataParallel" if newer else "under DDP call optimizer.attach"
    for *of_model, alone in ranks(2)(replicated, newer):
        assert {True} == {"replicate() of torch.distributed" in message for message in of_model}
        assert {True} == {"DistributedDataParallel, or by fully_shard" in m for m in of_model}
        assert by_itself in alone
