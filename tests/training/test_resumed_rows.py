"""What a resumed run on DDP ranks records, and one that was never stopped."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import bigbatch as bb
from numbered_samples import SEED, ledger_loader
from optimizer_table import MAKE

MAKE = MAKE | {"SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)}
STEPS, STOP = 5, 2


def network():
    torch.manual_seed(SEED)
    layers = [nn.Linear(5, 301), nn.Tanh(), nn.Linear(301, 203), nn.Tanh(), nn.Linear(203, 3)]
    return nn.Sequential(*layers)  # a matrix that both ranks have a part of


def run(rank, ranks, name, options, states):
    """(loss, signal, noise) of each step, the state after STOP of them, the last weights."""
    model = DistributedDataParallel(network(), **options)
    optimizer = MAKE[name](model.parameters())
    loader = ledger_loader(rank, ranks)
    train = bb.AdaptiveBatch(model, optimizer, loader, policy=bb.Fixed(64), micro_batch=4, every=1)
    saved = None
    if states is not None:
        for part, state in zip((model, optimizer, train), states[rank], strict=True):
            part.load_state_dict(state)
    rows = []
    for step in train:
        for x, y, _ in step:
            step.backward(cross_entropy(model(x.float()), y))
        record = step.update()
        rows.append((record.loss, record.statistics.grad_sqnorm, record.statistics.grad_variance))
        if train.steps == STOP:
            if name != "SGD":
                optimizer.attached.consolidate()
            saved = copy.deepcopy([part.state_dict() for part in (model, optimizer, train)])
        if train.steps == STEPS:
            break
    return rows, saved, [p.detach().clone() for p in model.parameters()]


FIXED_BUCKETS = {"find_unused_parameters": True}  # DDP does not rebuild its buckets


@pytest.mark.parametrize(("name", "options"), [("SGD", {}), ("VRSGD", FIXED_BUCKETS)])
def test_a_resumed_run_on_ranks_is_the_same_run(ranks, name, options):
    uninterrupted = ranks(2)(run, name, options, None)
    resumed = ranks(2)(run, name, options, [saved for _, saved, _ in uninterrupted])
    for (rows, _, weights), (resumed_rows, _, resumed_weights) in zip(
        uninterrupted, resumed, strict=True
    ):
        assert rows[STOP:] == resumed_rows
        assert all(map(torch.equal, weights, resumed_weights))


def test_where_ddp_rebuilds_its_buckets_a_variance_reduced_one_is_the_same_to_rounding(ranks):
    """A rank sums its chunks of the buckets, which are others in the first step of a process.

    With buckets that stay it is the same run to the last bit (above), so nothing else is the cause.
    """
    uninterrupted = ranks(2)(run, "VRSGD", {}, None)
    resumed = ranks(2)(run, "VRSGD", {}, [saved for _, saved, _ in uninterrupted])
    for (rows, _, weights), (resumed_rows, _, resumed_weights) in zip(
        uninterrupted, resumed, strict=True
    ):
        assert rows[STOP][0] == resumed_rows[0][0]  # the loss: it continued with the same weights
        for row, one in zip(rows[STOP:], resumed_rows, strict=True):
            assert pytest.approx(row, rel=1e-5) == one  # of sums in float32
        torch.testing.assert_close(weights, resumed_weights, rtol=1e-5, atol=1e-6)
