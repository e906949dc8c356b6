"""Bytes that ranks send and keep, by formula; tests/studies/test_engine_bytes.py compares counts.

python -m studies.scaling
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bigbatch.optim.bucket_shards import CHUNK_BYTES
from bigbatch.statistics.step_totals import RankTotals
from studies.comm_bytes import ring_bytes
from studies.markdown_tables import Row, show

_DOUBLE = 8  # bytes
_FLOAT, _BFLOAT = 4, 2
_SUMS = 29  # doubles of a measured step, in addition to three a layer
_LOOP_SUMS = 11  # that `AdaptiveBatch` adds
_SKETCH = 1021  # doubles that an interval adds

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


def similarity(layers: int = 1) -> InputBytes:
    """`GradientMeter` adds three sums a layer, and 29 others."""
    return {"all-reduce": _DOUBLE * (3 * layers + _SUMS)}


def interval() -> InputBytes:
    """`GradientMeter(confidence=)` also adds a sketch and a sum, and two sums after that."""
    return {"all-reduce": similarity()["all-reduce"] + _DOUBLE * (_SKETCH + 3)}


def loop() -> InputBytes:
    """`AdaptiveBatch` adds the sums of `GradientMeter`, and eleven more."""
    return {"all-reduce": similarity()["all-reduce"] + _DOUBLE * _LOOP_SUMS}


def compared_ranks(ranks: int) -> InputBytes:
    """The totals of each rank, in the first 8 measured steps and in each 64th."""
    return {"all-reduce": _DOUBLE * len(RankTotals._fields) * ranks}


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


def memory_ddp(model: Model, ranks: int) -> float:
    """Bytes that VR keeps on a rank under DDP: shards of g, two of p, and M2.

    Buffers of two chunks that are in flight are included, for M2 too.
    """
    size = _FLOAT * model.parameters
    return 3 * size / ranks + size + 4 * min(CHUNK_BYTES, size)


def memory_fsdp2(model: Model, ranks: int) -> float:
    """Bytes that VR keeps on a rank under FSDP2: shards of S, of M2, and of p."""
    return 3 * _FLOAT * model.parameters / ranks


MODELS = (
    Model("ResNet-50", 25_600_000, 161),
    Model("BERT-large", 340_000_000, 398),
    Model("100 billion", 100_000_000_000, 1_000, gathered=_BFLOAT),
)
RANKS = (8, 64, 768, 8192)
_SHARDING_RANKS = 64  # the fewest that can hold the largest model
_ACCUMULATION = 8  # micro-batches of a rank under FSDP2


def rows() -> Iterator[Row]:
    """One row for every model on every number of ranks that can hold it.

    The largest model is sharded by FSDP2, the others are replicated by DDP.
    """
    for model in MODELS:
        for ranks in RANKS:
            if model.gathered == _FLOAT:
                plain = bytes_sent(plain_ddp(model), ranks)
                once, accumulated = (
                    bytes_sent(vr_ddp(model, ranks, accumulated=several), ranks) - plain
                    for several in (False, True)
                )
                added, keeps = (
                    {"VR": once, "VR, accumulated": accumulated},
                    memory_ddp(model, ranks),
                )
            elif ranks >= _SHARDING_RANKS:
                plain = bytes_sent(plain_fsdp2(model, ranks, _ACCUMULATION), ranks)
                accumulated, keeps = bytes_sent(vr_fsdp2(model), ranks), memory_fsdp2(model, ranks)
                added = {"VR": math.nan, "VR, accumulated": accumulated}
            else:
                continue
            scalars = {"similarity": similarity, "AdaptiveBatch": loop, "interval": interval}
            added = {name: bytes_sent(of(), ranks) for name, of in scalars.items()} | added
            yield {
                "model": model.name,
                "ranks": f"{ranks:,}",
                "plain, MB": f"{plain / 1e6:,.0f}",
                **{name: f"{size / plain:.2g}" for name, size in added.items()},
                "VR keeps, MB": f"{keeps / 1e6:,.0f}",
            }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="the whole table, which takes no time")
    parser.parse_args(arguments)
    show("bytes that are added to those of a plain step, as a share of them", rows())


if __name__ == "__main__":
    main()
