"""AdaptiveBatch with variance-reduced optimizers on real ranks: the steps of one process."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import bigbatch as bb
from bigbatch.errors import SettingError
from oracles import vr as oracle
from test_ranks_loop import ledger_loader, network, steps_of, together, whole, wrapped
from test_ranks_optimizers import MAKE, VR

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.filterwarnings("ignore:k = :UserWarning"),
]

every_vr_optimizer = pytest.mark.parametrize("name", VR)


def build(rank, ranks, engine, name, virtual_ranks=4, m2_dtype=torch.float64, **settings):
    model = wrapped(engine, ranks)
    optimizer = MAKE[name](model.parameters())
    if engine == "ddp" and m2_dtype is not None:
        optimizer.attach(model, m2_dtype=m2_dtype)
    batches = bb.Batches(ledger_loader(rank, ranks), virtual_ranks=virtual_ranks)
    settings = {
        "policy": bb.SimiGrad(target=0.3, min_batch=32, max_batch=300),
        "batch_size": 64,
        "micro_batch": 12,
    } | settings
    return bb.AdaptiveBatch(model, optimizer, batches, **settings)


def run(rank, ranks, engine, name, updates, clip=None):
    train = build(rank, ranks, engine, name)
    done = []
    for _ in train.epochs(10**9):
        for step in train:
            numbers = []
            for x, y, number in step:
                step.backward(cross_entropy(train.model(x), y))
                numbers.append(number.tolist())
            if clip is not None:
                step.clip_grad_norm_(clip)
            done.append((numbers, step.update()))
            if len(done) == updates:
                return (
                    [numbers for numbers, _ in done],
                    [record for _, record in done],
                    [whole(p) for p in train.model.parameters()],
                )
    raise AssertionError


@pytest.mark.parametrize("clip", [None, 0.3], ids=["", "clipped"])
@every_vr_optimizer
def test_a_loop_on_ddp_ranks_is_that_of_one_process(ranks, name, clip):
    alone = run(0, 1, "plain", name, 40, clip)
    assert len({record.batch_size for record in alone[1]}) > 5
    for count in (2, 4):
        answers = ranks(count)(run, "ddp", name, 40, clip)
        assert together([alone]) == together(answers)
        for _, records, weights in answers:
            for mine, theirs in zip(alone[1], records, strict=True):
                assert mine.batch_size == theirs.batch_size
                assert pytest.approx(mine.similarity, abs=1e-9) == theirs.similarity
            for mine, theirs in zip(alone[2], weights, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)
