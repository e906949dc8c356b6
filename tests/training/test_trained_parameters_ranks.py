"""On ranks: what is measured is what the optimizer trains, and what it trains is the model's."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import bigbatch as bb
from bigbatch.errors import GradientError
from bigbatch.optim import VRSGD
from numbered_samples import ledger_loader, whole, wrapped

ENGINES = [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)]
engines = pytest.mark.parametrize(("engine", "count"), ENGINES)
kinds = pytest.mark.parametrize("kind", [torch.optim.SGD, VRSGD])


def loop(rank, ranks, engine, kind, parameters):
    model = wrapped(engine, ranks)
    batches = bb.Batches(ledger_loader(rank, ranks), virtual_ranks=4)
    settings = {"policy": bb.Fixed(64), "micro_batch": 8, "min_micro_batches": 8}
    return bb.AdaptiveBatch(
        model, kind(parameters(model), lr=0.1), batches, **{"every": 1, **settings}
    )


def head(model):
    inner = getattr(model, "module", model)
    return inner[-1].parameters()


def spoil(parameter):
    parameter.grad.mul_(torch.nan)


def of_the_head(rank, ranks, engine, kind, steps):
    train = loop(rank, ranks, engine, kind, head)
    if engine != "plain":
        next(train.model.parameters()).register_post_accumulate_grad_hook(spoil)
    seen = []
    for step in train:
        for x, y, _ in step:
            step.backward(cross_entropy(train.model(x), y))
        seen.append(step.update())
        assert all(p.grad is None for p in train.model.parameters())
        if len(seen) == steps:
            break
    return seen, [whole(p) for p in train.model.parameters()]


@engines
@kinds
@pytest.mark.filterwarnings("ignore:k = ")
def test_only_what_the_optimizer_trains_is_measured_on_ranks(ranks, engine, count, kind):
    steps = 3 if kind is torch.optim.SGD else 1  # r compares other micro-batches under fully_shard
    alone = of_the_head(0, 1, "plain", kind, steps)
    for records, weights in ranks(count)(of_the_head, engine, kind, steps):
        for expected, actual in zip(alone[0], records, strict=True):
            assert not actual.skipped
            # float64: only the order of the sums differs
            assert (
                pytest.approx(expected.statistics.grad_sqnorm, rel=1e-8, abs=1e-12)
                == actual.statistics.grad_sqnorm
            )
            assert (
                pytest.approx(expected.statistics.grad_variance, rel=1e-8, abs=1e-12)
                == actual.statistics.grad_variance
            )
        if steps > 1:
            torch.testing.assert_close(alone[1], weights, rtol=1e-8, atol=1e-10)


def replaced(rank, ranks, engine, kind, how):
    train = loop(rank, ranks, engine, kind, lambda model: model.parameters())
    steps = iter(train)
    inner = getattr(train.model, "module", train.model)

    def one_step():
        step = next(steps)
        for x, y, _ in step:
            step.backward(cross_entropy(train.model(x), y))
        step.update()

    one_step()
    with torch.no_grad():  # an evaluation leaves FSDP2's root with whole parameters
        train.model(torch.zeros(2, 5, dtype=torch.float64))
    one_step()  # and is no replacement
    if how == "assigned":
        inner.load_state_dict(copy.deepcopy(inner.state_dict()), assign=True)
    else:
        inner[2] = nn.Linear(8, 3).double()
    done = train.steps
    with pytest.raises(GradientError) as error:
        one_step()
    assert done == train.steps
    return str(error.value)


@engines
@kinds
@pytest.mark.parametrize("how", ["assigned", "layer"])
@pytest.mark.filterwarnings("ignore:k = ")
def test_a_parameter_that_was_replaced_is_an_error_on_every_rank(ranks, engine, count, kind, how):
    for message in ranks(count)(replaced, engine, kind, how):
        assert "not the model's any more" in message
