"""A training under torchrun, for test_elastic.py: checkpoints, ledger, and what goes wrong.

    torchrun ... elastic_training.py FOLDER [engine=ddp] [updates=24] [every=5] [fault=NAME] ...

Every rank appends a line to FOLDER/ledger for every update; a run that continues from a checkpoint
notes where, so what was done past it can be left out. Rank 0 saves the weights at the end.
"""

import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import bigbatch as bb
from numbered_samples import SEED, Numbered, controller_of, whole, wrapped

DEFAULTS = {"engine": "ddp", "updates": 24, "every": 5, "timeout": 60, "fault": "", "at": 13}
FAULTY = 1  # the rank that is struck
STRUCK = {"a node is lost": "lost", "a node joins": "kept"}  # or the node of that name


def main(folder, engine, updates, every, timeout, fault, at):
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first_life = not (folder / "ledger").exists()
    dist.barrier()  # before rank 0 begins it
    if fault == "starts late" and rank == FAULTY:
        time.sleep(5)
    train = build(rank, ranks, engine, fault)
    resume(train, folder, rank)
    if fault == "stays away" and rank == FAULTY:
        time.sleep(1000)  # until it is ended with the others
    for _ in train.epochs(10**9):
        for step in train:
            this_step, numbers = train.steps + 1, []
            for x, y, number in step:
                numbers += number.tolist()
                loss = cross_entropy(train.model(x), y)
                is_struck = os.environ.get("NODE", rank) == STRUCK.get(fault, FAULTY)
                if first_life and is_struck and this_step == at:
                    strike(fault)
                step.backward(loss)
            step.update()
            note(folder, {"step": train.steps, "rank": rank, "numbers": numbers})
            if train.steps % every == 0:
                save(train, folder, rank)
            if train.steps == updates:
                weights = [whole(p) for p in train.model.parameters()]
                if rank == 0:
                    torch.save(weights, folder / "weights.pt")
                return


class Greed:
    """A layer that has no memory for its n-th forward."""

    def __init__(self, forwards):
        self.left = forwards

    def __call__(self, module, inputs):
        self.left -= 1
        if not self.left:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def build(rank, ranks, engine, fault):
    data = Numbered()
    sampler = bb.ElasticDistributedSampler(data, seed=SEED)
    model = wrapped(engine, ranks)
    if fault == "memory" and rank == FAULTY:
        inner = model.module if engine == "ddp" else model
        inner[1].register_forward_pre_hook(Greed(30))
    return bb.AdaptiveBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        bb.Batches(DataLoader(data, 16, sampler=sampler), virtual_ranks=4),
        policy=controller_of(),
        micro_batch=12,
        every=1,
    )


def strike(fault):
    if fault == "a node joins":  # and restarts the worker
        time.sleep(1000)
    if fault == "a node is lost":  # with torchrun's agent, which would start its worker again
        os.kill(os.getppid(), signal.SIGKILL)
    if fault in ("kill", "a node is lost"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "error":
        raise ValueError("this rank's data are broken")


def everything(train):
    model, optimizer = get_state_dict(train.model, train.optimizer)
    return {"model": model, "optimizer": optimizer, "train": bb.DistributedState(train)}


def save(train, folder, rank):
    """A folder of its own, which `latest` names once it is whole."""
    place = folder / f"step-{train.steps}"
    dcp.save(everything(train), checkpoint_id=place)  # ends on all ranks
    if rank == 0:
        (folder / "latest.new").write_text(place.name)
        (folder / "latest.new").replace(folder / "latest")


def resume(train, folder, rank):
    if (folder / "latest").exists():
        state = everything(train)
        dcp.load(state, checkpoint_id=folder / (folder / "latest").read_text())
        set_state_dict(
            train.model,
            train.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    if rank == 0:
        note(folder, {"from": train.steps, "ranks": dist.get_world_size()})


def note(folder, line):
    """One write in append mode: whole, and after what others wrote before."""
    with (folder / "ledger").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    given = dict(argument.split("=") for argument in sys.argv[2:])
    options = {name: type(value)(given.get(name, value)) for name, value in DEFAULTS.items()}
    try:
        main(Path(sys.argv[1]), **options)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # gloo's threads and Python's finalization do not get along
