"""Processes on gloo for studies, whose process groups count the bytes that are sent."""

import gc
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from studies import comm_bytes

Work = Callable[[int], Iterator[Any]]


def on_ranks(count: int, work: Work, *, counts: bool = True) -> Iterator[Any]:
    """Yields what `work(0)` yields, while `work(rank)` runs in `count` processes.

    Args:
        count: number of processes.
        work: what each does, by its rank.
        counts: whether the bytes that are sent are counted, which takes time.
    Raises:
        RuntimeError: a process failed.
    """
    has_forkserver = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if has_forkserver else "spawn")
    results, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_run,
                args=(rank, count, Path(folder) / "store", sender, work, counts),
                daemon=True,
            )
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        sender.close()  # so that `results` ends with the processes
        try:
            yield from _receive(results, processes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _receive(results: Connection, processes: list[Any]) -> Iterator[Any]:
    """Yields results until every process has ended, or one has failed."""
    running = {process.sentinel: process for process in processes}
    while running:
        for ready in wait([results, *running]):
            if ready is not results:
                process = running.pop(ready)
                process.join()
                if process.exitcode:
                    raise RuntimeError("a process of the study failed; its error is above")
        while results.poll():
            try:
                yield results.recv()
            except EOFError:
                break


def _run(rank: int, count: int, store: Path, results: Connection, work: Work, counts: bool) -> None:
    gc.freeze()  # garbage collections, as of peak memory, skip imported modules
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # other data on each rank
    os.environ["LOCAL_RANK"] = str(rank)  # DeepSpeed reads it
    if counts:
        comm_bytes.register()
    backend = "counting" if counts else "gloo"
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=count)
    for result in work(rank):
        if rank == 0:
            results.send(result)
    dist.barrier()  # other ranks may still need this one
    os._exit(0)  # gloo's threads and Python's finalization do not get along
