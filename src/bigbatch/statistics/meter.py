"""Sees each micro-batch's gradient once, before it is summed away."""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from bigbatch.errors import GradientError, SettingError
from bigbatch.gradients import GradientSource, find_source
from bigbatch.gradients.dtypes import widest_float
from bigbatch.gradients.replaced_parameters import NO_GRADIENT, ReplacementCheck, has_gradient
from bigbatch.setting_types import Count, Coverage, checked
from bigbatch.statistics.accumulators import StepAccumulators
from bigbatch.statistics.confidence import Interval, jackknife, log_ratio
from bigbatch.statistics.half_batch_cosine import HalfBatchCosine
from bigbatch.statistics.noise_scale import (
    GradientStatistics,
    from_mean_losses,
    from_weighted_losses,
)
from bigbatch.statistics.sanity_checks import SanityChecks
from bigbatch.statistics.step_totals import StepTotals, unpack


class GradientMeter:
    """Measures gradient noise in anybody's loop; one read of each micro-batch's gradient.

    Each `backward()` is one micro-batch. After the last one, and before unscaling, clipping,
    `step()` or `zero_grad()`, `read` says how much they agreed. Works on plain models, compiled
    ones, under DistributedDataParallel and under fully_shard (FSDP2, HSDP): hand over the wrapped
    model, and call `read` on every rank.

    Args:
        model: whose parameters are measured, or an iterable of parameters.
        loss: what is called backward on. "weighted": the losses of a step sum to the mean loss of
            this rank (loss * n_d / N, the usual accumulation; N is then the same on every rank).
            "mean": each is the plain mean loss of its micro-batch.
        confidence: coverage of an interval for similarity and noise scale, 0.9 say; None for none.
            One more read of each gradient and 4 KB a micro-batch. How often it really holds the
            truth is in docs/benchmarks.md.
        per_layer: also measure each layer (module with parameters) by itself.
        half_batch_cosine: also take SimiGrad's own cosine of two half-batch gradients. Keeps
            one whole gradient more, and sends it where there are ranks.
        every: n, to measure every n-th step; no hook stays on between.
        scaler: the GradScaler of the losses, so that signal and noise come without its scale.
        source: how the model's gradients come about, where its wrappers do not say.
    Raises:
        SettingError: an option out of range, a model that cannot be measured, or nothing to.
    Source:
        docs/theory.md; the similarity is that of SimiGrad (Qin et al., NeurIPS 2021).
    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> with GradientMeter(model) as meter:
        ...     for gradient in (1.0, 3.0):
        ...         (model(torch.tensor([[gradient]])).sum() / 2).backward()
        ...     statistics = meter.read(samples=[8, 8])
        >>> statistics.grad_sqnorm, statistics.grad_variance
        (3.0, 16.0)
    """

    @checked
    def __init__(
        self,
        model: nn.Module | Iterable[Tensor],
        *,
        loss: Literal["weighted", "mean"] = "weighted",
        confidence: Coverage | None = None,
        per_layer: bool = False,
        half_batch_cosine: bool = False,
        every: Count = 1,
        scaler: GradScaler | None = None,
        source: GradientSource | None = None,
    ) -> None:
        self.loss = loss
        self.confidence = confidence
        self.every = every
        self.scaler = scaler
        self.step = 0  # steps since the meter was made
        self.source: GradientSource = source or find_source(model)
        if not any(p.requires_grad for p in self.source.parameters):
            raise SettingError("no parameter requires a gradient, so there is nothing to measure")
        by_layer = _by_layer(model) if per_layer else {}
        self._names = list(dict.fromkeys(by_layer.values()))  # of the layers, by number
        self._numbers = {p: self._names.index(name) for p, name in by_layer.items()}
        self._slots = ReplacementCheck(model) if isinstance(model, nn.Module) else None
        self._sums = StepAccumulators(
            self.source,
            self._numbers,
            sketches=confidence is not None,
            half_batch_cosine=half_batch_cosine,
        )
        self._sanity_checks = SanityChecks(loss, warns=self.source.rank == 0)
        self._listening = False
        self._listen()

    def __enter__(self) -> "GradientMeter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes the meter's hooks off the model."""
        self.source.close()

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Measures more parameters, from the next step on; as a layer, they are "others"."""
        self.source.add(parameters)
        self._number_others()

    def select(self, parameters: Iterable[Tensor]) -> None:
        """Measures these alone from the next step on; new ones are the layer "others" too."""
        self.source.select(parameters)
        self._number_others()

    def _number_others(self) -> None:
        new = [p for p in self.source.parameters if p not in self._numbers]
        if self._names and new:
            self._names = list(dict.fromkeys([*self._names, "others"]))
            self._numbers.update(dict.fromkeys(new, self._names.index("others")))

    def micro_batch(self) -> AbstractContextManager[None]:
        """Makes every backward inside one micro-batch; keeps one gradient's copy meanwhile."""
        return self.source.micro_batch(several_backwards=True)

    @property
    def due(self) -> bool:
        """Whether the present step is measured: every n-th, the first one too."""
        return self.step % self.every == 0

    def read(self, samples: Sequence[float]) -> GradientStatistics | None:
        """Returns the noise of the step and waits for the next one; None on a step not measured.

        Collective: where there are ranks, each calls it with its own sizes, and all get the same.

        Args:
            samples: n_d of each micro-batch of this rank, in the order of the backwards: [8] * 4
                for four of 8. Their number is checked against the backwards seen, so a sum alone
                is refused.
        Raises:
            GradientError: the sizes do not fit the backwards seen, fewer than two were seen,
                `.grad` was touched since the last one, or is not what the backwards add up to.
        """
        if not self.due:
            self.next_step()
            return None
        sizes, failure = self._checked_sizes(samples)
        device = self.source.parameters[0].device
        reached = torch.full(
            (1,), has_gradient(self.source), dtype=widest_float(device), device=device
        )
        values = self.measure(sizes, reached).tolist()
        if failure is not None:
            raise failure  # now that the other ranks know
        totals = self.totals(values)
        self.source.restart()
        self.next_step()
        noise = self.statistics(totals)
        if not values[0]:  # on no rank
            raise GradientError(NO_GRADIENT)
        return noise

    # for those who read more than the noise in one go, as AdaptiveBatch does

    def next_step(self) -> None:
        """The step is over; the next one is measured if it is due."""
        self.at_step(self.step + 1)

    def at_step(self, number: int) -> None:
        """The step of this number comes next, 0 being the first."""
        self.step = number
        self._listen()

    def measure(self, sizes: Sequence[float] | None, extra: Tensor | None = None) -> Tensor:
        """Everything that the noise of this step rests on, summed over ranks; nothing waits.

        Args:
            sizes: n_d of this rank's micro-batches; None where this rank cannot take part.
            extra: what else is to be added up over the ranks; it comes first.
        Returns:
            One vector on the parameters' device, for `totals` once the host has read it.
        """
        are_means = self.loss == "mean"
        return self._sums.measure(sizes, are_means=are_means, scaler=self.scaler, extra=extra)

    def measure_grad(self, extra: Tensor) -> Tensor:
        """[*extra, |.grad|^2] of a step that is not measured, added up over the ranks."""
        return self._sums.measure_grad(extra)

    def totals(self, values: list[float]) -> StepTotals:
        """What `measure` gave, once the host has read it; raises where a rank took no part."""
        totals = StepTotals(unpack(values, self._sums.lengths))
        totals.require_all_took_part()
        self._sanity_checks.check_totals(totals, may_overflow=self.scaler is not None)
        return totals

    def statistics(
        self, totals: StepTotals, unit: float = 1.0, *, of_all_ranks: bool = False
    ) -> GradientStatistics:
        """The noise of a step, from its totals.

        Args:
            totals: from `totals`.
            unit: what squared norms are multiplied by: square of a factor that `.grad` lacks.
            of_all_ranks: whether the losses were weighted by n_d W / N with N of all W ranks.
        Raises:
            GradientError: as `read`.
        """
        replicated = self.source.reducer.replicas == self.source.ranks
        c = totals.reduction(self._sums.norms.eps, replicated) if totals.finite else 1.0
        if of_all_ranks and totals.finite and c * self.source.ranks != 1:
            raise GradientError(
                "the gradients of the ranks were added up and not averaged "
                "(set_gradient_divide_factor, a hook?), so the step would be as many times too "
                "long; leave the division to the engine"
            )
        if self.loss == "weighted" and c != 1 and not of_all_ranks:
            _require_equal([rank.samples for rank in totals.of_ranks])
        layers = [
            self._estimate(totals, unit / totals.scale**2, c, *of_layer)
            for of_layer in zip(totals.over_sizes, totals.squares, totals.total_sqnorm, strict=True)
        ]
        noise = layers[0]
        if self._names:
            sums = map(math.fsum, (totals.over_sizes, totals.squares, totals.total_sqnorm))
            noise = self._estimate(totals, unit / totals.scale**2, c, *sums)
            noise = replace(noise, layers=dict(zip(self._names, layers, strict=True)))
        self._sanity_checks.check_statistics(noise)
        return replace(
            noise, interval=self._interval(noise, totals), half_batch_cosine=self._cosine(totals, c)
        )

    def _listen(self) -> None:
        """Puts the meter's subscribers on where the step is due, and takes them off where not."""
        if self.due == self._listening:
            return
        self._listening = self.due
        turn = self.source.subscribe if self.due else self.source.unsubscribe
        for subscriber in self._sums.subscribers:
            turn(subscriber)

    # what comes of it

    def _estimate(
        self,
        totals: StepTotals,
        unit: float,
        c: float,
        over: float,
        squares: float,
        total_sqnorm: float,
    ) -> GradientStatistics:
        """Noise of the whole gradient or one layer; c is how the ranks were joined."""
        k, samples, eps = totals.micro_batches, totals.samples, self._sums.norms.eps
        if self.loss == "weighted":
            return from_weighted_losses(unit * c**2 * over, unit * total_sqnorm, k, samples, eps)
        return from_mean_losses(
            unit * squares, unit * total_sqnorm / c**2, k, samples, totals.inverse_sizes, eps
        )

    def _interval(self, noise: GradientStatistics, totals: StepTotals) -> Interval | None:
        if self.confidence is None:
            return None
        if math.isnan(noise.similarity):
            return jackknife(math.nan, (math.nan, math.nan), totals.micro_batches, self.confidence)
        x = log_ratio(noise.grad_sqnorm, noise.grad_variance, noise.samples)
        return jackknife(x, totals.left_out, totals.micro_batches, self.confidence)

    def _cosine(self, totals: StepTotals, c: float) -> float | None:
        if self._sums.half_batch_cosine is None:
            return None
        of_signed, dot = totals.half_batch_cosine
        return HalfBatchCosine.cosine(math.fsum(totals.total_sqnorm) / c**2, of_signed, dot / c)

    def _checked_sizes(
        self, samples: Sequence[float]
    ) -> tuple[Sequence[float] | None, GradientError | None]:
        """The sizes of this rank's micro-batches, or what is wrong, which other ranks wait for."""
        try:
            if self._slots is not None:
                self._slots.require_held(self.source.parameters)
            self.source.require_unchanged("read()")
            return self._sizes(samples), None
        except GradientError as error:
            if self.source.ranks == 1:
                raise
            return None, error

    def _sizes(self, samples: Sequence[float]) -> Sequence[float]:
        k = self.source.micro_batches
        try:
            sizes = [math.nan] if isinstance(samples, str) else [float(n) for n in samples]
        except (TypeError, ValueError, OverflowError):
            sizes = [math.nan]
        if not all(0 < n < math.inf for n in sizes):
            raise GradientError(
                f"samples={samples!r} must be positive numbers, the size of each micro-batch: "
                f"`read(samples=[8] * {k})` where each is of 8; {k} backwards were seen, and "
                "a sum does not say how many micro-batches they are"
            )
        if len(sizes) != k:
            remedy = (
                "where one micro-batch is several backwards, mark it with "
                "`with meter.micro_batch():`"
                if len(sizes) < k
                else "zero_grad() between two micro-batches of a step forgets those before it, so "
                "call it before the first one alone; and every backward has to reach a parameter "
                "that is measured"
            )
            raise GradientError(f"{k} backwards were seen but {len(sizes)} sizes stated; {remedy}")
        return sizes


def _by_layer(model: nn.Module | Iterable[Tensor]) -> dict[Tensor, str]:
    """Parameter -> name of the module that holds it, without what wrappers add."""
    if not isinstance(model, nn.Module):
        raise SettingError("per_layer=True needs the model, whose modules have names")
    wrapped = (m.module for m in model.modules() if isinstance(m, DistributedDataParallel))
    return {p: _plain(name) for name, p in next(wrapped, model).named_parameters()}


def _plain(name: str) -> str:
    """The module of a parameter, without what torch.compile and checkpointing put before."""
    parts = name.split(".")[:-1]
    return ".".join(p for p in parts if p not in ("_orig_mod", "_checkpoint_wrapped_module"))


def _require_equal(samples: list[float]) -> None:
    if max(samples) - min(samples) > 1e-6 * max(samples):
        raise GradientError(
            f"the ranks have {samples} samples, so the mean over ranks is not the mean over "
            'samples; give each rank as many, or state loss="mean" where each backward is of its '
            "micro-batch's plain mean loss"
        )
