"""A transformer-like network over meshes of data and tensor parallelism, and its data."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import bigbatch as bb

SEED, WORDS, LENGTH, WIDTH = 3, 10, 6, 8
RANKS = {"alone": (1, 2), "ddp": (2, 2), "fsdp2": (2, 2)}  # (data, tensor)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry = nn.Identity()  # where the sequence is cut, for the norm
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(self.entry(x)))))


class Network(nn.Module):
    """Tokens of rows of words to logits of the next ones."""

    def __init__(self):
        super().__init__()
        self.embedding, self.first = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.block = Block()
        self.out = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        return self.out(self.block(self.first(self.embedding(words))))


def network(*, tied=False):
    torch.manual_seed(SEED)
    model = Network().double()
    if tied:
        model.out.weight = model.embedding.weight
    return model


def plan(*, sequence):
    """The norm called `first` stands outside, so that its parameters are plain."""
    styles = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "block.up": ColwiseParallel(),
        "block.down": RowwiseParallel(),
        "out": ColwiseParallel(output_layouts=Replicate()),
    }
    if sequence:
        styles |= {
            "block.entry": PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False
            ),
            "block.norm": SequenceParallel(),
            "block.up": ColwiseParallel(input_layouts=Shard(1)),
        }
    return styles


def mesh_of(engine):
    return init_device_mesh("cpu", RANKS[engine], mesh_dim_names=("dp", "tp"))


def parallel(engine, mesh, *, sequence=False, tied=False):
    model = parallelize_module(network(tied=tied), mesh["tp"], plan(sequence=sequence))
    if tied:  # parallelize_module unties them
        model.out.weight = model.embedding.weight
    if engine == "fsdp2":
        if not tied:
            fully_shard(model.block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])
    return model if engine == "alone" else DistributedDataParallel(model, device_mesh=mesh["dp"])


def samples(count=96):
    draw = torch.Generator().manual_seed(SEED)
    return torch.randint(WORDS, (count, LENGTH), generator=draw)


def loader_of(rank, ranks, count=96):
    data = samples(count)
    sampler = bb.ElasticDistributedSampler(data, seed=SEED, num_replicas=ranks, rank=rank)
    return DataLoader(data, 4, sampler=sampler)


def loss_of(model, words):
    return cross_entropy(model(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten())
