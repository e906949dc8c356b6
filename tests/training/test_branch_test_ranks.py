"""Branch tests on real ranks: one result, that of one process, and no trace."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import bigbatch as bb
from bigbatch.errors import SettingError
from numbered_samples import build, each_step, ledger_loader, whole

pytestmark = pytest.mark.filterwarnings("ignore:.*one step's noise scale")


def trained(rank, ranks, engine, tests, policy=None):
    """Results of branch tests, and what the training did."""
    policy = bb.SimiGrad(target=0.3, min_batch=16, max_batch=32) if policy is None else policy
    train = build(
        rank,
        ranks,
        engine,
        ranks,
        loader=ledger_loader(rank, ranks, samples=1500),
        policy=policy,
        batch_size=24,
        min_micro_batches=2 * ranks,
    )
    train.optimizer.param_groups[0]["momentum"] = 0.5
    results, seen = [], []
    for number, (numbers, record) in enumerate(each_step(train)):
        seen.append((numbers, record.loss, record.batch_size, record.decision.batch_size))
        if tests and number in (3, 6):
            sizes = [12, 24, 48]
            settings = {"samples": 96, "repeats": 2, "held_aside": 48}
            results.append(train.branch_test(mean_loss(train), sizes, **settings))
        if number == 20:
            break
    return results, seen, [whole(p) for p in train.model.parameters()], train.state_dict()["shared"]


def mean_loss(train):
    """Of class weights, so that the ranks' micro-batches weigh differently."""
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    return lambda batch: cross_entropy(train.model(batch[0]), batch[1], weight=weight)


def without_times(shared):
    seconds = ("interval", "step_times")
    return {name: value for name, value in shared.items() if name not in seconds}


@pytest.mark.parametrize(
    ("engine", "count"), [("ddp", 2), ("fsdp2", 2), ("ddp", 3), ("ddp-static", 2)]
)
def test_every_rank_has_the_result_of_one_process_and_trains_on_as_without(ranks, engine, count):
    plain = ranks(count)(trained, engine, False)
    tested = ranks(count)(trained, engine, True)
    for before, after in zip(plain, tested, strict=True):
        assert before[1] == after[1]
        assert all(map(torch.equal, before[2], after[2]))
        assert without_times(before[3]) == without_times(after[3])
    results = tested[0][0]
    assert [results] * count == [answer[0] for answer in tested]
    # min_micro_batches cuts otherwise, but the batches and decisions of three steps are the same
    expected = trained(0, 1, "plain", True, bb.Fixed(24))[0]
    actual = ranks(count)(trained, engine, True, bb.Fixed(24))[0][0]
    for one, other in zip(expected, actual, strict=True):
        # float64; sums over ranks in another order
        assert pytest.approx(one.first_losses, rel=1e-9) == other.first_losses
        for first, second in zip(one.losses, other.losses, strict=True):
            assert pytest.approx(first, rel=1e-9) == second
        assert one.samples_spent == other.samples_spent


def refused(rank, ranks):
    train = build(rank, ranks, "ddp", ranks)
    next(each_step(train))
    with pytest.raises(SettingError) as error:
        train.branch_test(mean_loss(train), [16, 33])
    return str(error.value)


def test_batches_that_ranks_cannot_share_evenly_are_refused(ranks):
    for message in ranks(2)(refused):
        assert "33 samples cannot be shared evenly by 2 ranks; pass multiples of 2, 32" in message


def failing(rank, ranks, engine):
    """Every rank's loss fails in the middle of a branch; the training continues as without."""
    runs = []
    for fails in (False, True):
        train = build(rank, ranks, engine, ranks, policy=bb.Fixed(24), batch_size=24)
        train.optimizer.param_groups[0]["momentum"] = 0.0
        losses = []
        for number, (_, record) in enumerate(each_step(train)):
            losses.append(record.loss)
            if fails and number == 3:
                calls = []

                def fail(batch, train=train, calls=calls):
                    calls.append(1)
                    if len(calls) == 7:
                        raise ZeroDivisionError
                    return mean_loss(train)(batch)

                with pytest.raises(ZeroDivisionError):
                    train.branch_test(fail, [12, 24], samples=48, repeats=2)
            if number == 8:
                break
        runs.append((losses, [whole(p) for p in train.model.parameters()]))
    return runs


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_after_an_error_on_all_ranks_training_continues_as_without(ranks, engine):
    for plain, failed in ranks(2)(failing, engine):
        assert plain[0] == failed[0]
        assert all(map(torch.equal, plain[1], failed[1]))
