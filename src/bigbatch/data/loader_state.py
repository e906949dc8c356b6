"""Sizes and order of a loader, as far as it states them, and how a pass over it is resumed."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    default_collate,
)

from bigbatch.data.collate import REMEDY, Batch
from bigbatch.data.rng_state import random_state, restore_random_state, same_random_state
from bigbatch.data.sampler import ElasticDistributedSampler
from bigbatch.errors import BatchError, SettingError, StateError

_STATEFUL = ("state_dict", "load_state_dict")


class ResumableLoader:
    """The user's loader: its sizes, its passes, and the state that determines its order.

    A pass resumes in one of three ways: an `ElasticDistributedSampler` begins at a position; a
    loader with a state of its own (StatefulDataLoader) loads it; any other is replayed from the
    random state that the pass began with. A function, which draws batches without end, has none.
    """

    def __init__(self, loader: Any) -> None:
        if isinstance(loader, Iterator):
            raise SettingError(
                "the loader is used up after one pass; give one that starts again, or the function "
                "that draws its batches"
            )
        self.batches = loader
        self.endless = callable(loader) and not isinstance(loader, Iterable)
        self._has_state = all(callable(getattr(loader, name, None)) for name in _STATEFUL)
        self._started_from: dict[str, Any] = {}  # random states at the pass's start
        # whether its workers, with random states of their own, live from pass to pass
        self.keeps_workers = isinstance(loader, DataLoader) and loader.persistent_workers
        self._had_workers = False  # when the pass started
        sampler = getattr(loader, "sampler", None)
        self._batch_sampler = getattr(loader, "batch_sampler", None)
        if self._batch_sampler is None and hasattr(sampler, "sampler"):  # with batch_size=None
            self._batch_sampler = sampler
        self._sampler = getattr(self._batch_sampler, "sampler", sampler)
        self._parts = loader, self._batch_sampler, self._sampler

    # read at each use, since the user may change the loader

    @property
    def _ordering(self) -> Any:
        """The sampler, if it gives samples and not batches."""
        return None if self.batch_size is None else self._sampler

    @property
    def _drops_last(self) -> bool:
        return bool(getattr(self._batch_sampler, "drop_last", False))

    @property
    def ordered(self) -> bool:
        """Whether seed and epoch alone determine one order for any number of ranks."""
        return isinstance(self._ordering, (ElasticDistributedSampler, DistributedSampler))

    @property
    def num_replicas(self) -> int | None:
        """Ranks to which the sampler assigns samples; None if unknown."""
        return self._ordering.num_replicas if self.ordered else None

    @property
    def rank(self) -> int | None:
        """The rank whose samples the sampler gives; None if unknown."""
        return self._ordering.rank if self.ordered else None

    @property
    def elastic_sampler(self) -> ElasticDistributedSampler | None:
        """The sampler, if it can begin at any position."""
        is_plain = type(self._batch_sampler) is BatchSampler or self._batch_sampler is None
        can_begin = isinstance(self._ordering, ElasticDistributedSampler) and is_plain
        return self._ordering if can_begin and not self._drops_last else None

    @property
    def batch_size(self) -> int | None:
        """Samples in one of its batches; None if unknown."""
        size = getattr(self.batches, "batch_size", None)
        size = size or getattr(self._batch_sampler, "batch_size", None)
        return size if isinstance(size, int) else None

    @property
    def length(self) -> int | None:
        """Samples in one pass on this rank; None if unknown, as for a stream."""
        sampler = getattr(self._batch_sampler, "sampler", None)
        if not isinstance(self.batches, DataLoader) or not isinstance(sampler, Sized):
            return None
        samples, size = len(sampler), self.batch_size
        return samples - samples % size if self._drops_last and size else samples

    @property
    def gives_new_memory(self) -> bool:
        """Whether every batch is known to have memory of its own: torch's collate makes it."""
        is_plain = getattr(type(self.batches), "__iter__", None) is DataLoader.__iter__
        return is_plain and self.batches.collate_fn is default_collate

    def require_samples(self, count: int, skipped: int = 0, remedy: str = REMEDY) -> None:
        """Raises BatchError if a first batch after `skipped` samples cannot have `count` of them.

        The first batch of a map-style loader is full, so an axis of another size is no sample axis.
        """
        size, length = self.batch_size, self.length
        if size and length is not None and count != min(size, length - skipped):
            raise BatchError(
                f"the first batch reads as {count} samples, the loader's batch size is {size}: its "
                f"first axis is no sample axis, or samples were left out; {remedy}"
            )

    @property
    def order(self) -> str:
        """What determines the order, in words."""
        source: Any = self.batches if self._sampler is None else self._sampler
        settings = f"(seed={source.seed}, shuffle={source.shuffle})" if self.ordered else ""
        return f"{type(source).__name__}{settings}"

    @property
    def distinct(self) -> int | None:
        """Samples of the data set, if a sampler may repeat some to give all ranks equally many."""
        repeats = isinstance(self._ordering, DistributedSampler)
        return len(self._ordering.dataset) if repeats else None

    @property
    def padding(self) -> int:
        """Samples that the sampler repeats."""
        return 0 if self.distinct is None else max(0, self._ordering.total_size - self.distinct)

    def begin(self, epoch: int, position: int = 0) -> Iterator[Batch]:
        """Begins a pass, of an elastic sampler at this position; sets the epoch."""
        self._started_from = {"random": random_state(), "generators": self.generator_states()}
        self._had_workers = self._has_workers
        return self._begin(epoch, position)

    def loader_state(self) -> dict[str, Any] | None:
        """The loader's own state, if it has one (StatefulDataLoader); an empty one if endless."""
        if self._has_state:
            own: dict[str, Any] = copy.deepcopy(self.batches.state_dict())  # some change it later
            return own
        return {} if self.endless else None

    def state_dict(self) -> dict[str, Any]:
        """The states that determine the order of the present pass and of later ones."""
        return {
            "started_from": self._started_from,
            "found_workers": self._had_workers,
            "has_workers": self._has_workers,
            "generators": self.generator_states(),
            "seed": getattr(self._sampler, "initial_seed", None),  # of accelerate's sampler
        }

    def resume(
        self,
        state: dict[str, Any],
        epoch: int,
        position: int | None,
        loader_state: dict[str, Any] | None,
    ) -> tuple[Iterator[Batch], bool]:
        """The pass of a state of this rank, and whether it begins at the position, or at its start.

        Args:
            state: from `state_dict`.
            epoch: number of the pass.
            position: samples of this rank before the batch to resume with; None if unknown because
                the loader left some out.
            loader_state: from `loader_state`, before that batch.
        """
        self._started_from = state["started_from"]
        self._had_workers = state["found_workers"]
        if self._had_workers:
            warnings.warn(
                "persistent workers keep random states of their own, which are not restored: what "
                "they draw at random differs from the interrupted run",
                stacklevel=5,
            )
        self._set_workers(self._had_workers)
        self._restore_seed(state)
        restore_random_state(self._started_from["random"])
        self.restore_generators(self._started_from["generators"])
        if self.elastic_sampler is not None and position is not None:
            return self._begin(epoch, position * self.elastic_sampler.num_replicas), True
        if loader_state:
            self.batches.load_state_dict(loader_state)
        return self._begin(epoch), loader_state is not None

    def restore_generators(self, states: list[torch.Tensor]) -> None:
        """Restores the loader's own generators."""
        generators = self._generators()
        if len(generators) != len(states):
            raise StateError(
                f"the loader has {len(generators)} generators of its own, the saved one had "
                f"{len(states)}; resume with the same generator="
            )
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state.cpu())

    def resume_between_passes(self, state: dict[str, Any]) -> None:
        """Resumes between two passes."""
        self._set_workers(state["has_workers"])
        self.restore_generators(state["generators"])
        self._restore_seed(state)

    @contextmanager
    def watch_draws(self, iterator: Any) -> Iterator[Iterator[Batch]]:
        """The iterator to replay a pass with; warns if its order is drawn between its batches.

        What the items of a map-style data set draw does not matter to the order.
        """
        dataset = getattr(self.batches, "dataset", None)
        is_map = hasattr(iterator, "_sampler_iter") and not isinstance(dataset, IterableDataset)
        watch = _DrawWatch(iterator._sampler_iter if is_map else iterator)
        if not is_map:
            yield watch
        else:
            iterator._sampler_iter = watch
            try:
                yield iterator
            finally:
                iterator._sampler_iter = watch.iterator
        if watch.drew:
            warnings.warn(
                "the loader draws its order from a global generator between its batches; if the "
                "model draws from it too, the order of the data differs from the interrupted run: "
                "give the loader a torch.Generator of its own, or workers",
                stacklevel=7,
            )

    def warn_of_position(self, drawn_from: dict[str, Any]) -> None:
        """Warns that no state says where a function continues whose batch took no random number."""
        if self.endless and same_random_state(drawn_from, random_state()):
            warnings.warn(
                "the function that draws the batches uses no global generator of torch, NumPy or "
                "Python, so the state has no position of it: restore what it reads or draws from "
                "yourself, or the run reads other data than the interrupted one",
                stacklevel=6,
            )

    def generator_states(self) -> list[torch.Tensor]:
        """The states of the loader's own generators."""
        return [generator.get_state() for generator in self._generators()]

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of sampler and data set."""
        holders: list[Any] = [*self._parts, getattr(self.batches, "dataset", None)]
        for holder in holders:
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)

    def _begin(self, epoch: int, position: int = 0) -> Iterator[Batch]:
        self.set_epoch(epoch)
        if self.elastic_sampler is not None:
            self.elastic_sampler.start_at(position)
        iterator = _drawn(self.batches) if self.endless else iter(self.batches)
        return _ExclusivePass(iterator) if self._has_workers else iterator

    @property
    def _has_workers(self) -> bool:
        """Whether persistent workers run since an earlier pass; their start draws a seed."""
        return self.keeps_workers and self.batches._iterator is not None

    def _restore_seed(self, state: dict[str, Any]) -> None:
        if (seed := state.get("seed")) is not None and self._sampler is not None:
            self._sampler.initial_seed = seed

    def _set_workers(self, running: bool) -> None:
        """Starts or drops the workers, so that the next pass draws as many random numbers."""
        if self.keeps_workers and running != self._has_workers:
            self.batches._iterator = iter(self.batches) if running else None

    def _generators(self) -> list[torch.Generator]:
        generators = [getattr(part, "generator", None) for part in self._parts]
        return list(dict.fromkeys(g for g in generators if isinstance(g, torch.Generator)))


def _drawn(draw: Callable[[], Batch]) -> Iterator[Batch]:
    """Batches that a function draws, without end."""
    while True:
        try:
            batch, fault = draw(), "gave an iterator"
        except StopIteration:
            batch, fault = iter(()), "ended with StopIteration"
        if isinstance(batch, Iterator):
            raise BatchError(
                f"the function that draws the batches {fault}, and each call has to give one "
                "batch, without end; pass what it iterates over, such as the DataLoader"
            )
        yield batch


class _DrawWatch(Iterator[Any]):
    """What an iterator gives, and whether it draws from a global generator after its first."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator
        self.drew = self._has_begun = False

    def __next__(self) -> Any:
        before = random_state() if self._has_begun and not self.drew else None
        self._has_begun = True
        try:
            return next(self.iterator)
        finally:
            if before is not None:
                self.drew = not same_random_state(before, random_state())


class _ExclusivePass(Iterator[Batch]):
    """A pass of persistent workers, which have one iterator for all passes."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._indices = iterator._sampler_iter  # another object in every pass

    def __next__(self) -> Batch:
        if self._iterator._sampler_iter is not self._indices:
            raise BatchError(
                "the loader was iterated elsewhere in the middle of this pass, and its persistent "
                "workers serve one pass at a time: iterate another DataLoader there, or set "
                "persistent_workers=False"
            )
        return next(self._iterator)
