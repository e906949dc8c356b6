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
from dataclasses import dataclass
from itertools import islice
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


class SimulatedRanks(RankReducer):
    """One of W ranks; `total` sums a tensor over them."""

    lockstep = True  # a simulated engine reduces the last backward of each rank

    def __init__(self, rank: int, ranks: int, total: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rank, self.ranks, self.replicas = rank, ranks, ranks
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
        self.rank, self.ranks = reducer.rank, reducer.ranks

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


def cost(ranks: int, *, every: int) -> tuple[list[list[int]], list[float]]:
    """Bytes of the messages of each step, and the seconds of the host, with the model's."""
    reducer = SimulatedRanks(0, ranks, of_equal_ranks(ranks))
    data, policy = dataset(4 * _STEPS, 0), bb.Fixed(4 * ranks)
    train = training(network(), reducer, data, policy=policy, every=every)
    sent, seconds = [], []
    for step in train:
        reducer.sent.clear()
        started = time.process_time()
        for x, y in step:
            step.backward(cross_entropy(train.model(x), y))
        step.update()
        seconds.append(time.process_time() - started)
        sent.append(list(reducer.sent))
    return sent, seconds


def cost_row(ranks: int) -> Row:
    """Bytes, messages and milliseconds of the three kinds of steps."""
    kinds = {"not measured": (0, slice(8, None)), "measured": (1, slice(8, None))}
    kinds["ranks compared"] = 1, slice(2, 8)
    row = {"ranks": f"{ranks:,}"}
    for name, (every, some) in kinds.items():
        sent, seconds = cost(ranks, every=every)
        middle = sorted(sent[some], key=sum)[len(sent[some]) // 2]
        row[f"{name}: bytes"] = f"{sum(middle):,}"
        row["messages"] = f"{row['messages']}, {len(middle)}" if "messages" in row else "1"
        row[f"{name}: ms"] = f"{1e3 * median(seconds[some]):.2f}"
    return row


# decisions


@dataclass(frozen=True)
class Fault:
    """What happens to a rank in a step: it is late, its gradient is nan, or it dies."""

    rank: int
    step: int
    kind: str

    @classmethod
    def drawn(cls, seed: int, ranks: int, steps: int) -> "Fault":
        """One of all kinds, at random."""
        draw = random.Random(seed)  # noqa: S311
        kind = draw.choice(["late", "nan", "dies"])
        return cls(draw.randrange(ranks), draw.randrange(steps), kind)


class Exchange:
    """Sums of tensors over threads; an error of one of them reaches all that wait."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._values = threading.Barrier(ranks), list[Any]([None] * ranks)

    def total_of(self, rank: int) -> Callable[[Tensor], Tensor]:
        """The function that sums a rank's tensors with those of the others."""

        def total(values: Tensor) -> Tensor:
            self._values[rank] = values.clone()
            self._barrier.wait()
            result = torch.stack(self._values).sum(0)
            self._barrier.wait()  # before anybody sends again
            return result

        return total

    def abort(self) -> None:
        """Ends all waits by BrokenBarrierError."""
        self._barrier.abort()


Decided = tuple[int, int, float, bool]
"""Batch size of a step, the next one, the similarity, and whether the step was skipped."""


def decisions(ranks: int, steps: int, seed: int, fault: Fault | None) -> list[list[Decided]]:
    """What each rank has decided in its steps, until the last one or a rank's death."""
    exchange, found = Exchange(ranks), list[list[Decided]]([[] for _ in range(ranks)])
    models = [network() for _ in range(ranks)]  # before threads share torch's generator

    def run(rank: int) -> None:
        try:
            reducer = SimulatedRanks(rank, ranks, exchange.total_of(rank))
            data = dataset(64 * steps, 1000 * seed + rank)
            policy = bb.SimiGrad(0.4, min_batch=4 * ranks)
            train = training(models[rank], reducer, data, policy=policy, every=1)
            for number, step in enumerate(islice(train, steps)):
                here = fault is not None and (fault.rank, fault.step) == (rank, number)
                for x, y in step:
                    if here and fault is not None:
                        _suffer(fault.kind, x)
                    step.backward(cross_entropy(train.model(x), y))
                record = step.update()
                similarity = record.similarity if record.statistics else 0.0
                sizes = record.batch_size, train.plan.batch_size
                found[rank].append((*sizes, similarity, record.skipped))
        except (threading.BrokenBarrierError, ConnectionError):
            pass
        finally:
            if len(found[rank]) < steps:
                exchange.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _suffer(kind: str, x: Tensor) -> None:
    if kind == "late":
        time.sleep(0.002)
    elif kind == "nan":
        x.fill_(torch.nan)
    else:
        raise ConnectionError("a rank has died")


def fault_rows(ranks: int, steps: int, seeds: int) -> Iterator[Row]:
    """Runs of each kind of fault, and how many were decided alike by all ranks."""
    kinds = dict.fromkeys(("late", "nan", "dies"), (0, 0, 0))
    for seed in range(seeds):
        fault = Fault.drawn(seed, ranks, steps)
        found = decisions(ranks, steps, seed, fault)
        alike = all(a == b for one in found for a, b in zip(found[0], one, strict=False))
        runs, equal, right = kinds[fault.kind]
        kinds[fault.kind] = runs + 1, equal + alike, right + is_right(found, fault, steps, seed)
    for kind, (runs, equal, right) in kinds.items():
        yield {"a rank": kind, "runs": f"{runs}", "decided alike": f"{equal}", "right": f"{right}"}


def is_right(found: list[list[Decided]], fault: Fault, steps: int, seed: int) -> bool:
    """Lateness changes nothing; a nan skips its step alone; without a dead rank no step ends."""
    first = found[0]
    if fault.kind == "dies":  # others may have waited for the sums of the step before
        return all(fault.step - 1 <= len(one) <= fault.step for one in found)
    if fault.kind == "nan":
        return [skipped for *_, skipped in first] == [n == fault.step for n in range(steps)]
    return found == decisions(len(found), steps, seed, None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 512, 4096, 8192])
    parser.add_argument("--seeds", type=int, default=1000, help="of runs with faults")
    parser.add_argument("--tiny", action="store_true", help="8 and 512 ranks, 6 seeds")
    given = parser.parse_args(arguments)
    counts, seeds = ([8, 512], 6) if given.tiny else (given.ranks, given.seeds)
    warnings.simplefilter("ignore")  # equal ranks have equal gradients
    show("a step of one of W ranks", map(cost_row, counts))
    show("4 ranks, 6 steps, one fault", fault_rows(4, 6, seeds))


if __name__ == "__main__":
    main()
