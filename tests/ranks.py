"""Real processes on gloo for tests: `ranks(3)(function, *arguments)` runs it on three.

The processes of one size are started once and reused; a test gets back what the function returned
on each rank, in order, or the first failure's traceback.
"""

import multiprocessing
import os
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = 300  # for one function on all ranks, on a machine that has much else to do
AFTER_A_FAILURE = 5  # for the others, who may wait in a collective for ever


class RankError(AssertionError):
    """A function failed on a rank."""


class Ranks:
    """So many processes, each with a default process group over all of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        context = multiprocessing.get_context("spawn")
        store = Path(tempfile.mkdtemp()) / "store"
        pipes = [context.Pipe() for _ in range(count)]
        self._ours = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, count, str(store), theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def __call__(self, function, *arguments):
        """Runs `function(rank, ranks, *arguments)` everywhere."""
        for pipe in self._ours:
            pipe.send((function, arguments))
        results, failure = [], None
        for rank, pipe in enumerate(self._ours):
            if not pipe.poll(AFTER_A_FAILURE if failure else SECONDS):
                self.kill()
                raise RankError(failure or f"rank {rank} gave no answer in {SECONDS} s")
            kind, value = pipe.recv()
            if kind == "failed" and failure is None:
                failure = f"rank {rank}: {value}"
            results.append(value)
        if failure:
            raise RankError(failure)
        return results

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, count: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, count), rank=rank, world_size=count)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send(("done", function(rank, count, *arguments)))
        except Exception:
            pipe.send(("failed", traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads and Python's finalization do not get along
