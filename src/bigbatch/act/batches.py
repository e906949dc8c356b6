"""Re-cuts any loader's batches into the plan's micro-batches: nothing lost, nothing twice."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from bigbatch.act.randomness import random_state, restore_random_state
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
        count: batch -> number of samples; belongs to `split`.
    Raises:
        SettingError: the loader can be iterated only once, an unknown `tail`, or `split` without
            `count`.
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
        if (split is None) != (count is None):
            raise SettingError("split and count describe the same batches; give both or neither")
        self.loader = loader
        self.tail = tail
        self._split = split or cut_samples
        self._count = count or count_samples
        self._glues = split is None
        self._iterator: Iterator[Batch] | None = None
        self._started_from: dict[str, Any] = {}  # random states at the epoch's start
        self._fetched = 0  # batches taken from the loader this epoch
        self._ended = False  # the loader has no more
        self._pieces: deque[tuple[Batch, int]] = deque()  # (batch, samples), not yet given out
        self._waiting = 0  # samples in the pieces

    @property
    def batch_size(self) -> int | None:
        """Samples in one of the loader's own batches; None where it does not say."""
        sampler = getattr(self.loader, "batch_sampler", None)
        size = getattr(self.loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        return size if isinstance(size, int) else None

    @property
    def samples(self) -> int | None:
        """Samples in one epoch; None where the loader does not say."""
        sampler = getattr(self.loader, "batch_sampler", None)
        inner = getattr(sampler, "sampler", None)
        if not isinstance(self.loader, DataLoader) or not isinstance(inner, Sized):
            return None
        total, size = len(inner), self.batch_size
        drops = getattr(sampler, "drop_last", False)
        return total - total % size if drops and size else total

    @property
    def open(self) -> bool:
        """Whether an epoch has started and not ended."""
        return self._iterator is not None

    def start(self, epoch: int) -> None:
        """Starts a pass over the loader and tells its sampler the epoch."""
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
        """Where the pass stands: what was fetched, what is not given out, how it was shuffled."""
        return {
            "open": self.open,
            "fetched": self._fetched,
            "ended": self._ended,
            "waiting": list(self._pieces),
            "started_from": self._started_from,
            "generators": self._generator_states(),
        }

    def load_state_dict(self, state: dict[str, Any], epoch: int) -> None:
        """Goes on in the middle of a pass: replays the loader, then puts the samples back.

        Raises:
            StateError: the loader ends earlier than it did, so it is not the one of the state.
        """
        self._close()
        if state["open"]:
            self._started_from = state["started_from"]
            restore_random_state(self._started_from["random"])
            self._restore_generators(self._started_from["generators"])
            self._begin(epoch)
            assert self._iterator is not None
            for number in range(state["fetched"]):
                if next(self._iterator, None) is None:
                    raise StateError(
                        f"the loader has only {number} batches, the saved state has used "
                        f"{state['fetched']}; resume with the same data and batch size"
                    )
            self._fetched, self._ended = state["fetched"], state["ended"]
            self._pieces.extend((batch, n) for batch, n in state["waiting"])
            self._waiting = sum(n for _, n in self._pieces)
        self._restore_generators(state["generators"])

    # one pass

    def _begin(self, epoch: int) -> None:
        for holder in self._parts():
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)
        self._fetched, self._ended = 0, False
        self._iterator = iter(self.loader)

    def _close(self) -> None:
        self._iterator = None
        self._pieces.clear()
        self._waiting = self._fetched = 0

    def _read_until(self, samples: int) -> None:
        """Fetches batches until so many samples wait, or the loader ends."""
        assert self._iterator is not None
        while self._waiting < samples and not self._ended:
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._ended = True
                return
            count = self._count(batch)
            if self._fetched == 0:
                self._check_first(count)
            self._fetched += 1
            if count:
                self._pieces.append((batch, count))
                self._waiting += count

    def _take(self, samples: int) -> tuple[Batch, int]:
        """The next `samples` samples, or fewer where they cannot be glued together."""
        parts: list[tuple[Batch, int]] = []
        missing = samples
        while missing:
            batch, count = self._pieces.popleft()
            if count > missing:
                self._pieces.appendleft((self._split(batch, missing, count), count - missing))
                batch, count = self._split(batch, 0, missing), missing
            parts.append((batch, count))
            missing -= count
        glued = parts[0][0]
        if len(parts) > 1:
            glued = glue_samples([batch for batch, _ in parts]) if self._glues else None
        if glued is None:
            self._pieces.extendleft(reversed(parts[1:]))
            glued, samples = parts[0]
        self._waiting -= samples
        return glued, samples

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
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state.cpu())

    def _random_state(self) -> dict[str, Any]:
        return {"random": random_state(), "generators": self._generator_states()}


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
        planned = self._plan.accumulation - self._given
        pieces = max(1, planned, -(-self.left // self._plan.micro))
        return max(1, -(-self.left // pieces))

    def _look_ahead(self) -> None:
        rest = self._batches
        rest._read_until(min(self.left, self._plan.micro) + self._least)
        after = rest._waiting - self.left
        if rest._ended and (after < 0 or (0 < after < self._least and rest.tail == "share")):
            self._recut(rest._waiting)

    def _recut(self, waiting: int) -> None:
        """Too few samples are left after this step: take them all, or share with the next."""
        total = self.taken + waiting
        if self._most is None or total <= self._most or waiting <= self.left:
            self.left = waiting
            return
        unmade = max(0, self._plan.accumulation - self._given)
        ours = max(self.taken + unmade, min(total - total // 2, total - self._least))
        self.left = min(waiting, ours - self.taken)
