"""The meter of gradient noise: reads each micro-batch's gradient once, before it is summed."""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import GradientError, SettingError
from bigbatch.gradients import GradientSource, find_source
from bigbatch.gradients.dtypes import widest_float
from bigbatch.gradients.groups.forward_hook import PrepareAfterForward
from bigbatch.gradients.groups.group_norms import refusal_of_sums
from bigbatch.gradients.groups.grouping import Grouping
from bigbatch.gradients.pipeline import PipelineStage
from bigbatch.gradients.replaced_parameters import NO_GRADIENT, ReplacementCheck
from bigbatch.setting_types import Count, Coverage, Groups, checked
from bigbatch.statistics.confidence import Interval, jackknife, log_ratio
from bigbatch.statistics.noise_scale import (
    Compared,
    GradientStatistics,
    from_clusters,
    from_mean_losses,
    from_weighted_losses,
)
from bigbatch.statistics.sanity_checks import SanityChecks
from bigbatch.statistics.step_totals import StepAccumulators, StepTotals, unpack


class GradientMeter:
    """Measures gradient noise in any training loop; reads each micro-batch's gradient once.

    Each `backward()` is one micro-batch. Call `read` after the last one, and before unscaling,
    clipping, `step()` or `zero_grad()`. Works with plain and compiled models, under
    DistributedDataParallel and under fully_shard (FSDP2, HSDP): pass the wrapped model, and call
    `read` on every rank.

    Args:
        model: the model whose parameters are measured, an iterable of parameters, or a list of the
            stages that this rank has of a pipeline (torch.distributed.pipelining;
            docs/pipelines.md).
        loss: the loss that `backward()` is called on. "weighted": the losses of a step sum to the
            mean loss of this rank (loss * n_d / N, the usual accumulation; N is then the same on
            every rank). "mean": each is the plain mean loss of its micro-batch.
        confidence: coverage of an interval for similarity and noise scale, for example 0.9; None
            for no interval. Costs one more read of each gradient and 4 KB per micro-batch. The
            measured coverage is in docs/benchmarks.md.
        per_layer: also measures each layer (module with parameters) by itself.
        half_batch_cosine: also measures SimiGrad's own cosine of two half-batch gradients. Keeps
            one more copy of the gradient, which is all-reduced if there are several ranks.
        every: n, to measure every n-th step; no hook runs in the other steps.
        groups: k, to measure that many groups of samples in each backward, for loops with one
            backward per step: `read(samples=[B])`. Needs the model; the samples are in dimension 0
            of its first tensor argument, and no sample influences another. Similarity and noise
            scale are unbiased estimates by random projections, or exact where `per_layer`,
            `confidence` or `half_batch_cosine` need the groups' gradients. docs/groups.md.
        cluster_parts: m, where each m consecutive backwards of a rank are the parts of one cluster,
            such as halves of the rollouts of one prompt. Measures the noise between clusters and
            within them, `statistics.nested`; noise scale and similarity are those of more clusters.
            Clusters and parts may differ in size. Keeps one more copy of the gradient, unsharded
            under fully_shard. docs/rl.md.
        scaler: the GradScaler of the losses; signal and noise are without its scale.
        source: the source of the gradients, if the model's wrappers do not determine it.
    Raises:
        SettingError: an option is out of range, the model cannot be measured, or no parameter
            requires a gradient.
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
        model: nn.Module | Iterable[Tensor] | Iterable[PipelineStage],
        *,
        loss: Literal["weighted", "mean"] = "weighted",
        confidence: Coverage | None = None,
        per_layer: bool = False,
        half_batch_cosine: bool = False,
        every: Count = 1,
        groups: Groups | None = None,
        cluster_parts: Groups | None = None,
        scaler: GradScaler | None = None,
        source: GradientSource | None = None,
    ) -> None:
        self.loss, self.confidence, self.every, self.scaler = loss, confidence, every, scaler
        self.step = 0  # steps since the meter was made
        # whether the current step is measured: the first one and every n-th after it; a loop may
        # choose other steps, by `at_step`
        self.due = False
        self.source: GradientSource = source or find_source(model)
        if not any(p.requires_grad for p in self.source.parameters):
            raise SettingError("no parameter requires a gradient, so there is nothing to measure")
        self._forward_hook: RemovableHandle | None = None  # if backwards are cut into groups
        by_layer = _by_layer(model) if per_layer else {}
        self._layer_names = list(dict.fromkeys(by_layer.values()))
        self._layer_numbers = {p: self._layer_names.index(name) for p, name in by_layer.items()}
        self._replacement_check = ReplacementCheck(model) if isinstance(model, nn.Module) else None
        options = {"confidence=": confidence, "half_batch_cosine=True": half_batch_cosine}
        asked = [name for name, value in options.items() if value]
        self.cluster_parts = cluster_parts
        if cluster_parts is not None:
            _require_clusters(self.source, loss, asked)
            asked.append("cluster_parts=")
        if self.source.mixes and asked:
            raise SettingError(
                f"{' and '.join(asked)} cannot be measured in a pipeline, whose ranks have other "
                "layers; leave it out"
            )
        self.groups: int | None = None
        if groups is not None:
            if not isinstance(model, nn.Module):
                raise SettingError("groups= needs the model, whose forwards it prepares")
            self.cut_backwards(groups, model)
            self._forward_hook = model.register_forward_hook(
                PrepareAfterForward(self.source), with_kwargs=True
            )
        layers, sketches = self._layer_numbers, confidence is not None
        self._sums = StepAccumulators(
            self.source,
            layers,
            sketches=sketches,
            half_batch_cosine=half_batch_cosine,
            cluster_parts=cluster_parts,
        )
        self._sanity_checks = SanityChecks(loss, warns=self.source.process == 0)
        self.at_step(0)

    def __enter__(self) -> "GradientMeter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the meter's hooks from the model."""
        self.source.close()
        if self._forward_hook is not None:
            self._forward_hook.remove()

    def select(self, parameters: Iterable[Tensor]) -> None:
        """Measures only these from the next step on; the layer of new parameters is "others"."""
        self.source.select(parameters)
        new = [p for p in self.source.parameters if p not in self._layer_numbers]
        if new and self._layer_names:
            self._layer_names = list(dict.fromkeys([*self._layer_names, "others"]))
            self._layer_numbers.update(dict.fromkeys(new, self._layer_names.index("others")))

    def micro_batch(self) -> AbstractContextManager[None]:
        """Counts all backwards inside as one micro-batch, for one copy of the gradient."""
        return self.source.micro_batch(several_backwards=True)

    def read(self, samples: Sequence[float | Tensor]) -> GradientStatistics | None:
        """Returns the statistics of the step and starts the next one; None if it is not measured.

        Collective: each rank passes its own sizes, and all get the same statistics.

        Args:
            samples: n_d of each micro-batch of this rank, in the order of the backwards: [8] * 4
                for four micro-batches of 8. One number for the whole step is refused. With
                `groups`, an entry may also be a tensor of its samples' weights (tokens, for
                example), if the loss is a mean over these.
        Raises:
            GradientError: the number of sizes is not that of the backwards, there were fewer than
                two, `.grad` was changed since the last one, or is not the sum of their gradients.
        """
        if not self.due:
            self.next_step()
            return None
        sizes: Sequence[float] | None = None
        failure: GradientError | None = None
        try:
            sizes = self._sizes(samples)
        except GradientError as error:
            failure = error  # after the other ranks got their part of the sums
            if self.source.processes == 1:
                if self.source.mixes:
                    self.source.restart()
                raise
        device = self.source.parameters[0].device
        dtype, has_gradient = widest_float(device), bool(self.source.local_grads())
        gradients_exist = torch.full((1,), has_gradient, dtype=dtype, device=device)
        values = self.measure(sizes, gradients_exist).tolist()
        if self.source.mixes:  # the schedule's step is over, even if a rank could not read it
            self.source.restart()
        if failure is not None:
            self._sums.gather_ranks()  # as the others do: [Note: Totals of many ranks]
            raise failure
        totals = self.totals(values)
        tap = self.source.group_tap
        missing = tap.missing if tap is not None and totals.micro_batches < 2 else ""
        self.source.restart()
        self.next_step()
        if missing:
            raise GradientError(missing)
        statistics = self.statistics(totals)
        if not values[0]:
            raise GradientError(NO_GRADIENT)
        return statistics

    def cut_backwards(self, groups: int | None, model: nn.Module) -> None:
        """Measures k groups in backwards that the loop itself prepares (`prepare_groups`).

        `groups` is k, or None for the meter's own, if it has any.

        Raises:
            SettingError: the meter's loss is not "weighted", its own k is another, or it has
                `cluster_parts`.
        """
        if groups is not None and self.groups not in (None, groups):
            raise SettingError(f"groups={groups}, and groups={self.groups} of the meter: pass one")
        if self._forward_hook is not None:
            self._forward_hook.remove()
        if groups is None or groups == self.groups:
            return
        if self.loss != "weighted":
            raise SettingError(
                'the groups of one backward share its mean loss: groups= needs loss="weighted"'
            )
        if self.cluster_parts is not None:
            raise SettingError(_NO_OTHER.format(names=f"groups={groups}"))
        self.groups = groups
        self.source.cut_backwards(groups, self._layer_numbers, model)

    # for loops that read further totals in the same all-reduce, as AdaptiveBatch does

    def next_step(self) -> None:
        """Ends the step; the next one is measured if it is due."""
        self.at_step(self.step + 1)

    def at_step(self, number: int, *, due: bool | None = None) -> None:
        """Starts the step of this number, from 0; it is measured if `due`, or as `every` says."""
        self.step = number
        if self.source.group_tap is not None:
            self.source.group_tap.restart(number)
        due = number % self.every == 0 if due is None else due
        if due != self.due:
            self.due = due
            update = self.source.subscribe if due else self.source.unsubscribe
            for subscriber in self._sums.subscribers:
                update(subscriber)

    @property
    def micro_batch_sqnorms(self) -> Tensor:
        """|h_d|^2 of this rank's micro-batches of the step so far, by layer (k, L)."""
        return self._sums.norms.squares(self.source.parameters[0].device)

    @property
    def micro_batch_projections(self) -> Tensor:
        """Projections of these micro-batches on the same 8 random directions, (k, 8)."""
        return self._sums.probe.projections()

    @property
    def layers(self) -> dict[Tensor, str]:
        """The name of each parameter's layer; empty if all are one."""
        return {p: self._layer_names[number] for p, number in self._layer_numbers.items()}

    def measure(self, sizes: Sequence[float] | None, extra: Tensor | None = None) -> Tensor:
        """Sums over the ranks everything that the statistics need; the host does not wait.

        Args:
            sizes: n_d of this rank's micro-batches; None if this rank cannot take part.
            extra: further values to sum over the ranks; they come first.
        Returns:
            One vector on the parameters' device, for `totals` once the host has read it. In a step
            that is not due, [*extra, e, x]: e is the error of the sums of groups, if any are read;
            x is 0 if every gradient is zero, and not finite if one is not.
        """
        if not self.due:
            return self._sums.measure_grad(extra)
        are_means = self.loss == "mean"
        return self._sums.measure(sizes, are_means=are_means, scaler=self.scaler, extra=extra)

    def totals(self, values: list[float]) -> StepTotals:
        """Totals from the values of `measure`; raises GradientError if a rank took no part."""
        parts = unpack(values, self._sums.lengths)
        totals = StepTotals(parts, self.source.ranks, self._sums.gather_ranks)
        self.source.refuse_groups(refusal_of_sums(totals.group_error))
        self._sanity_checks.check_totals(totals, may_overflow=self.scaler is not None)
        return totals

    def statistics(
        self, totals: StepTotals, unit: float = 1.0, *, of_all_ranks: bool = False
    ) -> GradientStatistics:
        """The statistics of a step, from its totals.

        Args:
            totals: the totals over all ranks.
            unit: factor for squared norms: the square of a factor that `.grad` lacks.
            of_all_ranks: whether the losses were weighted by n_d W / N with N of all W ranks.
        Raises:
            GradientError: as `read`.
        """
        is_finite = totals.is_finite
        replicated = self.source.reducer.replicas == self.source.ranks
        scheduled = self.source.mixes
        c = totals.reduction(totals.eps, replicated, scheduled=scheduled) if is_finite else 1.0
        if of_all_ranks and is_finite and c * self.source.ranks != 1:
            raise GradientError(
                "the gradients of the ranks were added up and not averaged "
                "(set_gradient_divide_factor, a hook?), so the step would be as many times too "
                "long; leave the division to the engine"
            )
        k, sizes = totals.micro_batches, totals.inverse_sizes * totals.samples
        is_divided = c < (1 - 1e-9) / self.source.ranks  # by the schedule of a pipeline
        if self.loss == "weighted" and is_divided and sizes > k**2 * (1 + 1e-9):
            raise GradientError(
                "the micro-batches of the pipeline differ in size, and its schedule averages their "
                'losses: state GradientMeter(loss="mean")'
            )
        is_plain_mean = self.loss == "weighted" and c != 1 and not of_all_ranks
        if is_plain_mean and (samples := totals.unequal_samples()):
            raise GradientError(
                f"the ranks have {samples} samples, so the mean over ranks is not the mean "
                'over samples; give each rank as many, or state loss="mean" where each '
                "backward is of its micro-batch's plain mean loss"
            )
        unit /= totals.scale**2
        by_layer = [totals.sqnorms_over_sizes, totals.sqnorms, totals.grad_sqnorms]
        if self.cluster_parts is not None:
            by_layer.append(totals.cluster_sqnorms_over_sizes)
        rows = zip(self._layer_names, *by_layer, strict=False)
        layers = {name: self._estimate(totals, unit, c, sums) for name, *sums in rows}
        statistics = self._estimate(totals, unit, c, map(math.fsum, by_layer))
        self._sanity_checks.check_statistics(statistics)
        return replace(
            statistics,
            interval=self._interval(statistics, totals),
            layers=layers,
            half_batch_cosine=totals.half_batch_cosine(c),
        )

    def _estimate(
        self, totals: StepTotals, unit: float, c: float, sums: Iterable[float]
    ) -> GradientStatistics:
        """Statistics of the whole gradient or of a layer; c is `totals.reduction`."""
        sqnorm_over_sizes, sqnorm, grad_sqnorm, *of_clusters = sums
        k, samples, eps = totals.micro_batches, totals.samples, totals.eps
        grad_sqnorm *= unit
        if of_clusters:
            of_parts, of_whole = (unit * c**2 * sums for sums in (sqnorm_over_sizes, *of_clusters))
            clusters, square_sizes = totals.clusters
            counts = k, samples, round(clusters), square_sizes
            return from_clusters(of_parts, of_whole, grad_sqnorm, *counts, eps)
        if self.loss == "weighted":
            compared: Compared = "groups" if self.groups else "micro-batches"
            over_sizes = sqnorm_over_sizes * (unit * c**2)
            return from_weighted_losses(over_sizes, grad_sqnorm, k, samples, eps, compared)
        inverse_sizes = totals.inverse_sizes
        return from_mean_losses(unit * sqnorm, grad_sqnorm / c**2, k, samples, inverse_sizes, eps)

    def _interval(self, statistics: GradientStatistics, totals: StepTotals) -> Interval | None:
        if self.confidence is None:
            return None
        x = log_ratio(statistics.grad_sqnorm, statistics.grad_variance, statistics.samples)
        is_known = not math.isnan(statistics.similarity)
        sums = totals.leave_one_out if is_known else [math.nan, math.nan]
        return jackknife(x, sums, totals.micro_batches, self.confidence)

    def _sizes(self, samples: Sequence[float | Tensor]) -> Sequence[float]:
        """n_d of this rank's micro-batches, whose gradients must be there as they were seen."""
        if self._replacement_check is not None:
            self._replacement_check.require_held(self.source.parameters)
        self.source.require_unchanged("read()")
        if self.groups is not None and not isinstance(samples, str):
            samples = [_sum_of_groups(self.source, i, n) for i, n in enumerate(samples)]
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
        if self.cluster_parts is not None and k % self.cluster_parts:
            raise GradientError(
                f"{k} backwards were seen, which are no whole clusters of cluster_parts="
                f"{self.cluster_parts} each; give each rank whole clusters"
            )
        return sizes


_NO_OTHER = (
    "cluster_parts= compares clusters, and {names} would compare their parts as if these were "
    "independent; leave it out"
)


def _require_clusters(source: GradientSource, loss: str, others: Sequence[str]) -> None:
    """Raises SettingError where clusters cannot be measured, or not with these other options."""
    if loss != "weighted":
        raise SettingError(
            'cluster_parts= needs loss="weighted": multiply each loss by n_d / N, so that the '
            "gradient of a cluster is the sum of those of its parts"
        )
    if others:
        raise SettingError(_NO_OTHER.format(names=" and ".join(others)))
    if source.reducer.reduces_each_backward:
        raise SettingError(
            "cluster_parts=: this engine reduces in every backward, so a part would be that of "
            "clusters of all ranks"
        )


def _sum_of_groups(source: GradientSource, number: int, samples: float | Tensor) -> float | Tensor:
    """n_d of a micro-batch; tells the source those of its groups, if each sample has a weight."""
    weights = samples if isinstance(samples, Tensor) and samples.dim() == 1 else None
    total = samples if weights is None else float(weights.sum())
    norms = source.group_norms[number] if number < len(source.group_norms) else None
    if norms is None:
        return total
    grouping = Grouping(round(sum(norms.weights)), len(norms.weights))
    if (total if weights is None else len(weights)) != grouping.samples:
        stated = total if weights is None else f"{len(weights)} weights"
        raise GradientError(
            f"samples= states {stated} for a backward whose model got {grouping.samples} samples "
            f"in dimension 0 of its first tensor; pass {grouping.samples}, or the weight of each, "
            "(labels != -100).sum(1) for example"
        )
    if weights is not None:
        norms.weights = tuple(grouping.sums(weights))
    return total


def _by_layer(model: object) -> dict[Tensor, str]:
    """Parameter -> name of the module that has it, without the prefixes of wrappers."""
    if not isinstance(model, nn.Module):
        raise SettingError("per_layer=True needs the model, whose modules have names")
    wrapped = (m.module for m in model.modules() if isinstance(m, DistributedDataParallel))
    prefixes = ("_orig_mod", "_checkpoint_wrapped_module")
    return {
        p: ".".join(part for part in name.split(".")[:-1] if part not in prefixes)
        for name, p in next(wrapped, model).named_parameters()
    }
