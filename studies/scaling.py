"""Bytes that ranks send and keep, by formula; tests/bench/test_engine_cost.py compares counts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from bigbatch.optim.bucket_shards import CHUNK_BYTES
from bigbatch.statistics.sanity_checks import SanityChecks
from bigbatch.statistics.second_moment import combine_moments
from bigbatch.statistics.step_totals import FIELDS, RANK_COUNTS, StepTotals, unpack
from studies.comm_bytes import ring_bytes
from studies.timing import Row, seconds

_DOUBLE = 8  # bytes
_FLOAT, _BFLOAT = 4, 2
_SUMS = 22  # doubles of a measured step, in addition to three a layer and `FIELDS` a rank
_SKETCH = 1021  # doubles that an interval adds
_NODE = 8  # ranks of a node

InputBytes = dict[str, float]
"""Bytes that a rank passes to each kind of collective in a step; to all-gather, its own part."""


@dataclass(frozen=True)
class Model:
    """The size of a model.

    Args:
        name: the name in the table.
        parameters: number of weights.
        layers: number of parameter tensors.
        gathered: bytes of a weight as FSDP2 gathers it; a gradient has 4.
    """

    name: str
    parameters: int
    layers: int
    gathered: int = _FLOAT


def bytes_sent(input_bytes: Mapping[str, float], ranks: int) -> float:
    """Bytes that leave a rank, by `ring_bytes`."""
    return sum(ring_bytes(collective, size, ranks) for collective, size in input_bytes.items())


def plain_ddp(model: Model) -> InputBytes:
    """One all-reduce of the gradient."""
    return {"all-reduce": _FLOAT * model.parameters}


def plain_fsdp2(model: Model, ranks: int, micro_batches: int = 1) -> InputBytes:
    """In every micro-batch, weights are gathered forward and backward, gradients scattered."""
    return {
        "all-gather": 2 * micro_batches * model.gathered * model.parameters / ranks,
        "reduce-scatter": micro_batches * _FLOAT * model.parameters,
    }


def similarity(ranks: int, layers: int = 1) -> InputBytes:
    """`GradientMeter` adds three sums a layer, 22 others, and 7 a rank."""
    return {"all-reduce": _DOUBLE * (3 * layers + _SUMS + FIELDS * ranks)}


def interval(ranks: int) -> InputBytes:
    """`GradientMeter(confidence=)` also adds a sketch and a sum, and two sums after that."""
    return {"all-reduce": similarity(ranks)["all-reduce"] + _DOUBLE * (_SKETCH + 3)}


def loop(ranks: int) -> InputBytes:
    """`AdaptiveBatch` adds the sums of `GradientMeter`, seven more, and two a rank."""
    return {"all-reduce": similarity(ranks)["all-reduce"] + _DOUBLE * (7 + 2 * ranks)}


def vr_ddp(model: Model, ranks: int, *, accumulated: bool) -> InputBytes:
    """All that a VR optimizer after `attach` sends in a step, in place of the all-reduce.

    Sums are scattered, and M2 with accumulation; r g is gathered; three doubles a layer are
    all-reduced, and five a rank are gathered. Padding of the last shard of a bucket is left out.
    """
    scattered = _FLOAT + _BFLOAT * accumulated
    return {
        "all-to-all": scattered * model.parameters,
        "all-gather": _FLOAT * model.parameters / ranks + 5 * _DOUBLE,
        "all-reduce": 3 * _DOUBLE * model.layers,
    }


def vr_fsdp2(model: Model) -> InputBytes:
    """VR adds two doubles a layer."""
    return {"all-reduce": 2 * _DOUBLE * model.layers}


def two_levels(
    model: Model, nodes: int, node: int = _NODE, *, vr: bool = False, accumulated: bool = False
) -> tuple[float, float]:
    """Bytes that leave a rank inside its node of `node` ranks, and between nodes.

    Without `vr`, an all-reduce: scattered in the node, all-reduced between nodes, gathered. With
    it, M2 is sent between nodes in any case, as a node has several micro-batches. Sums of layers
    are left out.
    """
    inside = (node - 1) / node * model.parameters
    between = (nodes - 1) / nodes * model.parameters / node
    m2_inside, m2_between = _BFLOAT * (vr and accumulated), _BFLOAT * vr
    return (2 * _FLOAT + m2_inside) * inside, (2 * _FLOAT + m2_between) * between


def simigrad(model: Model, ranks: int, rank: int) -> float:
    """Bytes that leave a rank in the original SimiGrad: an all-reduce in its half, then in all.

    Rank 1 also sends its half's mean to rank 0. The scalar that is broadcast is left out.
    """
    size = _FLOAT * model.parameters
    both = ring_bytes("all-reduce", size, ranks // 2) + ring_bytes("all-reduce", size, ranks)
    return both + size * (rank == 1)


def vrgd(model: Model) -> InputBytes:
    """The algorithm of the VRGD paper: g and g^2 are all-reduced."""
    return {"all-reduce": 2 * _FLOAT * model.parameters}


def memory_ddp(model: Model, ranks: int) -> float:
    """Bytes that VR keeps on a rank under DDP: shards of g, two of p, and M2.

    Buffers of two chunks that are in flight are included, for M2 too.
    """
    size = _FLOAT * model.parameters
    return 3 * size / ranks + size + 4 * min(CHUNK_BYTES, size)


def memory_fsdp2(model: Model, ranks: int) -> float:
    """Bytes that VR keeps on a rank under FSDP2: shards of S, of M2, and of p."""
    return 3 * _FLOAT * model.parameters / ranks


def host_seconds(ranks: int) -> float:
    """Seconds that Python takes for one step's numbers of all ranks on the host; least of 5."""
    by_layer = ("sqnorms_over_sizes", "sqnorms", "grad_sqnorms")
    lengths = {**dict.fromkeys(by_layer, 1), "inverse_sizes": 1, "slope": 2}
    lengths |= {"micro_batch_projections": 8, "grad_projections": 8, "projection_sqnorm": 1}
    sums = (FIELDS - RANK_COUNTS) * ranks
    lengths |= {"rank_counts": RANK_COUNTS * ranks, "rank_sums": sums, "scale": 1}
    rows = [(1.0, 8.0, 0.0, 1.0 + rank, 1.0 + rank, 0.0, 1.0) for rank in range(ranks)]
    values = [1.0] * 23 + [x for column in zip(*rows, strict=True) for x in column] + [1.0]
    checks = SanityChecks("weighted", warns=False)

    def read_totals() -> None:
        totals = StepTotals(unpack(values, lengths))
        totals.require_all_took_part()
        checks.check_totals(totals, may_overflow=False)
        totals.reduction(1.0, replicated=True)

    return min(seconds(read_totals) for _ in range(5))


def join_seconds(ranks: int) -> float:
    """Seconds of joining the shards of one scattered chunk, one row per rank; least of 3."""
    size = CHUNK_BYTES // _FLOAT // ranks
    rows, total, m2 = torch.randn(ranks, size), torch.empty(size), torch.empty(size)
    run = partial(combine_moments, rows, (), [1.0] * ranks, total, m2, fused=True)
    return min(seconds(run) for _ in range(3))


TITLE = "by formula: bytes that are added to those of a plain step, as a share of them"
MODELS = (
    Model("ResNet-50", 25_600_000, 161),
    Model("BERT-large", 340_000_000, 398),
    Model("100 billion", 100_000_000_000, 1_000, gathered=_BFLOAT),
)
RANKS = (8, 64, 768, 8192)
ROWS = len(MODELS) * len(RANKS) - 1  # the largest does not fit on 8
_ACCUMULATION = 8  # micro-batches of a rank under FSDP2


def rows() -> Iterator[Row]:
    """One row for every model on every number of ranks that can hold it.

    The largest model is sharded by FSDP2, the others are replicated by DDP.
    """
    for model in MODELS:
        for ranks in RANKS:
            if model.gathered == _FLOAT:
                yield _row(model, ranks, "DDP", plain_ddp(model), _vr_ddp_cells(model, ranks))
            elif ranks > _NODE:
                plain = plain_fsdp2(model, ranks, _ACCUMULATION)
                yield _row(model, ranks, "FSDP2", plain, _vr_fsdp2_cells(model, ranks))


def _row(model: Model, ranks: int, engine: str, plain: InputBytes, vr_cells: Row) -> Row:
    extra = {"similarity": similarity, "AdaptiveBatch": loop, "interval": interval}
    return {
        "model": model.name,
        "engine": engine,
        "ranks": f"{ranks:,}",
        "plain, MB": f"{bytes_sent(plain, ranks) / 1e6:,.0f}",
        **{name: _share(added(ranks), plain, ranks) for name, added in extra.items()},
        **vr_cells,
        "host, ms": f"{1e3 * host_seconds(ranks):.2f}",
    }


def _share(added: InputBytes, plain: InputBytes, ranks: int) -> str:
    return f"{bytes_sent(added, ranks) / bytes_sent(plain, ranks):.2g}"


def _vr_ddp_cells(model: Model, ranks: int) -> Row:
    plain = bytes_sent(plain_ddp(model), ranks)
    once, accumulated = (
        bytes_sent(vr_ddp(model, ranks, accumulated=accumulated), ranks) / plain - 1
        for accumulated in (False, True)
    )
    nodes = ranks // _NODE
    vr_between, plain_between = (two_levels(model, nodes, vr=vr)[1] for vr in (True, False))
    message = min(CHUNK_BYTES, _FLOAT * model.parameters) / ranks
    return {
        "VR": f"{once:.2g}",
        "VR, accumulated": f"{accumulated:.2g}",
        "between nodes, x": "-" if nodes == 1 else f"{vr_between / plain_between:.2f}",
        "a message, KB": f"{message / 1e3:,.0f}",
        "a chunk joined, ms": f"{1e3 * join_seconds(ranks):.0f}",
        "VR keeps, MB": f"{memory_ddp(model, ranks) / 1e6:,.0f}",
    }


def _vr_fsdp2_cells(model: Model, ranks: int) -> Row:
    plain = plain_fsdp2(model, ranks, _ACCUMULATION)
    return {
        "VR": "-",
        "VR, accumulated": _share(vr_fsdp2(model), plain, ranks),
        "between nodes, x": "-",
        "a message, KB": "-",
        "a chunk joined, ms": "-",
        "VR keeps, MB": f"{memory_fsdp2(model, ranks) / 1e6:,.0f}",
    }
