"""What other ways of measuring send: small re-creations, written from their descriptions."""

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
    """The original's collectives after a backward that reduced nothing; even numbers of ranks.

    Each half of the ranks, by parity, averages its gradients; rank 1 sends its half's to rank 0,
    which takes the cosine and tells everybody; then all ranks average.

    Source:
        Qin et al., NeurIPS 2021, and the authors' code: `backward` at its accumulation boundary.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    halves: list[Any] = [dist.new_group(list(range(parity, ranks, 2))) for parity in (0, 1)]
    # on every rank as many groups: torch numbers some by how many there are on a rank
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
    """All-reduces of g and g^2 in DDP's buckets, and r of every layer from them, by torch.

    Source:
        Jiang et al. 2023 (arXiv 2309.13681), algorithm 1 and equations 7 to 9.
    """
    squares: dict[Tensor, Tensor] = {}
    ranks = dist.get_world_size()

    def hook(_: None, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        whole = bucket.buffer().div_(ranks)
        square = whole.square().mul_(ranks)
        works = [dist.all_reduce(x, async_op=True).get_future() for x in (whole, square)]
        start = whole.storage_offset()
        for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True):
            place = g.storage_offset() - start
            squares[p] = square[place : place + g.numel()].view_as(p)
        return torch.futures.collect_all(works).then(lambda _: whole)

    model.register_comm_hook(None, hook)

    @torch.no_grad()
    def finish() -> None:
        for p, square in squares.items():
            assert p.grad is not None
            s2 = (square - p.grad.square()).clamp_min_(torch.finfo(square.dtype).tiny)
            r = p.grad.square().div_(s2)
            p.grad.mul_(r.div_(r.mean()).clamp_(_GAMMA, 1.0))

    return finish


def two_levels(model: DistributedDataParallel, node: Any, across: Any) -> None:
    """An all-reduce that crosses between nodes with one part a rank: the baseline there.

    Args:
        model: whose gradients.
        node: the ranks of this node.
        across: those of its place on every node.
    """
    inside, ranks = dist.get_world_size(node), dist.get_world_size()

    def hook(_: None, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        whole = bucket.buffer().div_(ranks)
        lacks = -len(whole) % inside
        parts = torch.cat([whole, whole.new_zeros(lacks)])
        rows = torch.empty_like(parts)
        dist.all_to_all_single(rows, parts, group=node)
        shard = rows.view(inside, -1).sum(0)
        dist.all_reduce(shard, group=across)
        gather = getattr(_c10d, "all_gather_single", None) or _c10d.all_gather_into_tensor
        gather(parts, shard, group=node)
        future: Future[Tensor] = Future()
        future.set_result(whole.copy_(parts[: len(whole)]))
        return future

    model.register_comm_hook(None, hook)
