"""What a loader says of itself, and how a pass over it is taken up again."""

import warnings
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from bigbatch.data.collate import REMEDY, Batch
from bigbatch.data.rng_state import random_state, restore_random_state
from bigbatch.data.sampler import ElasticDistributedSampler
from bigbatch.errors import BatchError, SettingError, StateError


class ResumableLoader:
    """The user's loader: sizes, passes, and what the order of its samples hangs on.

    A pass resumes in one of three ways: an `ElasticDistributedSampler` begins at a position; a
    loader with a state of its own (StatefulDataLoader) loads it; any other is replayed from the
    random state that the pass began with.

    Raises:
        SettingError: it can be iterated only once.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        if isinstance(batches, Iterator):
            raise SettingError("the loader is used up after one pass; give one that starts again")
        self.batches = batches
        self._started_from: dict[str, Any] = {}  # random states at the pass's start
        self._keeps_workers = isinstance(batches, DataLoader) and batches.persistent_workers
        self._found_workers = False  # when the pass started
        sampler = getattr(batches, "sampler", None)
        self._batch_sampler = getattr(batches, "batch_sampler", None)
        if self._batch_sampler is None and hasattr(sampler, "sampler"):  # with batch_size=None
            self._batch_sampler = sampler
        self._sampler = getattr(self._batch_sampler, "sampler", sampler)

    @property
    def batch_size(self) -> int | None:
        """Samples in one of its batches; None where it does not say."""
        size = getattr(self.batches, "batch_size", None)
        size = size or getattr(self._batch_sampler, "batch_size", None)
        return size if isinstance(size, int) else None

    @property
    def length(self) -> int | None:
        """Samples in one pass on this rank; None where it does not say, or reads a stream."""
        sampler = getattr(self._batch_sampler, "sampler", None)
        if not isinstance(self.batches, DataLoader) or not isinstance(sampler, Sized):
            return None
        total, size = len(sampler), self.batch_size
        drops = getattr(self._batch_sampler, "drop_last", False)
        return total - total % size if drops and size else total

    def require_samples(self, count: int, before: int = 0, remedy: str = REMEDY) -> None:
        """Raises BatchError where a first batch cannot have so many; `before` were left out.

        A map-style loader's is full, so another size is no sample axis.
        """
        size, length = self.batch_size, self.length
        if size and length is not None and count != min(size, length - before):
            raise BatchError(
                f"the first batch reads as {count} samples, the loader's batch size is {size}: its "
                f"first axis is no sample axis, or samples were left out; {remedy}"
            )

    @property
    def _ordering(self) -> Any:
        """The sampler, where what it gives are samples and not batches."""
        return None if self.batch_size is None else self._sampler

    @property
    def ledger(self) -> ElasticDistributedSampler | None:
        """The sampler, where it is one that can begin anywhere."""
        whole = not getattr(self._batch_sampler, "drop_last", False)
        plain = type(self._batch_sampler) is BatchSampler or self._batch_sampler is None
        ledger = isinstance(self._ordering, ElasticDistributedSampler) and whole and plain
        return self._ordering if ledger else None

    @property
    def ordered(self) -> bool:
        """Whether the order is one for any number of ranks, by seed and epoch."""
        return isinstance(self._ordering, (ElasticDistributedSampler, DistributedSampler))

    @property
    def num_replicas(self) -> int | None:
        """How many ranks the sampler deals samples to; None where it does not say."""
        sampler: Any = self._sampler
        return sampler.num_replicas if self.ordered else None

    @property
    def order(self) -> str:
        """What decides on the order, in words."""
        if not self.ordered:
            return type(self.batches if self._sampler is None else self._sampler).__name__
        sampler: Any = self._sampler
        return f"{type(sampler).__name__}(seed={sampler.seed}, shuffle={sampler.shuffle})"

    @property
    def distinct(self) -> int | None:
        """Samples of the data set, where a sampler may repeat some to give all ranks as many."""
        if not isinstance(self._ordering, DistributedSampler):
            return None
        return len(self._ordering.dataset)  # type: ignore[arg-type]

    @property
    def padding(self) -> int:
        """Samples that are repeated so."""
        return 0 if self.distinct is None else max(0, self._ordering.total_size - self.distinct)

    def begin(self, epoch: int, position: int = 0) -> Iterator[Batch]:
        """A new pass, of an elastic sampler from this position; sets the epoch of both."""
        self._started_from = {"random": random_state(), "generators": self._generator_states()}
        self._found_workers = self._has_workers
        return self._begin(epoch, position)

    def own_state(self) -> dict[str, Any] | None:
        """Where a loader that can say so stands."""
        load = getattr(self.batches, "load_state_dict", None)
        return self.batches.state_dict() if callable(load) else None  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """What the order of the present pass and of later ones hangs on."""
        return {
            "started_from": self._started_from,
            "found_workers": self._found_workers,
            "has_workers": self._has_workers,
            "generators": self._generator_states(),
        }

    def resume(
        self, state: dict[str, Any], epoch: int, position: int | None, own: dict[str, Any] | None
    ) -> tuple[Iterator[Batch], bool]:
        """The pass of a state of this rank, and whether it begins at the position, or at its start.

        Args:
            state: from `state_dict`.
            epoch: of the pass.
            position: samples of this rank before the first batch that is wanted; None where they
                are not known, the loader having left some out.
            own: of `own_state`, from before that batch.
        """
        self._started_from = state["started_from"]
        self._found_workers = state["found_workers"]
        if self._found_workers:
            warnings.warn(
                "persistent workers keep random states of their own, which are not restored: what "
                "they draw at random differs from the interrupted run",
                stacklevel=5,
            )
        self._have_workers(self._found_workers)
        restore_random_state(self._started_from["random"])
        self.restore_generators(self._started_from["generators"])
        if self.ledger is not None and position is not None:
            return self._begin(epoch, position * self.ledger.num_replicas), True
        if own is not None:
            self.batches.load_state_dict(own)  # type: ignore[attr-defined]
        return self._begin(epoch), own is not None

    def restore_generators(self, states: list[torch.Tensor]) -> None:
        """Puts the loader's own generators back.

        Raises:
            StateError: it has others.
        """
        generators = self._generators()
        if len(generators) != len(states):
            raise StateError(
                f"the loader has {len(generators)} generators of its own, the saved one had "
                f"{len(states)}; resume with the same generator="
            )
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state.cpu())

    def between_passes(self, state: dict[str, Any]) -> None:
        """Resumes between two passes."""
        self._have_workers(state["has_workers"])
        self.restore_generators(state["generators"])

    def warn_of_draws(self) -> None:
        """A stream's own random state cannot be brought back where the model draws in between."""
        data = getattr(self.batches, "dataset", None)
        if data is None or isinstance(data, IterableDataset):
            warnings.warn(
                "the loader draws from torch's global generator between its batches; where the "
                "model draws too, the order of the data differs from the interrupted run: give the "
                "loader a torch.Generator of its own, or workers",
                stacklevel=6,
            )

    def tell_epoch(self, epoch: int) -> None:
        """To sampler and data set."""
        for holder in [*self._parts(), getattr(self.batches, "dataset", None)]:
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)

    def _begin(self, epoch: int, position: int = 0) -> Iterator[Batch]:
        self.tell_epoch(epoch)
        if self.ledger is not None:
            self.ledger.start_at(position)
        iterator = iter(self.batches)
        return _OwnPass(iterator) if self._has_workers else iterator

    @property
    def _has_workers(self) -> bool:
        """Whether persistent workers are there from an earlier pass; their start draws a seed."""
        return self._keeps_workers and self.batches._iterator is not None  # type: ignore[attr-defined]

    def _have_workers(self, wanted: bool) -> None:
        """Starts them, or forgets them, so that the next pass draws what it drew."""
        if self._keeps_workers and wanted != self._has_workers:
            self.batches._iterator = iter(self.batches) if wanted else None  # type: ignore[attr-defined]

    def _parts(self) -> list[Any]:
        parts = (self.batches, self._batch_sampler, self._sampler)
        return [part for part in parts if part is not None]

    def _generators(self) -> list[torch.Generator]:
        found = [getattr(part, "generator", None) for part in self._parts()]
        unique = {id(g): g for g in found if isinstance(g, torch.Generator)}
        return list(unique.values())

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]


class _OwnPass(Iterator[Batch]):
    """A pass of persistent workers, who have one iterator for everybody.

    Raises:
        BatchError: somebody else began a pass, which has taken the rest of this one.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._indices = iterator._sampler_iter  # another one in every pass

    def __next__(self) -> Batch:
        if self._iterator._sampler_iter is not self._indices:
            raise BatchError(
                "somebody else iterated the loader in the middle of this pass, and its persistent "
                "workers serve one pass at a time: iterate another DataLoader there, or set "
                "persistent_workers=False"
            )
        return next(self._iterator)
