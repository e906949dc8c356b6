"""Re-cuts any loader's batches into the plan's micro-batches: nothing lost, nothing twice."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from bigbatch.act.randomness import (
    RandomState,
    random_state,
    raw_random_state,
    restorable,
    restore_random_state,
)
from bigbatch.act.samples import Batch, count_samples, cut_samples, glue_samples
from bigbatch.decide.plan import BatchPlan
from bigbatch.errors import BatchError, SettingError, StateError


class Batches:
    """Cuts the batches of a loader along their samples, in order, into micro-batches of any size.

    A change of batch size takes effect with the next step: what the loader has already prefetched
    is cut anew, never thrown away. Cutting makes views; samples are copied only where a
    micro-batch spans two of the loader's batches. Batches whose shapes differ are cut but never
    glued, so a micro-batch may then be smaller than planned.

    Args:
        loader: any iterable of batches that can be iterated once per epoch.
        tail: what becomes of the last samples of an epoch when too few for a step of their own
            are left. "share": they join the last step, or are shared by the last two, so that
            the steps keep their bounds where any cut can. "step": they are a step by themselves.
            "drop": an incomplete last step is left out.
        split: (batch, lo, hi) -> samples lo to hi, for batches whose leaves do not share their
            first size. Such batches are not glued.
        count: batch -> number of samples, beside `split`; default: what a DataLoader of known
            length says.
    Raises:
        SettingError: the loader can be iterated only once, an unknown `tail`, or a number of
            samples that nobody says.
    Example:
        >>> batches = Batches([torch.arange(4), torch.arange(4, 6)])
        >>> batches.start(epoch=0)
        >>> [m.tolist() for m, _ in batches.step(BatchPlan(1, 3, 2), least=1)]
        [[0, 1, 2], [3, 4, 5]]
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        *,
        tail: Literal["share", "step", "drop"] = "share",
        split: Callable[[Batch, int, int], Batch] | None = None,
        count: Callable[[Batch], int] | None = None,
    ) -> None:
        if isinstance(loader, Iterator):
            raise SettingError("the loader is used up after one pass; give one that can start anew")
        if tail not in ("share", "step", "drop"):
            raise SettingError(f'tail={tail!r} is unknown; choose "share", "step" or "drop"')
        if split is None and count is not None:
            raise SettingError("count= belongs to split=; pass both, or split= alone")
        self.loader = loader
        self.tail = tail
        self._split = split or cut_samples
        self._count = count or (count_samples if split is None else self._count_by_length)
        self._glues = split is None
        self._iterator: Iterator[Batch] | None = None
        self._passes = 0  # over the loader, so far
        self._started_from: RandomState = {}  # random states at the epoch's start
        self._fetched = 0  # batches taken from the loader this epoch
        self._counted = 0  # samples in them
        self._ended = False  # the loader has no more
        self._pieces: deque[_Piece] = deque()  # fetched and not given out
        self._waiting = 0  # samples in the pieces
        self._learned: int | None = None  # samples of a whole epoch that was seen
        if split is not None and count is None and None in (self.batch_size, self.samples):
            raise SettingError("split= needs count= where the loader does not say its sizes")

    @property
    def batch_size(self) -> int | None:
        """Samples in one of the loader's own batches; None where it does not say."""
        sampler = getattr(self.loader, "batch_sampler", None)
        size = getattr(self.loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        return size if isinstance(size, int) else None

    @property
    def samples(self) -> int | None:
        """Samples in one epoch; None where the loader does not say, until one has been seen."""
        sampler = getattr(self.loader, "batch_sampler", None)
        inner = getattr(sampler, "sampler", None)
        if not isinstance(self.loader, DataLoader) or not isinstance(inner, Sized):
            return self._learned
        total, size = len(inner), self.batch_size
        drops = getattr(sampler, "drop_last", False)
        return total - total % size if drops and size else total

    @property
    def given_out(self) -> int:
        """Samples of this epoch that steps have taken."""
        return self._counted - self._waiting

    @property
    def open(self) -> bool:
        """Whether an epoch has started and not ended."""
        return self._iterator is not None

    def start(self, epoch: int) -> None:
        """Starts a pass over the loader and tells its sampler and data set the epoch."""
        self._started_from = self._random_state()
        self._begin(epoch)

    def has_step(self, plan: BatchPlan) -> bool:
        """Whether another step can be cut; ends the epoch where it cannot."""
        self._read_until(plan.batch_size if self.tail == "drop" else 1)
        if self._waiting >= (plan.batch_size if self.tail == "drop" else 1):
            return True
        self._close()
        return False

    def step(self, plan: BatchPlan, least: int, most: int | None = None) -> "StepBatches":
        """The micro-batches of one optimizer step.

        Args:
            plan: how the step is cut.
            least: fewest samples that the step after it may be left with.
            most: upper bound of a step in samples, or None.
        """
        return StepBatches(self, plan, least, most)

    def state_dict(self) -> dict[str, Any]:
        """Where the pass stands: what was fetched, what is not given out, how it was shuffled.

        No sample is saved: those that wait are fetched again, from the random states that they
        were fetched with.
        """
        first = self._pieces[0] if self._pieces else None
        waiting = {piece.number: piece.fetched_from for piece in self._pieces}
        return {
            "open": self.open,
            "passes": self._passes,
            "samples": self.samples,
            "fetched": self._fetched,
            "ended": self._ended,
            "waiting_from": self._fetched if first is None else first.number,
            "given_out": 0 if first is None else first.start,
            "fetched_from": [restorable(state) for state in waiting.values()],
            "started_from": self._started_from,
            "generators": self._generator_states(),
        }

    def load_state_dict(self, state: dict[str, Any], epoch: int) -> None:
        """Goes on in the middle of a pass: replays the loader up to the samples that waited.

        Raises:
            StateError: the loader is not the one of the state.
        """
        self._close()
        self._passes, self._learned = state["passes"], state["samples"]
        if state["open"]:
            if None not in (self.samples, state["samples"]) and self.samples != state["samples"]:
                raise StateError(
                    f"the loader has {self.samples} samples, the saved one had "
                    f"{state['samples']}; resume with the same data"
                )
            self._replay(state, epoch)
        self._restore_generators(state["generators"])

    # one pass

    def _replay(self, state: dict[str, Any], epoch: int) -> None:
        self._started_from = state["started_from"]
        if getattr(self.loader, "persistent_workers", False) and self._passes > 1:
            iter(self.loader)  # only the first pass of persistent workers draws a seed for them
            warnings.warn(
                "persistent workers keep random states of their own, which are not restored: what "
                "they draw at random differs from the interrupted run",
                stacklevel=4,
            )
        restore_random_state(self._started_from["random"])
        self._restore_generators(self._started_from["generators"])
        self._passes -= 1
        self._begin(epoch)
        before = torch.get_rng_state()
        for _ in range(state["waiting_from"]):
            self._fetch_again(state["fetched"])
            self._waiting -= self._pieces.pop().samples
        if not torch.equal(before, torch.get_rng_state()):
            self._warn_of_draws()
        for fetched_from in state["fetched_from"]:
            restore_random_state(fetched_from)
            self._fetch_again(state["fetched"])
        if state["given_out"]:
            head = self._pieces.popleft()
            self._pieces.appendleft(self._cut(head, state["given_out"])[1])
            self._waiting -= state["given_out"]
        self._ended = state["ended"]

    def _fetch_again(self, fetched: int) -> None:
        if not self._fetch():
            raise StateError(
                f"the loader has only {self._fetched} batches, the saved one had at least "
                f"{fetched}; resume with the same data and batch size"
            )

    def _warn_of_draws(self) -> None:
        """A stream's own random state cannot be brought back where the model draws in between."""
        data = getattr(self.loader, "dataset", None)
        if data is None or isinstance(data, IterableDataset):
            warnings.warn(
                "the loader draws from torch's global generator between its batches; where the "
                "model draws too, the order of the data differs from the interrupted run: give the "
                "loader a torch.Generator of its own, or workers",
                stacklevel=5,
            )

    def _begin(self, epoch: int) -> None:
        for holder in [*self._parts(), getattr(self.loader, "dataset", None)]:
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)
        self._passes += 1
        self._fetched, self._counted, self._ended = 0, 0, False
        self._iterator = iter(self.loader)

    def _close(self) -> None:
        if self._ended:
            self._learned = self._counted
        self._iterator = None
        self._pieces.clear()
        self._waiting = self._fetched = 0

    def _read_until(self, samples: int) -> None:
        """Fetches batches until so many samples wait, or the loader ends."""
        while self._waiting < samples and not self._ended:
            self._ended = not self._fetch()

    def _fetch(self) -> bool:
        """Takes one batch from the loader; False where there is none."""
        assert self._iterator is not None
        fetched_from = raw_random_state()
        try:
            batch = next(self._iterator)
        except StopIteration:
            return False
        samples = self._count(batch)
        if self._fetched == 0:
            self._check_first(samples)
        self._pieces.append(_Piece(batch, samples, 0, self._fetched, fetched_from))
        self._fetched += 1
        self._counted += samples
        self._waiting += samples
        return True

    def _take(self, samples: int) -> tuple[Batch, int]:
        """The next `samples` samples, or fewer where they cannot be glued together."""
        parts: list[_Piece] = []
        missing = samples
        while missing:
            piece = self._pieces.popleft()
            if piece.samples > missing:
                piece, rest = self._cut(piece, missing)
                self._pieces.appendleft(rest)
            if piece.samples:
                parts.append(piece)
            missing -= piece.samples
        glued = parts[0].batch
        if len(parts) > 1:
            glued = glue_samples([part.batch for part in parts]) if self._glues else None
        if glued is None:
            self._pieces.extendleft(reversed(parts[1:]))
            glued, samples = parts[0].batch, parts[0].samples
        self._waiting -= samples
        return glued, samples

    def _cut(self, piece: "_Piece", samples: int) -> tuple["_Piece", "_Piece"]:
        head = self._split(piece.batch, 0, samples)
        tail = self._split(piece.batch, samples, piece.samples)
        return (
            replace(piece, batch=head, samples=samples),
            replace(
                piece, batch=tail, samples=piece.samples - samples, start=piece.start + samples
            ),
        )

    def _count_by_length(self, batch: Batch) -> int:
        """Full batches, and a last one of what is left of the known length."""
        assert self.batch_size is not None
        assert self.samples is not None
        return min(self.batch_size, self.samples - self._counted)

    def _check_first(self, count: int) -> None:
        """A map-style loader's first batch is full, so another size is no sample axis."""
        if self.batch_size is None or self.samples is None:
            return
        if count != min(self.batch_size, self.samples):
            raise BatchError(
                f"the first batch reads as {count} samples, the loader's batch size is "
                f"{self.batch_size}: its first axis is no sample axis; wrap the loader: "
                "Batches(loader, split=lambda batch, lo, hi: ..., count=lambda batch: ...)"
            )

    # what the order of the samples hangs on

    def _parts(self) -> list[Any]:
        sampler = getattr(self.loader, "batch_sampler", None)
        inner = getattr(sampler, "sampler", None) or getattr(self.loader, "sampler", None)
        return [part for part in (self.loader, sampler, inner) if part is not None]

    def _generators(self) -> list[torch.Generator]:
        found = [getattr(part, "generator", None) for part in self._parts()]
        unique = {id(g): g for g in found if isinstance(g, torch.Generator)}
        return list(unique.values())

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _restore_generators(self, states: list[torch.Tensor]) -> None:
        generators = self._generators()
        if len(generators) != len(states):
            raise StateError(
                f"the loader has {len(generators)} generators of its own, the saved one had "
                f"{len(states)}; resume with the same generator="
            )
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state.cpu())

    def _random_state(self) -> RandomState:
        return {"random": random_state(), "generators": self._generator_states()}


@dataclass(frozen=True)
class _Piece:
    """A batch of the loader, or what is left of it."""

    batch: Batch
    samples: int
    start: int  # samples of the loader's batch that were before it
    number: int  # which one of the epoch it was
    fetched_from: RandomState  # random states before it was fetched


class StepBatches:
    """The micro-batches of one step, fetched as they are asked for.

    It looks ahead by one micro-batch and the least next step, so it knows the end of an epoch
    before it is too late to share the last samples.

    Yields (micro-batch, samples).
    """

    def __init__(self, batches: Batches, plan: BatchPlan, least: int, most: int | None) -> None:
        self.left = plan.batch_size  # samples still to come in this step
        self.taken = 0
        self._batches = batches
        self._plan = plan
        self._least = least
        self._most = most
        self._given = 0  # micro-batches

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        self._look_ahead()
        while self.left > 0:
            piece, samples = self._batches._take(self._next_size())
            self.left -= samples
            self.taken += samples
            self._given += 1
            self._look_ahead()  # before the yield: whether this was the last one is known by then
            yield piece, samples

    def _next_size(self) -> int:
        """What is left, spread evenly over the micro-batches that it needs."""
        pieces = max(1, self._unmade(), -(-self.left // self._plan.micro))
        return max(1, -(-self.left // pieces))

    def _look_ahead(self) -> None:
        rest = self._batches
        rest._read_until(min(self.left, self._plan.micro) + self._least + self._unmade())
        after = rest._waiting - self.left
        if rest._ended and (after < 0 or (0 < after < self._least and rest.tail == "share")):
            self._recut(rest._waiting)

    def _recut(self, waiting: int) -> None:
        """Too few samples are left after this step: take them all, or share with the next."""
        total = self.taken + waiting
        if self._most is None or total <= self._most or waiting <= self.left:
            self.left = waiting
            return
        first = self.taken + (self._unmade() if self._given else 1)
        ours = max(first, min(total - total // 2, total - self._least))
        self.left = min(waiting, ours - self.taken)

    def _unmade(self) -> int:
        """Micro-batches of the plan that are still to come."""
        return max(0, self._plan.accumulation - self._given)
