"""Meshes in addition to data parallelism: measured over the data axis, refused by name, or said."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import bigbatch as bb
from bigbatch.errors import GradientError, LoopError, SettingError
from numbered_samples import (
    SEED,
    Numbered,
    build,
    controller_of,
    ledger_loader,
    network,
    run,
    steps_of,
    together,
)
from oracles import noise as oracle


def two_axes(other):
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", other))


# some of the ranks


def on_some(rank, ranks, engine, updates):
    """Ranks 1 and 3 train together, and so do 0 and 2, all by themselves."""
    mesh = two_axes("other")["data"]
    model, (local, count) = network(), (mesh.get_local_rank(), mesh.size())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if engine == "ddp":
            model = DistributedDataParallel(model, process_group=mesh.get_group())
        else:
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
        train = bb.AdaptiveBatch(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            bb.Batches(ledger_loader(local, count), virtual_ranks=4),
            policy=controller_of(),
            micro_batch=12,
            every=1,
        )
    done = steps_of(train, 10**9, updates)
    said = [str(w.message) for w in caught if "of 4 ranks" in str(w.message)]
    return [numbers for numbers, _ in done], [record for _, record in done], said


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_some_of_the_ranks_train_as_if_they_were_all_and_it_is_said(ranks, engine):
    numbers, records, _ = run(0, 1, "plain", 4, 20)
    answers = ranks(4)(on_some, engine, 20)
    for one, other in ((0, 2), (1, 3)):
        assert together([(numbers,)]) == together([answers[one], answers[other]])
    for _, theirs, _ in answers:
        assert [r.batch_size for r in records] == [r.batch_size for r in theirs]
        for local, other in zip(records, theirs, strict=True):
            assert pytest.approx(local.similarity, abs=1e-9) == other.similarity
    assert [1, 1, 0, 0] == [len(said) for _, _, said in answers]  # the first of each two
    assert "shared by 2 of 4 ranks" in answers[0][2][0]
    assert "pipeline parallelism" in answers[0][2][0]


def shared_by_all(rank, ranks):
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    model = DistributedDataParallel(network(), process_group=group)
    data = Numbered()
    loader = DataLoader(
        data, 16, sampler=bb.ElasticDistributedSampler(data, seed=SEED)
    )  # of all four
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(SettingError, match="deals samples to num_replicas=4 ranks, and 2 share"):
        bb.AdaptiveBatch(model, optimizer, loader, policy=bb.SimiGrad())


def test_a_sampler_that_deals_to_more_ranks_than_train_is_refused(ranks):
    ranks(4)(shared_by_all)


def test_a_sampler_that_deals_to_more_ranks_than_one_is_refused():
    with pytest.raises(SettingError, match="num_replicas=2 ranks, and 1 share the model"):
        build(0, 1, "plain", None, ledger_loader(0, 2))


# pipelines

K, N = 4, 16


def piped(rank, *, scaled):
    """A stage of two, each on two ranks of the data axis; and its schedule."""
    mesh = two_axes("stage")
    number, whole = mesh["stage"].get_local_rank(), network()
    model = DistributedDataParallel(
        whole[2] if number else whole[:2], process_group=mesh["data"].get_group()
    )
    stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh["stage"].get_group())
    schedule = ScheduleGPipe(stage, K, cross_entropy, scale_grads=scaled)
    x, y = samples(mesh["data"].get_local_rank())
    return model, (partial(schedule.step, target=y) if number else partial(schedule.step, x))


def samples(of_rank):
    draw = torch.Generator().manual_seed(of_rank)
    x = torch.randn(N, 5, generator=draw, dtype=torch.float64)
    return x, torch.randint(3, (N,), generator=draw)


def measured_in_a_pipe(rank, ranks):
    model, step = piped(rank, scaled=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meter = bb.GradientMeter(model, loss="mean")
    step()
    noise = meter.read([N // K] * K)
    return noise.grad_sqnorm, noise.grad_variance


def test_meters_on_the_stages_of_a_pipeline_add_up_to_the_models_noise(ranks):
    model = network()
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        for x, y in map(samples, range(2))
        for loss in map(cross_entropy, map(model, x.split(N // K)), y.split(N // K))
    ]
    answer = oracle.mean(torch.stack(rows), [N // K] * 2 * K)
    of_ranks = ranks(4)(measured_in_a_pipe)
    assert of_ranks[0] == of_ranks[2]  # one stage
    assert of_ranks[1] == of_ranks[3]
    signal, noise = (sum(pair) for pair in zip(*of_ranks[:2], strict=True))
    assert pytest.approx(answer.grad_sqnorm, rel=1e-9) == signal
    assert pytest.approx(answer.grad_variance, rel=1e-9) == noise


def mistaken_in_a_pipe(rank, ranks):
    """What a schedule does to gradients after its backwards; and a loop that has no backward."""
    model, step = piped(rank, scaled=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        meter = bb.GradientMeter(model, loss="mean")
    step()
    with pytest.raises(GradientError, match="was changed"):
        meter.read([N // K] * K)
    meter.close()
    model, step = piped(rank, scaled=True)
    loader = [samples(rank)] * 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train = bb.AdaptiveBatch(model, optimizer, loader, policy=bb.Fixed(2 * N), micro_batch=N // 2)
    micro_batches = iter(next(iter(train)))
    next(micro_batches)
    step()
    with pytest.raises(LoopError, match=r"left without step\.backward"):
        next(micro_batches)
    return [str(w.message) for w in caught if "pipeline parallelism" in str(w.message)]


def test_a_loop_around_a_pipelines_schedule_is_refused_and_the_pipeline_is_named(ranks):
    assert [1, 1, 0, 0] == [len(said) for said in ranks(4)(mistaken_in_a_pipe)]


def test_nothing_is_said_where_all_ranks_share_the_model(ranks):
    for said in ranks(2)(said_by_all):
        assert [] == said


def said_by_all(rank, ranks):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(rank, ranks, "ddp", None)
        build(rank, ranks, "fsdp2", None)
    return [str(w.message) for w in caught if "shared by" in str(w.message)]
