"""Re-cuts any loader's batches into the plan's micro-batches: no sample lost, none twice."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bigbatch.data.collate import Batch
from bigbatch.data.loader_state import ResumableLoader
from bigbatch.data.micro_batches import SamplePass, StepBatches
from bigbatch.data.rank_consistency import HostCollectives, samples_of_rank
from bigbatch.data.rng_state import random_state, restore_random_state, same_random_state
from bigbatch.data.sample_buffer import SampleBuffer
from bigbatch.data.token_steps import TokenPass, TokenStep
from bigbatch.errors import SettingError, StateError
from bigbatch.policies.plan import BatchPlan
from bigbatch.setting_types import Count, Remainder, Unit, checked
from bigbatch.state_checks import loads_state


class Batches:
    """Cuts the batches of a loader along their samples, in order, into micro-batches of any size.

    A change of batch size takes effect with the next step: what the loader has already prefetched
    is cut again, never thrown away. Cutting makes views; samples are copied, once, only if a
    micro-batch spans two of the loader's batches, or if a rank has several virtual ranks.
    Batches whose shapes differ are cut but never concatenated, so a micro-batch may then be smaller
    than planned. A loader that writes its batches into the same memory is found by its first ones,
    and each is copied. A tensor that is the same in two batches belongs to all samples, and is not
    cut.

    On several ranks each has a loader of its own, of every W-th sample (DistributedSampler,
    `ElasticDistributedSampler`), and all take equally many micro-batches of a step. Samples are
    assigned to v virtual ranks: those of a step in turn, and a real rank has v / W of them. So the
    groups that are compared are the same on any number of ranks that divides v.

    Args:
        loader: any iterable of batches that can be iterated once per epoch; or a function that
            draws one batch, without end, from the global generators of torch, NumPy or Python.
        remainder: what happens to the last samples of an epoch if they are too few for a step.
            "share": they join the last step, or are shared by the last two, so that the steps keep
            their bounds if any cut can. "step": they are a step by themselves. In both, fewer
            than one for each virtual rank join the last step, even if that makes it, or a
            micro-batch of one sample, larger than its bound. "drop": an incomplete last step is
            left out.
        virtual_ranks: v, a multiple of the ranks; default: the ranks.
        split: (batch, lo, hi) -> samples lo to hi, for batches whose leaves do not share their
            first size. Such batches are not concatenated.
        count: batch -> number of samples, with `split`.
        packed: whether a batch is one row of packed sequences (padding-free training): a mapping of
            tensors (1, tokens, ...) with `cu_seq_lens_q`, `cu_seqlens` or `position_ids` that start
            again, as transformers' `DataCollatorWithFlattening` makes. The sequences are the
            samples: batches are cut and joined at their boundaries.
        unit: what sizes count, in the loop, its policy, schedule and log. "tokens": a micro-batch
            has as many whole samples as come nearest to its tokens; the tokens of a sample are its
            length if `packed`, else those that `attention_mask` counts, else the second axis.
    Raises:
        SettingError: the loader can be iterated only once, an option is unknown, or the number of
            samples is; or options that exclude each other.
    Example:
        >>> import torch
        >>> batches = Batches([torch.arange(4), torch.arange(4, 6)])
        >>> batches.start(epoch=0)
        >>> [m.batch.tolist() for m in batches.step(BatchPlan(1, 3, 2), min_batch=1)]
        [[0, 1, 2], [3, 4, 5]]
    """

    @checked
    def __init__(
        self,
        loader: Iterable[Batch] | Callable[[], Batch],
        *,
        remainder: Remainder = "share",
        virtual_ranks: Count | None = None,
        split: Callable[[Batch, int, int], Batch] | None = None,
        count: Callable[[Batch], int] | None = None,
        packed: bool = False,
        unit: Unit = "samples",
    ) -> None:
        if (split is None) != (count is None):
            raise SettingError("split= and count= belong together; pass both, or neither")
        if split is not None and (packed or unit == "tokens"):
            raise SettingError(
                'split= cuts batches its own way, and packed=True and unit="tokens" theirs; leave '
                "one out"
            )
        if unit == "tokens" and virtual_ranks is not None:
            raise SettingError(
                'virtual_ranks= deals single samples, and unit="tokens" cuts by tokens; leave one '
                "out"
            )
        self.remainder, self.unit, self.packed = remainder, unit, packed
        self.place: Callable[[Batch], Batch] | None = None  # moves a micro-batch
        self._virtual_ranks = virtual_ranks
        self._loader = ResumableLoader(loader)
        counts_samples = unit == "samples"
        self._buffer = SampleBuffer(
            self._loader, split, count, packed=packed, counts_samples=counts_samples
        )
        self._collectives = HostCollectives()
        self._pass = SamplePass(self._buffer, self._collectives, virtual_ranks or 1, remainder)
        self._token_pass = TokenPass(self._buffer, self._collectives, remainder)
        self._total = self._loader.length  # samples of a whole pass over all ranks, if stated
        self._counted: int | None = None  # samples of a pass that was read to its end
        self._unread: list[int] = []  # samples of each rank that stay unread in this pass
        self._has_warned = False

    @property
    def virtual_ranks(self) -> int:
        """Ranks to which the samples of a step are assigned in turn."""
        return self._pass.virtual_ranks

    @property
    def batch_size(self) -> int | None:
        """Samples in one of the loader's own batches; None if it does not say, or of tokens."""
        return self._loader.batch_size if self.unit == "samples" else None

    @property
    def samples(self) -> int | None:
        """Samples in one epoch over all ranks; None of tokens, or until a pass has ended."""
        if self.unit == "tokens":
            return None
        return self._counted if self._total is None else self._total

    @property
    def consumed(self) -> int:
        """Samples of this pass that steps have taken, over all ranks."""
        return self._pass.consumed

    @property
    def _distinct(self) -> int | None:
        """Samples in one epoch without those that a sampler repeats."""
        samples, distinct = self.samples, self._loader.distinct
        return samples if samples is None or distinct is None else min(samples, distinct)

    @property
    def order(self) -> str:
        """What determines the order of the samples, in words."""
        return self._loader.order

    @property
    def open(self) -> bool:
        """Whether an epoch has started and not ended."""
        return self._buffer.open

    def share(self, collectives: HostCollectives, *, lockstep: bool) -> None:
        """Several ranks take the steps together from now on. Collective.

        Raises:
            SettingError: `virtual_ranks` is no multiple of them, or needs batches that can be
                concatenated; or a sampler assigns samples to another number of ranks.
        """
        ranks, virtual_ranks = collectives.ranks, self._virtual_ranks or collectives.ranks
        self._collectives = collectives
        self._buffer.close()  # of another training
        if virtual_ranks % ranks:
            raise SettingError(
                f"virtual_ranks={virtual_ranks} is no multiple of the {ranks} ranks; "
                "choose one that every number of ranks you will use divides"
            )
        if virtual_ranks > ranks and not self._buffer.concatenates:
            raise SettingError(
                "virtual_ranks beyond the ranks deals single samples, which split= cannot"
            )
        self._buffer.place = self.place
        self._pass = SamplePass(self._buffer, collectives, virtual_ranks, self.remainder, lockstep)
        self._token_pass = TokenPass(self._buffer, collectives, self.remainder, lockstep)
        self._agree_on_total()
        padding = self._loader.padding
        if padding and ranks > 1 and collectives.process == 0:
            warnings.warn(
                f"the sampler repeats {padding} samples in every epoch to give all ranks as many; "
                "ElasticDistributedSampler does not",
                stacklevel=4,
            )

    def start(self, epoch: int) -> None:
        """Starts a pass and sets the epoch of sampler and data set. Collective."""
        self._buffer.begin(epoch)
        self._agree_on_total()
        self._pass.consumed, self._pass.end = 0, self._total
        self._token_pass.start()

    def step(
        self,
        plan: BatchPlan,
        min_batch: int,
        max_batch: int | None = None,
        min_rows: int = 1,
        max_micro: int | None = None,
    ) -> StepBatches | TokenStep | None:
        """The micro-batches of the next optimizer step; None if the pass is over.

        Collective if a loader does not say its length.

        Args:
            plan: how the step is cut, among the virtual ranks.
            min_batch: fewest samples of the step after it.
            max_batch: upper bound of a step in samples, or None.
            min_rows: fewest rows (one sample of every virtual rank) of a last step that
                remainder="step" makes.
            max_micro: most tokens in one backward, if tokens are the unit; default: the plan's.
        """
        if self.unit == "tokens":
            return self._token_step(plan, max_micro or plan.micro, min_rows)
        if self._collectives.ranks > 1 and self._total is None and not self._loader.endless:
            ahead = plan.batch_size + max(min_batch, self.virtual_ranks)
            self._unread = self._pass.agree_on_end(ahead) or self._unread
        fewest = plan.batch_size if self.remainder == "drop" else self.virtual_ranks
        remaining = self._pass.remaining(fewest)
        if remaining is not None and remaining < fewest:
            self._counted = self._counted if self._pass.end is None else self._pass.end
            self._buffer.close()
            unread, self._unread = self._unread, []
            if any(unread):
                self._warn_uneven(unread)
            return None
        return StepBatches(self._pass, plan, min_batch, max_batch, min_rows)

    def _token_step(self, plan: BatchPlan, max_micro: int, min_rows: int) -> TokenStep | None:
        step = self._token_pass.step(plan, max_micro, min_rows)
        if step is None:
            self._buffer.close()
            if any(self._token_pass.unread) and self._collectives.ranks > 1:
                self._warn_uneven(self._token_pass.unread)
        return step

    @contextmanager
    def peek(self, samples: int, epoch: int) -> Iterator[tuple[SampleBuffer, int]]:
        """Reads the next samples of this rank, which later steps get as if nothing had been read.

        What was fetched waits in memory for the steps. If fetching drew random numbers, or a pass
        had to be started for it, the samples are dropped at the end of the block and the loader is
        put back to its position, as after a resumption. Random states are those of before.

        Returns:
            The buffer to `peek` at them, and how many were read; fewer at the end of a pass.
        Raises:
            SettingError: between two passes of persistent workers, which draw numbers of their own.
        """
        if not self.open and self._loader.keeps_workers:
            raise SettingError(
                "between two passes the next samples cannot be read without a trace, since the "
                "loader's persistent workers draw random numbers of their own: do it inside "
                "`for step in train`, or set persistent_workers=False"
            )
        buffer, shared = self._buffer, self._pass
        before, generators = random_state(), self._loader.generator_states()
        saved = self.open, buffer.has_stated_sizes, buffer.state_dict()
        ends = self._total, self._counted, shared.consumed, shared.end
        traceless = False
        try:
            if not self.open:
                self.start(epoch)
            buffer.read_until(samples, notes_end=False)
            buffer.examine(0)
            traceless = (
                saved[:2] == (True, buffer.has_stated_sizes)
                and same_random_state(before, random_state())
                and all(map(torch.equal, generators, self._loader.generator_states()))
            )
            yield buffer, min(samples, buffer.waiting)
        finally:
            if not traceless:
                self._rewind(saved[2], epoch, is_open=saved[0])
                self._total, self._counted, shared.consumed, shared.end = ends
            restore_random_state(before)

    def _rewind(self, stream: dict[str, Any], epoch: int, *, is_open: bool) -> None:
        """Puts the loader back to a position of this rank; nothing is communicated."""
        self._buffer.close()
        self._loader.set_epoch(epoch)
        if is_open:
            self._buffer.load_state_dict(stream, epoch)
        else:
            self._loader.resume_between_passes(stream["loader"])

    def is_complete(self, samples: int, plan: BatchPlan) -> bool:
        """Whether a step of so many samples was as large as planned, or a whole pass."""
        if self.unit == "tokens":
            return self._token_pass.is_complete
        return samples in (plan.batch_size, self.consumed)

    def state_dict(self) -> dict[str, Any]:
        """The position in the pass: "pass" for all ranks, "stream" for this one."""
        position = {
            "open": self.open,
            "consumed": self.consumed,
            "samples": self._distinct,
            "order": self.order,
            "unit": self.unit,
        }
        return {"pass": position, "stream": self._buffer.state_dict()}

    @loads_state
    def load_state_dict(self, state: dict[str, Any], epoch: int, *, same_rank: bool = True) -> None:
        """Resumes in the middle of a pass. Collective.

        Args:
            state: from `state_dict`.
            epoch: number of the pass.
            same_rank: whether the state is of this rank, among as many. Else the position of all
                ranks is taken, and the loader's order must be the same on any number of them.
        Raises:
            StateError: the loader is not the one of the state.
        """
        self._buffer.close()
        self._loader.set_epoch(epoch)
        self._agree_on_total()
        position, stream = state["pass"], state["stream"]
        if (unit := position.get("unit", "samples")) != self.unit:
            raise StateError(
                f"the saved run counts {unit}, and this one {self.unit}: its sizes mean another "
                f'number; resume with Batches(unit="{unit}")'
            )
        self._counted, self._pass.consumed = position["samples"], position["consumed"]
        if not position["open"]:
            if same_rank:
                self._loader.resume_between_passes(stream["loader"])
            return
        if self._total is not None and position["samples"] not in (None, self._distinct):
            raise StateError(
                f"the loader has {self._distinct} samples, the saved one had "
                f"{position['samples']}; resume with the same data"
            )
        if not stream["as_said"] and (stream["jumped"] or not same_rank):
            raise StateError(
                "the loader gave fewer samples than it says (a collate function that leaves some "
                "out?), so the position in its order is unknown on another number of ranks, or "
                "after a change of the batch size; resume between two epochs"
            )
        if same_rank:
            self._buffer.load_state_dict(stream, epoch)
            self._token_pass.start(has_begun=True)
        elif self.unit == "tokens":
            raise StateError(
                'unit="tokens": ranks take different numbers of samples, so a pass continues only '
                "with as many ranks as it began with; resume between two epochs"
            )
        else:
            self._skip(position, epoch)
        self._pass.end = self._total

    def _agree_on_total(self) -> None:
        """Raises SettingError, on every rank alike, if samples would come twice or never."""
        length, ranks = self._loader.length, self._collectives.ranks
        subject, sampler_rank = "their samplers and numbers of samples", self._loader.rank
        rows = self._collectives.all_gather(
            self._loader.num_replicas or ranks,
            -1 if length is None else length,
            -1 if sampler_rank is None else sampler_rank,
            subject=subject,
        )
        for rank, (num_replicas, *_) in enumerate(rows):
            if num_replicas != ranks:
                raise SettingError(
                    f"the sampler of rank {rank} deals samples to num_replicas={num_replicas:.0f} "
                    f"ranks, and {ranks} share the model; give it num_replicas={ranks} and the "
                    "rank among them"
                )
        rows = self._collectives.of_ranks(rows, subject)
        lengths = [round(length) for _, length, _ in rows]
        total, shortest = sum(lengths), min(lengths)
        if shortest < 0:
            self._total = None
        elif lengths == [samples_of_rank(total, rank, ranks) for rank in range(ranks)]:
            self._total = total
        else:
            self._total = ranks * shortest
            self._warn_uneven([length - shortest for length in lengths])

    def _warn_uneven(self, unread: list[int]) -> None:
        """Warns once on rank 0, counting the samples of each rank that no step takes."""
        if self._collectives.process == 0 and not self._has_warned:
            warnings.warn(
                f"the ranks have unequally many samples, and the steps end together, so {unread} "
                "of them (at least) stay unread in an epoch; shard them evenly, or use an "
                "ElasticDistributedSampler",
                stacklevel=4,
            )
        self._has_warned = True

    def _skip(self, position: dict[str, Any], epoch: int) -> None:
        """Resumes a pass that other ranks began."""
        rank, ranks = self._collectives.rank, self._collectives.ranks
        is_ordered = self._loader.ordered and self.order == position["order"]
        if not is_ordered and not self._loader.endless:
            warnings.warn(
                f"the order of this pass was {position['order']} and is {self.order}: on "
                "another number of ranks some of its samples come twice and others never; an "
                "ElasticDistributedSampler has one order for any number of ranks",
                stacklevel=4,
            )
        consumed: int = position["consumed"]
        self._buffer.skip(epoch, consumed, samples_of_rank(consumed, rank, ranks))
