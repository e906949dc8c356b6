"""AdaptiveBatch over meshes of data and tensor parallelism, against one process."""

import io
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import bigbatch as bb
from bigbatch.errors import GradientError, RankError, SettingError
from bigbatch.optim import VRSGD
from numbered_samples import whole
from tensor_parallel_training import (
    RANKS,
    SEED,
    loader_of,
    loss_of,
    mesh_of,
    network,
    parallel,
    plan,
    samples,
)

pytestmark = pytest.mark.cpu
REL = 1e-9  # float64, on several processes in another order
EVERYTHING = {"per_layer": True, "half_batch_cosine": True}


def training(model, batches, every=1, options=None, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    settings = {
        "policy": bb.SimiGrad(0.3, min_batch=8, max_batch=48),
        "batch_size": 8,
        "micro_batch": 4,
        "meter": bb.GradientMeter(model, **(options or {})),
    } | settings
    return bb.AdaptiveBatch(model, optimizer, batches, every=every, **settings)


def steps_of(train, most=10**9, *, clip=True):
    """The record of each step, with the norm that was clipped."""
    done = []
    for _ in train.epochs(2):
        for step in train:
            for words in step:
                step.backward(loss_of(train.model, words))
            norm = whole(step.clip_grad_norm_(0.5)).item() if clip else 0.0
            done.append((norm, step.update()))
            if len(done) == most:
                return done
    return done


def on_mesh(rank, ranks, engine, shape, every, options):
    mesh = mesh_of(engine)
    model = parallel(engine, mesh, **shape)
    loader = loader_of(mesh.get_local_rank("dp"), mesh["dp"].size())
    train = training(model, loader, every, options)
    parameters = list(model.parameters())  # DDP takes them out in the first forward
    done = steps_of(train)
    places = {isinstance(p, DTensor) for p in parameters}
    return done, [whole(p) for p in parameters], places


def in_one_process(engine, shape, every, options):
    model = network(tied=shape.get("tied", False))
    batches = bb.Batches(loader_of(0, 1), virtual_ranks=RANKS[engine][0])
    done = steps_of(training(model, batches, every, options))
    return done, list(model.parameters())


def in_ddp(rank, ranks, every, options):
    """Whose ranks cut the batch into the same halves."""
    model = network()
    train = training(DistributedDataParallel(model), loader_of(rank, ranks), every, options)
    return steps_of(train), [p.detach() for p in model.parameters()]


def figures(norm, record):
    values = [record.loss, norm]
    if (statistics := record.statistics) is not None:
        layers = statistics.layers.values()
        values += [statistics.grad_sqnorm, statistics.grad_variance, statistics.similarity]
        values += [each.grad_variance for each in layers]
        values += [statistics.half_batch_cosine] * (statistics.half_batch_cosine is not None)
    return values


CASES = {
    "alone": ("alone", {}, 1, EVERYTHING),
    "alone, sequence": ("alone", {"sequence": True}, 2, {}),
    "alone, tied": ("alone", {"tied": True}, 1, {}),
    "ddp": ("ddp", {}, 2, {}),
    "ddp, sequence": ("ddp", {"sequence": True}, 1, EVERYTHING),
    "fsdp2": ("fsdp2", {}, 2, {}),
    "fsdp2, sequence": ("fsdp2", {"sequence": True}, 1, EVERYTHING),
    "fsdp2, tied": ("fsdp2", {"tied": True}, 1, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mesh_trains_as_one_process(ranks, case):
    engine, shape, every, options = CASES[case]
    data, tensor = RANKS[engine]
    if data > 1 and options:
        expected, weights = ranks(data)(in_ddp, every, options)[0]
    else:
        expected, weights = in_one_process(*CASES[case])
    results = ranks(data * tensor)(on_mesh, *CASES[case])
    assert len({record.batch_size for _, record in expected}) > 2 or "tied" in shape
    for done, _, places in results:
        assert (engine != "ddp") == (True in places)
        assert len(expected) == len(done)
        for (norm, one), (other_norm, other) in zip(expected, done, strict=True):
            assert (one.batch_size, one.micro_batches) == (other.batch_size, other.micro_batches)
            assert (one.samples, one.lr) == (other.samples, other.lr)
            assert figures(norm, one) == pytest.approx(
                figures(other_norm, other), rel=REL, nan_ok=True
            )
    first, others, _ = results[0]
    assert all(done == first for done, *_ in results)
    if engine != "ddp":  # whose parameters are local slices
        for one, other in zip(weights, others, strict=True):
            torch.testing.assert_close(one.detach(), other, rtol=0, atol=1e-12)


# a gradient that is not finite on one process


def spoilt(rank, ranks, engine, name):
    """Two steps, one measured and one not; nan in one process alone, in its slice or its copy."""
    mesh = mesh_of(engine)
    model = parallel(engine, mesh)
    train = training(model, loader_of(mesh.get_local_rank("dp"), mesh["dp"].size()), every=2)
    before = [whole(p) for p in model.parameters()]

    def spoil(parameter):
        grad = parameter.grad
        (grad.to_local() if isinstance(grad, DTensor) else grad).data.view(-1)[:1] = torch.nan

    if rank == 1:
        model.get_parameter(name).register_post_accumulate_grad_hook(spoil)
    records = steps_of(train, 2, clip=False)
    after = [whole(p) for p in model.parameters()]
    return [r.skipped for _, r in records], train.skipped, all(map(torch.equal, before, after))


@pytest.mark.filterwarnings("ignore:the gradient of:UserWarning")
@pytest.mark.parametrize("name", ["block.up.weight", "first.weight"])
@pytest.mark.parametrize("engine", ["alone", "fsdp2"])
def test_a_gradient_that_is_not_finite_on_one_process_skips_the_step_on_all(ranks, engine, name):
    data, tensor = RANKS[engine]
    results = ranks(data * tensor)(spoilt, engine, name)
    assert [([True, True], 2, True)] * len(results) == results


def first_gradient(rank, ranks):
    """`.grad` after the first backward of a step of 8 samples, and its share of the mean."""
    model = parallel("alone", mesh_of("alone"))
    step = next(iter(training(model, loader_of(0, 1))))
    words = next(iter(step))
    step.backward(loss_of(model, words))
    found = [whole(p.grad) for p in model.parameters()]
    model.zero_grad()
    loss_of(model, words).backward()
    return found, [whole(p.grad) * len(words) / 8 for p in model.parameters()]


def test_the_first_step_expects_the_weights_of_ranks_and_not_of_processes(ranks):
    for found, share in ranks(2)(first_gradient):
        torch.testing.assert_close(found, share, rtol=1e-9, atol=1e-15)


# a loop of one's own


def metered(rank, ranks):
    """A step of four micro-batches; and the dimension along which each parameter is cut."""
    model = parallel("alone", mesh_of("alone"), sequence=True)
    parameters = list(model.parameters())
    with bb.GradientMeter(model, confidence=0.9) as meter:
        for words in samples(16).split(4):
            (loss_of(model, words) / 4).backward()
        statistics = meter.read(samples=[4] * 4)
    found = [p.placements[0] if isinstance(p, DTensor) else None for p in parameters]
    return statistics, [getattr(placement, "dim", None) for placement in found]


def of_slices(dims, ranks):
    """One process with the slices of all as parameters, so that projections are the same."""
    model = network()
    gradients = []
    for words in samples(16).split(4):
        whole_gradients = torch.autograd.grad(loss_of(model, words) / 4, list(model.parameters()))
        gradients.append(
            [
                (g if place == 0 else g[:0]) if dim is None else g.chunk(ranks, dim)[place]
                for place in range(ranks)
                for g, dim in zip(whole_gradients, dims, strict=True)
            ]
        )
    leaves = [torch.zeros_like(g).requires_grad_() for g in gradients[0]]
    with bb.GradientMeter(leaves, confidence=0.9) as meter:
        for each in gradients:
            sum((leaf * g).sum() for leaf, g in zip(leaves, each, strict=True)).backward()
        return meter.read(samples=[4] * 4)


def test_a_meter_and_its_interval_are_those_of_one_process(ranks):
    (one, dims), (other, _) = ranks(2)(metered)
    expected = of_slices(dims, 2)
    assert {None, 0, 1} == set(dims)
    for found in (one, other):
        assert expected.grad_sqnorm == pytest.approx(found.grad_sqnorm, rel=REL)
        assert expected.grad_variance == pytest.approx(found.grad_variance, rel=REL)
        interval = found.similarity_interval
        assert expected.similarity_interval == pytest.approx(interval, rel=1e-4)  # float32


# the whole training, stopped and begun again


def interrupted(rank, ranks, engine, stops):
    mesh, file = mesh_of(engine), io.BytesIO()
    place = mesh.get_local_rank("dp"), mesh["dp"].size()
    model = parallel(engine, mesh, sequence=True)
    train = training(model, loader_of(*place), every=2, scheduler=lambda n: 0.5 / (1 + n))
    done = steps_of(train, 7 if stops else 10**9)
    if stops:
        states = model.state_dict(), train.optimizer.state_dict()
        torch.save(train.state_dict(), file)
        model = parallel(engine, mesh, sequence=True)
        train = training(model, loader_of(*place), every=2, scheduler=lambda n: 0.5 / (1 + n))
        model.load_state_dict(states[0])
        train.optimizer.load_state_dict(states[1])
        file.seek(0)
        train.load_state_dict(torch.load(file, weights_only=True))
        done += steps_of(train)
    return done, [whole(p) for p in model.parameters()]


@pytest.mark.parametrize("engine", ["alone", "fsdp2"])
def test_a_training_continues_bit_for_bit(ranks, engine):
    data, tensor = RANKS[engine]
    expected = ranks(data * tensor)(interrupted, engine, False)
    actual = ranks(data * tensor)(interrupted, engine, True)
    for (lines, weights), (found, others) in zip(expected, actual, strict=True):
        assert [summary(*line) for line in lines] == [summary(*line) for line in found]
        assert all(map(torch.equal, weights, others))


def summary(norm, record):
    return norm, record.batch_size, record.loss, record.similarity, record.lr, record.samples


def branched(model, loader):
    """A branch test and the largest micro-batch, in the middle of a training."""
    train = training(model, loader, min_micro_batches=2)
    steps_of(train, 1)
    options = {"samples": 40, "repeats": 2, "held_aside": 8}
    result = train.branch_test(partial(loss_of, model), [2, 4], **options)
    largest = bb.largest_micro_batch(
        model, train.optimizer, DataLoader(samples(8), 4), partial(loss_of, model), most=8
    )
    ((_, record),) = steps_of(train, 1)
    return [*result.losses[0], *result.losses[1], largest, record.loss]


def branched_on_mesh(rank, ranks, engine):
    mesh = mesh_of(engine)
    loader = loader_of(mesh.get_local_rank("dp"), mesh["dp"].size(), 160)
    return branched(parallel(engine, mesh), loader)


def test_branches_train_as_in_one_process(ranks):
    expected = branched(network(), bb.Batches(loader_of(0, 1, 160), virtual_ranks=2))
    for found in ranks(4)(branched_on_mesh, "fsdp2"):
        assert expected == pytest.approx(found, rel=REL)


def of_sliced_logits(rank, ranks):
    """A loss of logits that stay cut, which is a DTensor."""
    mesh, styles = mesh_of("alone"), plan(sequence=False)
    styles["out"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    train = training(parallelize_module(network(), mesh["tp"], styles), loader_of(0, 1))
    losses = []
    for step, _ in zip(train, range(3), strict=False):
        for words in step:
            with loss_parallel():
                step.backward(loss_of(train.model, words))
        record = step.update()
        losses.append((record.loss, record.similarity))
    return losses


def test_loss_parallel_is_the_loss_of_one_process(ranks):
    done = steps_of(training(network(), loader_of(0, 1)), 3, clip=False)
    for losses in ranks(2)(of_sliced_logits):
        for (_, record), (loss, similarity) in zip(done, losses, strict=True):
            assert (record.loss, record.similarity) == pytest.approx((loss, similarity), rel=REL)


# what cannot be right


def refused(rank, ranks, case):
    """The type and message of the error on this process."""
    try:
        REFUSED[case][1](rank, ranks)
    except (SettingError, GradientError, RankError) as error:
        return type(error).__name__, str(error)
    return "no error", ""


def alone(**shape):
    return parallel("alone", mesh_of("alone"), **shape)


def with_groups(rank, ranks):
    training(alone(), loader_of(0, 1), groups=2)


def with_vr(rank, ranks):
    model = alone()
    optimizer = VRSGD([p for p in model.parameters() if not isinstance(p, DTensor)], lr=0.1)
    bb.AdaptiveBatch(model, optimizer, loader_of(0, 1), policy=bb.Fixed(8))


def with_vr_of_slices(rank, ranks):
    VRSGD(alone().block.parameters(), lr=0.1)


def with_vr_in_ddp(rank, ranks):
    VRSGD(parallel("ddp", mesh_of("ddp")).parameters(), lr=0.1)


def with_vr_under_fully_shard(rank, ranks):
    VRSGD(parallel("fsdp2", mesh_of("fsdp2")).parameters(), lr=0.1)


def with_consecutive_steps(rank, ranks):
    training(alone(), loader_of(0, 1), min_micro_batches=1)


def with_a_scaler(rank, ranks):
    training(alone(), loader_of(0, 1), scaler=torch.amp.GradScaler("cpu"))


def with_a_sampler_of_processes(rank, ranks):
    training(alone(), loader_of(rank, ranks))


def with_a_sampler_of_the_other_dimension(rank, ranks):
    training(parallel("fsdp2", mesh_of("fsdp2")), loader_of(rank % 2, 2))


def with_sums_in_float32(rank, ranks):
    training(alone().bfloat16(), loader_of(0, 1), accumulate_float32_above=1)


def with_other_samples(rank, ranks):
    train = training(alone(), DataLoader(samples(), 4, shuffle=True))
    torch.manual_seed(SEED + rank)
    steps_of(train, 1)


def with_another_rate(rank, ranks):
    train = training(alone(), loader_of(0, 1))
    train.optimizer.param_groups[0]["lr"] = 0.5 + rank
    steps_of(train, 2)


def with_a_part_of_the_sequence(rank, ranks):
    """A norm outside the plan, between modules whose activations are cut."""
    model = alone(sequence=True)
    model.block.norm = torch.nn.LayerNorm(8).double()
    local = torch.distributed.tensor.parallel.PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=True
    )
    parallelize_module(model, model.out.weight.device_mesh, {"block.norm": local})
    steps_of(training(model, loader_of(0, 1)), 1)


def over_some_processes(rank, ranks):
    bb.GradientMeter(parallelize_module(network(), mesh_of("ddp")["tp"], plan(sequence=False)))


def in_ddp_over_the_same(rank, ranks):
    mesh = mesh_of("alone")["tp"]
    model = parallelize_module(network(), mesh, plan(sequence=False))
    bb.GradientMeter(DistributedDataParallel(model, device_mesh=mesh))


def over_two_meshes(rank, ranks):
    model, mesh = network(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    parallelize_module(model.block, mesh["a"], {"up": ColwiseParallel()})
    bb.GradientMeter(parallelize_module(model, mesh["b"], {"out": ColwiseParallel()}))


def after_a_forward_in_ddp(rank, ranks):
    model = parallel("ddp", mesh_of("ddp"))
    loss_of(model, samples(4))
    bb.GradientMeter(model)


REFUSED = {  # processes, function, error, words
    "groups": (2, with_groups, "SettingError", "groups=2: under tensor parallelism"),
    "vr": (2, with_vr, "SettingError", "a variance-reduced optimizer compares whole gradients"),
    "vr, slices": (2, with_vr_of_slices, "SettingError", "tensor parallelism"),
    "vr, ddp": (4, with_vr_in_ddp, "SettingError", "tensor parallelism"),
    "vr, fsdp2": (4, with_vr_under_fully_shard, "SettingError", "tensor parallelism"),
    "consecutive": (2, with_consecutive_steps, "SettingError", "min_micro_batches=1 compares"),
    "scaler": (2, with_a_scaler, "SettingError", "a GradScaler looks at the slices"),
    "sums": (2, with_sums_in_float32, "SettingError", "autograd adds up as DTensors"),
    "sampler": (2, with_a_sampler_of_processes, "SettingError", "give it num_replicas=1"),
    "other dimension": (
        4,
        with_a_sampler_of_the_other_dimension,
        "RankError",
        "one tensor-parallel group, and differ in their samplers",
    ),
    "other samples": (2, with_other_samples, "RankError", "differ in the loss of a step"),
    "another rate": (2, with_another_rate, "RankError", "disagrees with rank 0"),
    "part of sequence": (
        2,
        with_a_part_of_the_sequence,
        "GradientError",
        "the gradients of 2 parameters differ between the processes",
    ),
    "some processes": (4, over_some_processes, "SettingError", "over 2 of 4 ranks"),
    "ddp over the same": (2, in_ddp_over_the_same, "SettingError", "the other dimension"),
    "two meshes": (4, over_two_meshes, "SettingError", "cut over 2 meshes"),
    "after a forward": (4, after_a_forward_in_ddp, "SettingError", "first forward"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_on_every_process(ranks, case):
    count, _, error, words = REFUSED[case]
    results = ranks(count)(refused, case)
    assert [(error, words)] * count == [
        (kind, words if words in message else message) for kind, message in results
    ]
