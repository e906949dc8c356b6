"""AdaptiveBatch with several optimizers on real ranks: the steps of one process."""

import copy
from itertools import chain

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR

import bigbatch as bb
from bigbatch.optim import VarianceReduced
from numbered_samples import ledger_loader, network, steps_of, trained_by_groups, whole, wrapped
from optimizer_container import Container
from single_steps import by_single_steps

pytestmark = [pytest.mark.filterwarnings("ignore:k = :UserWarning")]

UPDATES = 8
MATRICES = {
    "SGD": lambda matrices: SGD(matrices, lr=0.05, momentum=0.9),
    "Muon": lambda matrices: Muon(matrices, lr=0.02),
}
# of the way of the weights; Muon multiplies matrices in bfloat16, sharded ones in several sums
CLOSE = {"SGD": 1e-9, "Muon": 0.1}


def composite(model, name):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return bb.Composite(MATRICES[name](matrices), AdamW(others, lr=0.01))


def build(rank, ranks, engine, name, *, reduced=False):
    model = wrapped(engine, ranks)
    optimizer = composite(model, name)
    if reduced:
        optimizer = VarianceReduced(optimizer)
    settings = {
        "policy": bb.SimiGrad(target=0.3, min_batch=32, max_batch=300),
        "batch_size": 64,
        "micro_batch": 12,
        "every": 1,
    }
    return bb.AdaptiveBatch(
        model,
        optimizer,
        bb.Batches(ledger_loader(rank, ranks), virtual_ranks=4),
        scheduler=LambdaLR(optimizer, lambda tick: 0.98**tick),
        **by_single_steps(settings),
    )


def answer(train, updates=UPDATES):
    records = [record for _, record in steps_of(train, 10**9, updates)]
    sizes = [(r.batch_size, r.lr) for r in records]
    return sizes, [whole(p) for p in train.model.parameters()]


def run(rank, ranks, engine, name, reduced):
    return answer(build(rank, ranks, engine, name, reduced=reduced))


def apart(one, other):
    """Distance of two trainings over the way of the first."""
    way = sum((a - b).square().sum() for a, b in zip(one, network().parameters(), strict=True))
    off = sum((a - b).square().sum() for a, b in zip(one, other, strict=True))
    return (off / way).sqrt().item()


@pytest.mark.early
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(("engine", "reduced"), [("ddp", False), ("fsdp2", False), ("ddp", True)])
def test_two_ranks_train_as_one_process(ranks, engine, reduced, name):
    sizes, weights = run(0, 1, "plain", name, reduced)
    assert len({size for size, _ in sizes}) > 2
    answers = ranks(2)(run, engine, name, reduced)
    for their_sizes, their_weights in answers:
        assert [size for size, _ in sizes] == [size for size, _ in their_sizes]
        for (_, lr), (_, theirs) in zip(sizes, their_sizes, strict=True):
            assert pytest.approx(lr, rel=1e-9) == theirs
        assert apart(weights, their_weights) < CLOSE[name]
    assert all(map(torch.equal, answers[0][1], answers[1][1]))


def saved_and_resumed(rank, ranks, engine, name, reduced):
    """The rest of a training, and the same after a way through torch's distributed states."""
    train = build(rank, ranks, engine, name, reduced=reduced)
    steps_of(train, 10**9, UPDATES)
    if reduced and train.optimizer.attached:
        train.optimizer.attached.consolidate()
    states = copy.deepcopy([*get_state_dict(train.model, train.optimizer), train.state_dict()])
    expected = answer(train, 5)
    other = build(rank, ranks, engine, name, reduced=reduced)
    model, optimizer, loop = states
    set_state_dict(other.model, other.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    other.load_state_dict(loop)
    return expected, answer(other, 5)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(("engine", "reduced"), [("ddp", False), ("fsdp2", False), ("ddp", True)])
def test_a_training_resumes_exactly(ranks, engine, reduced, name):
    for expected, actual in ranks(2)(saved_and_resumed, engine, name, reduced):
        assert expected[0] == actual[0]
        assert all(map(torch.equal, expected[1], actual[1]))


def contained(rank, ranks, engine, kind):
    """AdamW and a schedule for each part of the model, as torchtitan trains."""
    model = wrapped(engine, ranks)
    first, last = (AdamW(model[i].parameters(), lr=lr) for i, lr in ((0, 0.02), (2, 0.01)))
    optimizer = bb.Composite(first, last)
    if kind == "container":
        optimizer = Container([first, last], model.parameters())
    train = bb.AdaptiveBatch(
        model,
        optimizer,
        bb.Batches(ledger_loader(rank, ranks), virtual_ranks=4),
        scheduler=[LambdaLR(part, lambda tick: 0.98**tick) for part in (first, last)],
        policy=bb.Fixed(96),
        micro_batch=12,
        every=1,
    )
    return answer(train, 6)


def test_a_container_on_fully_sharded_ranks_trains_as_one_process(ranks):
    rates, weights = contained(0, 1, "plain", "composite")
    for their_rates, theirs in ranks(2)(contained, "fsdp2", "container"):
        assert rates == their_rates
        torch.testing.assert_close(weights, theirs, rtol=1e-9, atol=1e-11)


# fully_shard: micro-batch j of all ranks is one observation


def grouped(rank, ranks):
    """The samples of each micro-batch and step on this rank, and the weights."""
    model = wrapped("fsdp2", ranks)
    train = bb.AdaptiveBatch(
        model,
        VarianceReduced(composite(model, "SGD"), gamma=0.3, beta3=0.9),
        bb.Batches(ledger_loader(rank, ranks), virtual_ranks=4),
        policy=bb.Fixed(192),
        micro_batch=12,
        every=1,
    )
    done = steps_of(train, 10**9, 4)
    return [numbers for numbers, _ in done], [whole(p) for p in model.parameters()]


def by_groups(steps, **options):
    """One process that compares the given groups of samples."""
    return trained_by_groups(lambda m: VarianceReduced(composite(m, "SGD"), **options), steps)


def test_gsnr_scales_the_shards_of_all_optimizers(ranks):
    answers = ranks(2)(grouped)
    of_ranks = zip(*(numbers for numbers, _ in answers), strict=True)
    steps = [[list(chain(*together)) for together in zip(*step, strict=True)] for step in of_ranks]
    expected = by_groups(steps, gamma=0.3, beta3=0.9)
    assert apart(expected, answers[0][1]) < 1e-8
    assert apart(expected, by_groups(steps, gamma=1.0)) > 0.1
