"""Second moments of sharded gradients: from the reduced shards, nothing sent."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from bigbatch.gradients.fsdp2 import ShardedSource
from bigbatch.statistics.second_moment import GradientMoments
from oracles import noise as oracle
from training_on_ranks import batch, network, sharded

K, N = 5, 6


def moments(rank, ranks, hybrid):
    """This rank's shards of mean and second moment after each of two steps."""
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("a", "b")) if hybrid else None
    model = sharded(network(), mesh=mesh)
    source, seen = ShardedSource(model.parameters()), GradientMoments()
    source.subscribe(seen)
    steps = []
    for step in range(2):
        for number in range(K):
            x, y = batch(rank, step, number, N)
            (cross_entropy(model(x), y) / K).backward()
        assert K == source.micro_batches
        moments = zip(*seen.sums_and_m2s([*model.parameters()], source.sums_of), strict=True)
        steps.append([(total / seen.weight, m2 / seen.weight) for total, m2 in moments])
        model.zero_grad()
        source.restart()
    places = [(p.device_mesh.get_coordinate(), p.placements) for p in model.parameters()]
    return steps, places


def gradients(ranks, step, exact):
    """For each parameter the K gradients of all ranks together, in float64."""
    of_steps = []
    for number in range(K):
        drawn = [batch(rank, step, number, N) for rank in range(ranks)]
        x, y = torch.cat([x for x, _ in drawn]), torch.cat([y for _, y in drawn])
        of_steps.append(
            torch.autograd.grad(cross_entropy(exact(x.double()), y) / K, list(exact.parameters()))
        )
    return [torch.stack(of_parameter) for of_parameter in zip(*of_steps, strict=True)]


def chunk(whole, ranks, coordinate, hybrid):
    """As torch.chunk cuts the first dimension over the ranks that share it."""
    shards, local = (ranks // 2, coordinate[1]) if hybrid else (ranks, coordinate[0])
    chunks = whole.chunk(shards)
    return chunks[local] if local < len(chunks) else whole[:0]


@pytest.mark.parametrize(("count", "hybrid"), [(2, False), (3, False), (4, False), (4, True)])
def test_reduced_shards_have_the_moments_of_one_process(ranks, count, hybrid):
    exact = copy.deepcopy(network()).double()
    for steps, places in ranks(count)(moments, hybrid):
        for step, of_parameters in enumerate(steps):
            for whole, (mean, s2), (coordinate, _) in zip(
                gradients(count, step, exact), of_parameters, places, strict=True
            ):
                g, expected = oracle.second_moment(whole, [1.0] * K)
                # float32 sums of K gradients; S_j - S_{j-1} loses one digit more
                torch.testing.assert_close(
                    chunk(g, count, coordinate, hybrid).float(), mean, rtol=1e-4, atol=1e-7
                )
                torch.testing.assert_close(
                    chunk(expected, count, coordinate, hybrid).float(), s2, rtol=1e-3, atol=1e-9
                )
