"""What ranks send and keep, by formula; tests/bench/test_engine_cost.py holds it to counts."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from bigbatch.bench.comm_bytes import moved
from bigbatch.optim.bucket_shards import CHUNK_BYTES
from bigbatch.statistics.sanity_checks import SanityChecks
from bigbatch.statistics.second_moment import join
from bigbatch.statistics.step_totals import FIELDS, StepTotals, unpack

_DOUBLE = 8  # bytes
_FLOAT, _BFLOAT = 4, 2
_SUMS = 22  # doubles of a measured step, in addition to three a layer and `FIELDS` a rank
_SKETCH = 1021  # floats, and with an interval as many doubles
_NODE = 8  # ranks

Handed = dict[str, float]
"""Bytes that a rank hands to each kind of collective in a step; to all-gather, its own part."""


@dataclass(frozen=True)
class Model:
    """Its size.

    Args:
        name: for the table.
        parameters: how many weights.
        layers: how many parameter tensors.
        gathered: bytes of a weight as FSDP2 gathers it; gradients have 4.
    """

    name: str
    parameters: int
    layers: int
    gathered: int = _FLOAT


def sent(handed: Mapping[str, float], ranks: int) -> float:
    """Bytes that leave a rank, as `moved` counts them."""
    return sum(moved(collective, size, ranks) for collective, size in handed.items())


def plain_ddp(model: Model) -> Handed:
    """One all-reduce of the gradient."""
    return {"all-reduce": _FLOAT * model.parameters}


def plain_fsdp2(model: Model, ranks: int, micro_batches: int = 1) -> Handed:
    """Weights gathered forward and backward, gradients scattered, in every micro-batch."""
    return {
        "all-gather": 2 * micro_batches * model.gathered * model.parameters / ranks,
        "reduce-scatter": micro_batches * _FLOAT * model.parameters,
    }


def similarity(ranks: int, layers: int = 1) -> Handed:
    """What `GradientMeter` adds: three sums a layer, 22 others, 7 a rank."""
    return {"all-reduce": _DOUBLE * (3 * layers + _SUMS + FIELDS * ranks)}


def interval(ranks: int) -> Handed:
    """The same with `interval=`: a sketch and a sum more, and two sums after that."""
    return {"all-reduce": similarity(ranks)["all-reduce"] + _DOUBLE * (_SKETCH + 3)}


def loop(ranks: int) -> Handed:
    """The same in `AdaptiveBatch`: five sums more, and two a rank."""
    return {"all-reduce": similarity(ranks)["all-reduce"] + _DOUBLE * (5 + 2 * ranks)}


def vr_ddp(model: Model, ranks: int, *, accumulated: bool, m2_bytes: int = _BFLOAT) -> Handed:
    """All of a step with `attach`, in place of the all-reduce.

    Sums are scattered, M2 where there is accumulation; r g is gathered; three doubles a layer are
    added up, and five a rank are gathered. Without what the last shard of a bucket lacks.
    """
    scattered = _FLOAT + (m2_bytes if accumulated else 0)
    return {
        "all-to-all": scattered * model.parameters,
        "all-gather": _FLOAT * model.parameters / ranks + 5 * _DOUBLE,
        "all-reduce": 3 * _DOUBLE * model.layers,
    }


def vr_fsdp2(model: Model) -> Handed:
    """What VR adds: two doubles a layer."""
    return {"all-reduce": 2 * _DOUBLE * model.layers}


def two_levels(
    model: Model, nodes: int, node: int = _NODE, *, vr: bool = False, accumulated: bool = False
) -> tuple[float, float]:
    """Bytes that leave a rank inside its node of so many ranks, and between nodes.

    Without `vr`, of an all-reduce: scattered in the node, added up between nodes, gathered. With
    it M2 crosses in any case: what a node has is of several micro-batches. Without what is added
    up for layers.
    """
    inside = (node - 1) / node * model.parameters
    between = (nodes - 1) / nodes * model.parameters / node
    m2_inside, m2_between = _BFLOAT * (vr and accumulated), _BFLOAT * vr
    return (2 * _FLOAT + m2_inside) * inside, (2 * _FLOAT + m2_between) * between


def simigrad(model: Model, ranks: int, rank: int) -> float:
    """Bytes that leave a rank as the original sends: its half's all-reduce, then everybody's.

    Rank 1 also sends its half's mean to rank 0. The scalar that is broadcast is left out.
    """
    size = _FLOAT * model.parameters
    halves = moved("all-reduce", size, ranks // 2) + moved("all-reduce", size, ranks)
    return halves + size * (rank == 1)


def vrgd(model: Model) -> Handed:
    """As the VRGD paper's algorithm says: g and g^2 are all-reduced."""
    return {"all-reduce": 2 * _FLOAT * model.parameters}


def memory_ddp(model: Model, ranks: int, *, by_ranks: bool, average: bool) -> float:
    """Bytes that VR keeps on a rank under DDP: shards of g, and of p twice; M2 unless `by_ranks`.

    With two chunks on their way, M2's included.
    """
    shards = _FLOAT * (1 + 2 * average) * model.parameters / ranks
    scratch = 2 * min(CHUNK_BYTES, _FLOAT * model.parameters)
    whole = 0 if by_ranks else _FLOAT * model.parameters
    return shards + whole + scratch * (1 if by_ranks else 2)


def memory_fsdp2(model: Model, ranks: int, *, average: bool) -> float:
    """Bytes that VR keeps on a rank under FSDP2: shards of S, of M2, and of p."""
    return _FLOAT * (2 + average) * model.parameters / ranks


def host_seconds(ranks: int, repeats: int = 5) -> float:
    """Python's time for one step's numbers of so many ranks, once the host has them; the least."""
    lengths = {"over_sizes": 1, "squares": 1, "total_sqnorm": 1, "inverse_sizes": 1, "slope": 2}
    lengths |= {"seen": 8, "in_grad": 8, "probed": 1, "of_ranks": FIELDS * ranks, "scale": 1}
    slots = [x for rank in range(ranks) for x in (1.0, 8.0, 0.0, 1.0 + rank, 1.0 + rank, 0.0, 1.0)]
    values = [1.0] * 23 + slots + [1.0]
    checks, times = SanityChecks("weighted", warns=False), []
    for _ in range(repeats):
        start = time.perf_counter()
        totals = StepTotals(unpack(values, lengths))
        totals.require_all_took_part()
        checks.check_totals(totals, may_overflow=False)
        totals.reduction(1.0, replicated=True)
        times.append(time.perf_counter() - start)
    return min(times)


def join_seconds(ranks: int, repeats: int = 3) -> float:
    """Of putting the shards of one scattered chunk together, a row a rank; the least."""
    size = CHUNK_BYTES // _FLOAT // ranks
    rows, total, m2 = torch.randn(ranks, size), torch.empty(size), torch.empty(size)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        join(rows, (), [1.0] * ranks, total, m2, fused=True)
        times.append(time.perf_counter() - start)
    return min(times)


TITLE = "by formula: what is added to the bytes of a plain step, as a share of them"
COLUMNS = (
    "model",
    "engine",
    "ranks",
    "plain, MB",
    "similarity",
    "AdaptiveBatch",
    "interval",
    "VR",
    "VR, accumulated",
    "between nodes, x",
    "a message, KB",
    "a chunk joined, ms",
    "VR keeps, MB",
    "host, ms",
)
MODELS = (
    Model("ResNet-50", 25_600_000, 161),
    Model("BERT-large", 340_000_000, 398),
    Model("100 billion", 100_000_000_000, 1_000, gathered=_BFLOAT),
)
RANKS = (8, 64, 768, 8192)
ROWS = len(MODELS) * len(RANKS) - 1  # the largest does not fit on 8
_ACCUMULATION = 8  # micro-batches of a rank under FSDP2


@dataclass(frozen=True)
class Carried:
    """One model on so many ranks; a row of a table.

    Args:
        model, ranks: they; the largest model is sharded, the others are copied.
    """

    model: Model
    ranks: int

    @property
    def sharded(self) -> bool:
        """Whether it is under FSDP2, and not DDP."""
        return self.model.gathered != _FLOAT

    def row(self) -> tuple[str, ...]:
        """For a table under `COLUMNS`; what is added is over what is sent without."""
        model, ranks = self.model, self.ranks
        handed = plain_fsdp2(model, ranks, _ACCUMULATION) if self.sharded else plain_ddp(model)
        plain = sent(handed, ranks)

        def more(handed: Handed, instead: float = 0.0) -> str:
            return f"{(sent(handed, ranks) - instead) / plain:.2g}"

        kept = memory_fsdp2(model, ranks, average=True)
        vr = ("-", more(vr_fsdp2(model)), "-", "-", "-")
        if not self.sharded:
            whole, quarter = (vr_ddp(model, ranks, accumulated=a) for a in (False, True))
            kept = memory_ddp(model, ranks, by_ranks=False, average=True)
            message = min(CHUNK_BYTES, _FLOAT * model.parameters) / ranks
            vr = (
                more(whole, plain),
                more(quarter, plain),
                self._between(),
                f"{message / 1e3:,.0f}",
                f"{1e3 * join_seconds(ranks):.0f}",
            )
        return (
            model.name,
            "FSDP2" if self.sharded else "DDP",
            f"{ranks:,}",
            f"{plain / 1e6:,.0f}",
            *(more(extra(ranks)) for extra in (similarity, loop, interval)),
            *vr,
            f"{kept / 1e6:,.0f}",
            f"{1e3 * host_seconds(ranks):.2f}",
        )

    def _between(self) -> str:
        nodes = self.ranks // _NODE
        if nodes == 1:
            return "-"
        vr, plain = (two_levels(self.model, nodes, vr=kind)[1] for kind in (True, False))
        return f"{vr / plain:.2f}"


def run() -> Iterator[Carried]:
    """Every model on every number of ranks that can hold it."""
    every = [Carried(model, ranks) for model in MODELS for ranks in RANKS]
    yield from (each for each in every if not each.sharded or each.ranks > _NODE)
