"""Clusters on real processes: each rank has whole ones, and all read one process's numbers."""

from functools import partial

import pytest
import torch

from bigbatch import AdaptiveBatch, Fixed, GradientMeter
from bigbatch.errors import GradientError, SettingError
from oracles import noise as oracle
from training_on_ranks import ENGINES, accumulate, gradients, network, train

SIZES = [[4, 6, 2, 4], [5, 3, 3, 5]]  # two clusters of two parts on each rank
MORE = [[4, 2, 3, 3], [1, 11]]  # another number of clusters on each rank


def measured(rank, ranks, *, engine, sizes):
    return train(rank, ranks, ENGINES[engine](network(), ranks), sizes, steps=1, cluster_parts=2)


@pytest.mark.parametrize(
    ("engine", "sizes"), [("ddp", SIZES), ("fsdp2", SIZES), ("hsdp", SIZES), ("ddp", MORE)], ids=str
)
def test_clusters_of_ranks_are_those_of_one_process(ranks, engine, sizes):
    results = ranks(2)(partial(measured, engine=engine, sizes=sizes))
    rows, flat = gradients(network(), 0, sizes), [n for local in sizes for n in local]
    expected = oracle.nested(rows, flat, 2)
    for ((statistics),) in results:
        nested = statistics.nested
        found = [nested.grad_sqnorm, nested.between, nested.within]
        assert expected == pytest.approx(found, rel=1e-4)
        assert (len(flat) // 2, "clusters") == (statistics.micro_batches, statistics.compared)


def odd(rank, ranks):
    model = ENGINES["ddp"](network(), ranks)
    sizes = [[4, 4], [4, 2, 2]]
    with GradientMeter(model, cluster_parts=2) as meter:
        accumulate(model, rank, 0, sizes)
        try:
            meter.read(sizes[rank])
        except GradientError as error:
            return str(error)


def test_a_rank_with_half_a_cluster_is_named_on_all(ranks):
    first, second = ranks(2)(odd)
    assert "rank 1 could not read its step" in first
    assert "no whole clusters of cluster_parts=2" in second


def test_adaptive_batch_refuses_clusters():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = GradientMeter(model, cluster_parts=2)
    with pytest.raises(SettingError, match="no parts of clusters"):
        AdaptiveBatch(model, optimizer, [], policy=Fixed(8), meter=meter, batch_size=8)
