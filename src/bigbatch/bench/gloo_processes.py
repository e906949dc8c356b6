"""Real processes on gloo for benches, whose groups all count what is sent."""

import gc
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch.bench import comm_bytes

Work = Callable[[int], Iterator[Any]]
Steps = Callable[[Callable[[nn.Module], nn.Module]], Iterator[None]]


def on_ranks(count: int, work: Work) -> Iterator[Any]:
    """What `work(0)` yields, while `work(rank)` runs in so many processes.

    Raises:
        RuntimeError: one of them failed.
    """
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    get = multiprocessing.get_context
    context = get("forkserver") if forks else get("spawn")
    results, ours = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_serve, args=(rank, count, Path(folder) / "store", ours, work), daemon=True
            )
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        ours.close()  # so that the end is seen
        try:
            yield from _received(results, processes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _received(results: Connection, processes: list[Any]) -> Iterator[Any]:
    """Until every process has ended; the others of one that failed would wait for ever."""
    running = {process.sentinel: process for process in processes}
    while running:
        for ready in wait([results, *running]):
            if ready is not results:
                process = running.pop(ready)
                process.join()
                if process.exitcode:
                    raise RuntimeError("a process of the bench failed; its error is above")
        while results.poll():
            try:
                yield results.recv()
            except EOFError:
                break


def _serve(rank: int, count: int, store: Path, results: Connection, work: Work) -> None:
    gc.freeze()  # collections, which `peak` asks for, leave out what was imported
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # other data on each
    os.environ["LOCAL_RANK"] = str(rank)  # which DeepSpeed asks for
    comm_bytes.register()
    dist.init_process_group("counting", f"file://{store}", rank=rank, world_size=count)
    for result in work(rank):
        if rank == 0:
            results.send(result)
    dist.barrier()  # the others may still need this one
    os._exit(0)  # gloo's threads and Python's finalization do not get along


def count_bytes_sent(steps: Steps) -> int:
    """Bytes that each of two processes hands over in the last step of a run under DDP.

    Args:
        steps: yields after every step of the model that it wraps by what it is given.
    """
    *_, last = on_ranks(2, partial(_count, steps))
    return int(last)


def _count(steps: Steps, rank: int) -> Iterator[int]:
    (group,) = comm_bytes.counting_groups()
    for _ in steps(DistributedDataParallel):
        yield sum(size for _, size in group.sent)
        group.sent.clear()
