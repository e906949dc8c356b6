"""Faults of whole runs: checkpoints of others, worlds of one, calls left out."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.functional import cross_entropy

import bigbatch as bb
from bigbatch.errors import LoopError, SettingError
from bigbatch.optim import VarianceReduced
from numbered_samples import Shard, build, network, run, steps_of
from tensors import same

# checkpoints of others


def everything(train):
    model, optimizer = get_state_dict(train.model, train.optimizer)
    return {"model": model, "optimizer": optimizer, "train": bb.DistributedState(train)}


def test_a_checkpoint_without_our_state_says_so_or_starts_the_loop_again(tmp_path):
    theirs = everything(build(0, 1, "plain", 4))
    del theirs["train"]
    dcp.save(theirs, checkpoint_id=tmp_path)
    train = build(0, 1, "plain", 4)
    with pytest.raises(CheckpointException, match=r"Missing key .* train\.ranks"):
        dcp.load(everything(train), checkpoint_id=tmp_path)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(everything(train), checkpoint_id=tmp_path, planner=planner)
    expected = steps_of(build(0, 1, "plain", 4), 1, 3)
    assert [numbers for numbers, _ in expected] == [numbers for numbers, _ in steps_of(train, 1, 3)]


def test_asking_for_a_checkpoint_steps_the_optimizer_behind_our_back_and_changes_nothing():
    """torch makes an optimizer's first state by a step of zeros at rate 0."""
    plain, asked = build(0, 1, "plain", 4), build(0, 1, "plain", 4)
    everything(asked)["train"].state_dict()
    for one, other in zip(steps_of(plain, 1, 5), steps_of(asked, 1, 5), strict=True):
        assert one[0] == other[0]
        assert (one[1].loss, one[1].statistics) == (other[1].loss, other[1].statistics)
    assert same(plain.model, asked.model)


def test_asking_for_it_inside_the_first_step_is_refused():
    train = build(0, 1, "plain", 4)
    step = next(iter(train))
    for x, y, _ in step:
        step.backward(cross_entropy(train.model(x), y))
    with pytest.raises(LoopError, match="was not called for the last step"):
        everything(train)["train"].state_dict()


# worlds of one rank, ranks without samples


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_world_of_one_rank_trains_as_one_process(ranks, engine):
    _, records, weights = run(0, 1, "plain", 4, 12)
    ((_, theirs, other),) = ranks(1)(run, engine, 4, 12)
    assert [r.batch_size for r in records] == [r.batch_size for r in theirs]
    torch.testing.assert_close(weights, other, rtol=1e-12, atol=1e-14)


def without_samples(rank, ranks, engine):
    """Rank 1 has none; the others must not wait for it."""
    loader = torch.utils.data.DataLoader(Shard(0 if rank == 1 else 100), 8)
    train = build(rank, ranks, engine, None, loader, policy=bb.Fixed(36), batch_size=36)
    with pytest.raises(LoopError, match="the loader gave no step"):
        steps_of(train, 1)


def without_known_samples(rank, ranks, engine):
    data = torch.utils.data.TensorDataset(torch.randn(0 if rank == 1 else 100, 5).double())
    loader = torch.utils.data.DataLoader(data, 8)
    with pytest.raises(bb.BigbatchError, match=r"no sample|gave no step|0 samples") as caught:
        steps_of(build(rank, ranks, engine, None, loader, policy=bb.Fixed(36), batch_size=36), 1)
    return str(caught.value)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_rank_without_samples_ends_the_pass_on_all_and_it_is_said(ranks, engine):
    ranks(2)(without_samples, engine)
    first, second = ranks(2)(without_known_samples, engine)
    assert first == second


# calls left out, or made twice


def test_a_loop_that_never_updates_and_one_that_updates_twice_raise():
    train = build(0, 1, "plain", 4)
    steps = iter(train)
    step = next(steps)
    for x, y, _ in step:
        step.backward(cross_entropy(train.model(x), y))
    with pytest.raises(LoopError, match=r"step\.update\(\) was not called"):
        next(steps)
    train = build(0, 1, "plain", 4)
    step = next(iter(train))
    for x, y, _ in step:
        step.backward(cross_entropy(train.model(x), y))
    step.update()
    with pytest.raises(LoopError, match=r"after step\.update"):
        step.update()


def test_two_loops_over_one_optimizer_set_its_rate_one_after_the_other():
    """The rate is multiplied around the step alone, so a second loop finds what the user set."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rates = []
    for _ in range(2):
        loader = build(0, 1, "plain", 4).batches
        train = bb.AdaptiveBatch(
            model, optimizer, loader, policy=bb.Fixed(64), base_batch=16, micro_batch=12, every=1
        )
        rates += [record.lr for _, record in steps_of(train, 1, 2)]
    assert [(0.1,)] * 4 == rates
    assert 0.05 == optimizer.param_groups[0]["lr"]


class Wrapped(torch.optim.Optimizer):
    """As opacus': an optimizer by class alone, whose `step` does more."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


def test_a_wrapper_of_an_optimizer_is_refused_and_no_remedy_drops_what_it_does():
    model = network()
    wrapped = Wrapped(torch.optim.SGD(model.parameters(), lr=0.05))
    with pytest.raises(
        SettingError, match=r"Wrapped is a wrapper .* than those that r scales; wrap an"
    ):
        VarianceReduced(wrapped)
    no_optimizer = SimpleNamespace(optimizer=wrapped.optimizer)
    with pytest.raises(SettingError, match=r"=<SimpleNamespace> must be an Optimizer$"):
        VarianceReduced(no_optimizer)
    with pytest.raises(SettingError, match=r"Wrapped is a wrapper .* would lose what it adds"):
        bb.AdaptiveBatch(
            model,
            wrapped,
            [(torch.randn(16, 5).double(), torch.zeros(16).long())],
            policy=bb.Fixed(16),
            micro_batch=4,
            every=1,
        )
