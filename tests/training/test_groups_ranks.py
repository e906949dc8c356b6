"""AdaptiveBatch(groups=k) on real ranks: its groups are those of one process."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.gradients import SingleProcessSource
from numbered_samples import Numbered, ledger_loader, network, steps_of, whole, wrapped
from optimizer_table import MAKE, VR

pytestmark = [pytest.mark.filterwarnings("ignore:k = :UserWarning")]

GROUPS, BATCH, STEPS = 4, 48, 3


def optimizer_of(model, vr):
    parameters = model.parameters()
    return MAKE[vr](parameters) if vr else torch.optim.SGD(parameters, lr=0.1)


def trained(rank, ranks, engine, vr=None):
    """Samples of each backward, records and weights of a few steps."""
    model = wrapped(engine, ranks)
    train = bb.AdaptiveBatch(
        model,
        optimizer_of(model, vr),
        bb.Batches(ledger_loader(rank, ranks, size=BATCH)),
        policy=bb.Fixed(BATCH),
        min_micro_batches=2 * ranks if vr else None,
        lr_scaling=None,
        groups=GROUPS,
        every=1,
    )
    done = steps_of(train, 1, STEPS)
    weights = [whole(p) for p in model.parameters()]
    return [numbers for numbers, _ in done], [record for _, record in done], weights


def groups_of(answers):
    """The groups of each step, over all ranks."""
    for of_ranks in zip(*(answer[0] for answer in answers), strict=True):
        backwards = [numbers for rank in of_ranks for numbers in rank]
        yield [
            part.tolist()
            for numbers in backwards
            for part in torch.tensor(numbers).tensor_split(GROUPS)
        ]


def by_micro_batches(steps, vr):
    """Statistics and weights of one process with a backward for each group."""
    model, data = network(), Numbered()
    optimizer = optimizer_of(model, vr)
    source = SingleProcessSource(model.parameters())
    if vr:
        optimizer.bind(source)
    meter = None if vr else bb.GradientMeter(model, source=source)
    found = []
    for step in steps:
        sizes = [len(group) for group in step]
        for group, n in zip(step, sizes, strict=True):
            (cross_entropy(model(data.x[group]), data.y[group]) * n / sum(sizes)).backward()
        if meter is not None:
            found.append(meter.read(sizes))
        optimizer.step()
        source.zero_grad()
    return found, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("engine", "count"), [("plain", 1), ("ddp", 2), ("fsdp2", 2), ("ddp", 3)])
def test_groups_of_ranks_are_micro_batches_of_one_process(ranks, engine, count):
    answers = [trained(0, 1, engine)] if count == 1 else ranks(count)(trained, engine)
    steps = list(groups_of(answers))
    assert [GROUPS * count] * STEPS == [len(step) for step in steps]
    statistics, weights = by_micro_batches(steps, vr=None)
    for _, records, theirs in answers:
        for expected, record in zip(statistics, records, strict=True):
            assert (BATCH, count) == (record.batch_size, record.micro_batches)
            assert GROUPS * count == record.statistics.micro_batches
            # float64, and no parameter is large enough to be projected
            assert (
                pytest.approx(expected.grad_variance, rel=1e-9) == record.statistics.grad_variance
            )
            assert pytest.approx(expected.similarity, abs=1e-9) == record.similarity
        torch.testing.assert_close(weights, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("engine", "count"), [("plain", 1), ("ddp", 2)])
@pytest.mark.parametrize("name", VR)
def test_gsnr_compares_the_groups(ranks, name, engine, count):
    answers = [trained(0, 1, engine, name)] if count == 1 else ranks(count)(trained, engine, name)
    steps = list(groups_of(answers))
    _, weights = by_micro_batches(steps, vr=name)
    for _, _, theirs in answers:
        torch.testing.assert_close(weights, theirs, rtol=1e-8, atol=1e-10)


def refusal(rank, ranks):
    with pytest.raises(SettingError) as refused:
        trained(rank, ranks, "fsdp2", vr="VRSGD")
    return str(refused.value)


def test_vr_under_fully_shard_is_refused(ranks):
    for message in ranks(2)(refusal):
        assert message.startswith("groups=4: under fully_shard a variance-reduced optimizer")
        assert message.endswith("leave groups out")
