"""Real processes on gloo for tests: `ranks(3)(function, *arguments)` runs it on three.

Every call has processes of its own, so no test meets what an earlier one left: process groups and
their threads, DTensor's caches, what DeepSpeed sets for a process's life. They are forked from a
server that has imported what is slow to import: one costs a tenth of a CPU second.
"""

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

SECONDS = 300  # for one function on all ranks, on a machine that has much else to do
AFTER_A_FAILURE = 5  # for the other ranks, which may wait in a collective for ever
SLOW_TO_IMPORT = {"torch", "bigbatch", "accelerate", "deepspeed", "lightning", "transformers"}
IMPORTED_LATE = {  # by the first DDP model; by DeepSpeed's first engine of a stage above 0
    "bigbatch": ["torch._dynamo"],
    "deepspeed": ["setuptools", "torch._inductor.compile_fx"],
}


class RankError(AssertionError):
    """A function failed on a rank."""


def ranks_of(count: int):
    """A function that runs functions on `count` processes, with a process group over all."""

    def run(function, *arguments):
        """Calls `function(rank, ranks, *arguments)` everywhere; returns the results in order.

        Raises:
            RankError: with the first failure's traceback, or the exit code of a rank that died.
        """
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            processes = [_start(rank, count, store, function, arguments) for rank in range(count)]
            try:
                return _answers(processes)
            finally:
                for process, pipe in processes:
                    pipe.close()
                    process.kill()
                    process.join()

    return run


@cache
def forking() -> ForkServerContext:
    """A server without threads that has imported what is slow and was imported here."""
    context = multiprocessing.get_context("forkserver")
    modules = [name for name in sys.modules if name.partition(".")[0] in SLOW_TO_IMPORT]
    late = [name for user, names in IMPORTED_LATE.items() if user in sys.modules for name in names]
    context.set_forkserver_preload([*modules, *late, "rank_server"])
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    path = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))
    # engines choose a GPU by themselves where there is one, and gloo has none for every rank
    with patch.dict(os.environ, PYTHONPATH=path, CUDA_VISIBLE_DEVICES=""):
        forkserver.ensure_running()
    return context


def _start(rank, count, store, function, arguments):
    parent_pipe, child_pipe = forking().Pipe()
    serve_arguments = (rank, count, store, child_pipe, function, arguments)
    process = forking().Process(target=_serve, args=serve_arguments, daemon=True)
    process.start()
    child_pipe.close()
    return process, parent_pipe


def _answers(processes) -> list:
    pending = {pipe: rank for rank, (_, pipe) in enumerate(processes)}
    results, failure = {}, None
    until = time.monotonic() + SECONDS
    while pending:
        ready = wait(list(pending), until - time.monotonic())
        if not ready:
            silent = f"ranks {sorted(pending.values())} gave no answer in {SECONDS} s"
            raise RankError(failure or silent)
        for pipe in ready:
            rank = pending.pop(pipe)
            try:
                kind, results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank][0].join()
                kind, results[rank] = "died", f"exit code {processes[rank][0].exitcode}"
            if kind != "done" and failure is None:
                failure = f"rank {rank} {kind}: {results[rank]}"
                until = min(until, time.monotonic() + AFTER_A_FAILURE)
    if failure:
        raise RankError(failure)
    return [results[rank] for rank in range(len(processes))]


def _serve(rank, count, store, pipe: Connection, function, arguments) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        store = dist.FileStore(store, count)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
        dist.barrier()  # a rank that returns at once would close connections that others still open
        answer = ("done", function(rank, count, *arguments))
    except Exception:
        answer = ("failed", traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))  # by value: this process ends before it is read
    sys.stdout.flush()
    os._exit(0)  # gloo's threads and Python's finalization do not get along
