"""Small re-creations of SimiGrad's and VRGD's communication, written from their descriptions."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.functional import cosine_similarity
from torch.nn.parallel import DistributedDataParallel

_GAMMA = 0.1
_c10d: Any = dist


def simigrad(model: DistributedDataParallel) -> Callable[[], None]:
    """The original's collectives, to be called after a backward without reduction.

    The number of ranks must be even. Each half of the ranks, by parity, averages its gradients;
    rank 1 sends its half's mean to rank 0, which broadcasts the cosine; then all ranks average.

    Source:
        Qin et al., NeurIPS 2021, and the authors' code: `backward` at its accumulation boundary.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    halves: list[Any] = [dist.new_group(list(range(parity, ranks, 2))) for parity in (0, 1)]
    # every rank is in as many groups: torch numbers some groups by their count on a rank
    pairs: list[Any] = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]

    def finish() -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        half = flat.clone()
        dist.all_reduce(half, group=halves[rank % 2])
        if rank < 2:
            other = half if rank == 1 else torch.empty_like(half)
            dist.broadcast(other, 1, group=pairs[0])
        cosine = cosine_similarity(half, other, dim=0) if rank == 0 else torch.zeros(())
        dist.broadcast(cosine, 0)
        dist.all_reduce(flat)
        means = torch.split(flat.div_(ranks), [gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.view(-1).copy_(mean)

    return finish


def vrgd(model: DistributedDataParallel) -> Callable[[], None]:
    """All-reduces g and g^2 in DDP's buckets; the function it returns scales `.grad` by r.

    Source:
        Jiang et al. 2023 (arXiv 2309.13681), algorithm 1 and equations 7 to 9.
    """
    squares: dict[Tensor, Tensor] = {}
    ranks = dist.get_world_size()

    def hook(_: None, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        mean = bucket.buffer().div_(ranks)
        square = mean.square().mul_(ranks)
        futures = [dist.all_reduce(x, async_op=True).get_future() for x in (mean, square)]
        for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True):
            start = g.storage_offset() - mean.storage_offset()
            squares[p] = square[start : start + g.numel()].view_as(p)
        return torch.futures.collect_all(futures).then(lambda _: mean)

    model.register_comm_hook(None, hook)

    @torch.no_grad()
    def finish() -> None:
        for p, square in squares.items():
            assert p.grad is not None
            s2 = (square - p.grad.square()).clamp_min_(torch.finfo(square.dtype).tiny)
            r = p.grad.square().div_(s2)
            p.grad.mul_(r.div_(r.mean()).clamp_(_GAMMA, 1.0))

    return finish


def two_levels(model: DistributedDataParallel, node_group: Any, cross_group: Any) -> None:
    """All-reduces gradients in two levels: a rank sends one shard of its node's sum to other nodes.

    Args:
        model: the model whose gradients are reduced.
        node_group: the ranks of this node.
        cross_group: the ranks of the same local rank on every node.
    """
    node_size, ranks = dist.get_world_size(node_group), dist.get_world_size()

    def hook(_: None, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        mean = bucket.buffer().div_(ranks)
        padded = torch.cat([mean, mean.new_zeros(-len(mean) % node_size)])
        rows = torch.empty_like(padded)
        dist.all_to_all_single(rows, padded, group=node_group)
        shard = rows.view(node_size, -1).sum(0)
        dist.all_reduce(shard, group=cross_group)
        gather = getattr(_c10d, "all_gather_single", None) or _c10d.all_gather_into_tensor
        gather(padded, shard, group=node_group)
        future: Future[Tensor] = Future()
        future.set_result(mean.copy_(padded[: len(mean)]))
        return future

    model.register_comm_hook(None, hook)
