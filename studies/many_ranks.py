"""What a rank among many sends and computes in a step, and whether ranks that fail decide alike.

python -m studies.many_ranks --ranks 8 64 512 4096 8192 --seeds 1000

Every rank runs `AdaptiveBatch` itself; only the engine that reduces is simulated. For the costs one
rank is run, and the sums are those of W ranks with its values. For the decisions each rank is a
thread, and sums are of what all of them have sent.
"""

import argparse
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.gradients.rank_reducer import RankReducer
from bigbatch.gradients.single_process import SingleProcessSource
from bigbatch.gradients.source import MicroBatch
from studies.markdown_tables import Row, show

_STEPS = 24  # of a cost; the ranks are compared in the first 8 that are measured
_RANKS, _FAULTY_STEPS = 4, 6  # of a run with a fault


class SimulatedRanks(RankReducer):
    """One of W ranks; `total` sums a tensor over them."""

    lockstep = True  # a simulated engine reduces the last backward of each rank

    def __init__(self, rank: int, ranks: int, total: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rank, self.ranks, self.replicas = rank, ranks, ranks
        self.process, self.processes = rank, ranks
        self.total, self.sent = total, list[int]()
        self.next_is_last = True

    def all_reduce(self, values: Tensor) -> None:
        """Sums values, and notes their bytes."""
        self.sent.append(values.numel() * values.element_size())
        values.copy_(self.total(values))

    def set_requires_gradient_sync(self, requires_sync: bool) -> None:
        """Notes whether the next backward is the last of its step."""
        self.next_is_last = requires_sync


class SimulatedSource(SingleProcessSource):
    """A rank whose gradients are averaged after its last backward, as DDP does."""

    def __init__(self, model: nn.Module, reducer: SimulatedRanks) -> None:
        super().__init__(model.parameters())
        self.reducer: SimulatedRanks = reducer
        self.rank, self.ranks = self.process, self.processes = reducer.rank, reducer.ranks

    def _close(self, current: MicroBatch) -> None:
        super()._close(current)
        if self.reducer.next_is_last:
            grads = self.guard.grads()
            means = self.reducer.total(torch.cat([g.flatten() for g in grads])) / self.ranks
            nn.utils.vector_to_parameters(means, grads)
            self.guard.accept()


def of_equal_ranks(ranks: int) -> Callable[[Tensor], Tensor]:
    """The sum over ranks with the values of this one; norms in rows differ by a thousandth."""

    def total(values: Tensor) -> Tensor:
        if values.ndim == 1:
            return values * ranks
        row = values.sum(0, keepdim=True)  # (W, values), of which this rank has one
        differing = row * torch.linspace(1, 1.001, ranks, dtype=values.dtype)[:, None]
        return torch.where(row == row.round(), row, differing)

    return total


def network() -> nn.Module:
    """A small classifier, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def training(
    model: nn.Module, reducer: SimulatedRanks, data: TensorDataset, **options: Any
) -> bb.AdaptiveBatch:
    """The training of a rank."""
    ranks, loader = reducer.ranks, DataLoader(data, batch_size=2)
    return bb.AdaptiveBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loader,
        meter=bb.GradientMeter(model, source=SimulatedSource(model, reducer)),
        batch_size=4 * ranks,
        micro_batch=2,
        min_micro_batches=2 * ranks,
        **options,
    )


def dataset(samples: int, seed: int) -> TensorDataset:
    """Inputs of two means, and four classes."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (samples,), generator=draw)
    return TensorDataset(torch.randn(samples, 8, generator=draw) + 0.5 * y[:, None], y)


# costs


def cost_rows(ranks: int) -> Iterator[Row]:
    """Bytes, messages and milliseconds of the host, with the model's, of three kinds of steps."""
    for kind, every, first, last in (
        ("not measured", 0, 8, _STEPS),
        ("measured", 1, 8, _STEPS),
        ("measured, ranks compared", 1, 2, 8),
    ):
        reducer = SimulatedRanks(0, ranks, of_equal_ranks(ranks))
        data, policy = dataset(4 * _STEPS, 0), bb.Fixed(4 * ranks)
        train = training(network(), reducer, data, policy=policy, every=every)
        sent, milliseconds = list[list[int]](), list[float]()
        for step in train:
            reducer.sent.clear()
            started = time.process_time()
            for x, y in step:
                step.backward(cross_entropy(train.model(x), y))
            step.update()
            milliseconds.append(1e3 * (time.process_time() - started))
            sent.append(list(reducer.sent))
        yield {
            "ranks": f"{ranks:,}",
            "step": kind,
            "bytes": f"{sum(sent[first]):,}",
            "messages": str(len(sent[first])),
            "host, ms": f"{median(milliseconds[first:last]):.2f}",
        }


# decisions


class Exchange:
    """Sums of tensors over threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self._values: list[Any] = [None] * ranks

    def total(self, rank: int, values: Tensor) -> Tensor:
        """The sum of a rank's tensor with those of the others; BrokenBarrierError if one died."""
        self._values[rank] = values.clone()
        self.barrier.wait()
        result = torch.stack(self._values).sum(0)
        self.barrier.wait()  # before anybody sends again
        return result


Decided = tuple[int, int, float, bool]
"""Batch size of a step, the next one, the similarity, and whether the step was skipped."""


def decisions(seed: int, fault: str = "", rank: int = 0, at: int = 0) -> list[list[Decided]]:
    """What each rank decides until the end, or a death; `rank` has the fault in step `at`."""
    exchange, found = Exchange(_RANKS), list[list[Decided]]([[] for _ in range(_RANKS)])
    models = [network() for _ in range(_RANKS)]  # before threads share torch's generator

    def run(own: int) -> None:
        with suppress(threading.BrokenBarrierError, ConnectionError):
            reducer = SimulatedRanks(own, _RANKS, partial(exchange.total, own))
            data = dataset(64 * _FAULTY_STEPS, 1000 * seed + own)
            policy = bb.SimiGrad(0.4, min_batch=4 * _RANKS)
            train = training(models[own], reducer, data, policy=policy, every=1)
            for number, step in enumerate(islice(train, _FAULTY_STEPS)):
                for x, y in step:
                    if (own, number) == (rank, at):
                        suffer(fault, x)
                    step.backward(cross_entropy(train.model(x), y))
                record = step.update()
                similarity = record.similarity if record.statistics else 0.0
                sizes = record.batch_size, train.plan.batch_size
                found[own].append((*sizes, similarity, record.skipped))
        if len(found[own]) < _FAULTY_STEPS:
            exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(own,)) for own in range(_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def suffer(fault: str, x: Tensor) -> None:
    """A rank is late, has a gradient of nan, or dies."""
    if fault == "late":
        time.sleep(0.002)
    elif fault == "nan":
        x.fill_(torch.nan)
    elif fault == "dies":
        raise ConnectionError("a rank has died")


def fault_rows(seeds: int) -> Iterator[Row]:
    """Runs of each kind of fault: in how many all ranks decide alike, and in how many rightly.

    Lateness changes nothing, a nan skips its step alone, and without a dead rank no step ends; the
    others may still have waited for the sums of the step before.
    """
    for fault in ("late", "nan", "dies"):
        alike = right = runs = 0
        for runs in range(1, 1 + seeds // 3):
            draw = random.Random(runs)  # noqa: S311
            rank, at = draw.randrange(_RANKS), draw.randrange(_FAULTY_STEPS)
            found = decisions(runs, fault, rank, at)
            alike += all(a == b for own in found for a, b in zip(found[0], own, strict=False))
            if fault == "late":
                right += found == decisions(runs)
            elif fault == "nan":
                skipped = [number == at for number in range(_FAULTY_STEPS)]
                right += all([record[-1] for record in own] == skipped for own in found)
            else:
                right += all(at - 1 <= len(own) <= at for own in found)
        yield {"a rank": fault, "runs": f"{runs}", "alike": f"{alike}", "right": f"{right}"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 512, 4096, 8192])
    parser.add_argument("--seeds", type=int, default=1000, help="runs with a fault, in all")
    parser.add_argument("--tiny", action="store_true", help="8 and 512 ranks, 6 runs")
    given = parser.parse_args(arguments)
    counts, seeds = ([8, 512], 6) if given.tiny else (given.ranks, given.seeds)
    warnings.simplefilter("ignore")  # of equal gradients, of nan
    show("a step of one of W ranks", chain.from_iterable(map(cost_rows, counts)))
    show(f"{_RANKS} ranks, {_FAULTY_STEPS} steps, one fault", fault_rows(seeds))


if __name__ == "__main__":
    main()
