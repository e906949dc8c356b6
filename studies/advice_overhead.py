"""What a loop pays for being observed by `bb.advise`, after its first second of measuring."""

import copy
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from bigbatch.advisor.advise import advise
from studies.loop_cost import plain_steps
from studies.loop_overhead import NETWORKS, Network, ratio_of_rounds, repeated
from studies.timing import Row, Times, interleaved_times, median_and_range

_WAYS = {"groups": 1, "micro-batches": 4}  # backwards of a step
_WARM_UP_SECONDS = 15.0  # until the first second of measuring is over
_STEPS = 192  # of a round: several times the interval between measured steps


def rows(names: Sequence[str], samples: int, rounds: int) -> Iterator[Row]:
    """A row for each network: an observed step over a plain one, by groups and micro-batches."""
    for name in names:
        row: Row = {"network": name, "batch": str(samples)}
        for way, backwards in _WAYS.items():
            plain, ratio = _observed(NETWORKS[name], samples, backwards, rounds)
            row |= {f"plain step, ms ({way})": plain, f"observed by {way}": ratio}
        yield row


def _observed(shape: Network, samples: int, backwards: int, rounds: int) -> tuple[str, str]:
    """Milliseconds of a plain step of so many backwards; an observed one over it."""
    batches = [shape.batch(samples // backwards) for _ in range(max(shape.steps, backwards))]
    batches = batches[: len(batches) // backwards * backwards]
    model = shape.build()
    models = [model, copy.deepcopy(model)]
    runs = [
        partial(plain_steps, each, torch.optim.SGD(each.parameters(), lr=1e-4), batches, backwards)
        for each in models
    ]
    steps = len(batches) // backwards
    passes = max(1, _STEPS // steps)
    with advise(models[1], runs[1].args[1]):
        began = time.perf_counter()
        while time.perf_counter() - began < _WARM_UP_SECONDS:
            runs[1]()
        times: list[list[Times]] = interleaved_times(
            [repeated(run, passes) for run in runs], rounds
        )
    plain = [1e3 * one.wall / steps / passes for one, _ in times]
    return median_and_range(plain), ratio_of_rounds([(two, one) for one, two in times])
