"""What a source says of a rank's shard is what lies in it, whichever engine cuts the gradient."""

from functools import partial

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy

from bigbatch.gradients import find_source
from bigbatch.optim import VRSGD
from training_on_ranks import batch, ddp, fsdp2, hsdp, network, synchronized

COUNT = 30  # elements asked for; the network's weights have 60, 84 and 21


def attached(model, ranks):
    wrapped = ddp(bucket_cap_mb=0.0002)(model, ranks)  # 200 bytes: a bucket for nearly each weight
    VRSGD(wrapped.parameters(), lr=0.0).attach(wrapped)
    return wrapped


def by_columns(parameter):
    """Where they go up evenly in the ranks, which FSDP asks for: 12 columns of one weight."""
    return Shard(1) if parameter.shape == (7, 12) else None


ENGINES = {
    "ddp": ddp(),
    "attached": attached,
    "fsdp2": fsdp2(),
    "fsdp2 by columns": fsdp2(shard_placement_fn=by_columns),
    "hsdp": hsdp(),
}


def held_and_found(rank, ranks, *, engine):
    """For each parameter what the source says, and what a numbered array says the slow way."""
    model = ENGINES[engine](network(), ranks)
    source = find_source(model)
    for number in range(2):
        x, y = batch(rank, 0, number, 6)
        with synchronized(model, number == 1):
            cross_entropy(model(x), y).backward()
    pairs = []
    for parameter in source.parameters:
        shape = source.reducer.shape(parameter)
        count = min(COUNT, shape.numel())
        indices = source.reducer.shards.shard_indices(parameter, count)
        places, numbers = indices or (torch.arange(count), torch.arange(count))
        said = dict(zip(places.tolist(), numbers.tolist(), strict=True))
        whole = torch.arange(shape.numel()).view(shape)
        shard = source.reducer.shards.shard(parameter, whole).reshape(-1)
        assert source.local_grad(parameter) is None or source.local_grad(parameter).numel() == len(
            shard
        )
        found = {place: n for place, n in enumerate(shard.tolist()) if n < COUNT}
        pairs.append((said, found))
    return pairs


@pytest.mark.parametrize(
    ("engine", "count"),
    [
        (engine, count)
        for engine in ENGINES
        for count in (2, 3, 4)
        if engine != "hsdp" or count == 4
    ],
)
def test_a_rank_holds_what_a_numbered_gradient_says(ranks, engine, count):
    counts = []
    for pairs in ranks(count)(partial(held_and_found, engine=engine)):
        for said, found in pairs:
            assert found == said
            counts.append(len(said))
    assert any(counts)  # somebody has the first elements
