"""The advice: a function of what was observed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from bigbatch.advisor.cluster_time import ClusterTime, Network
from bigbatch.advisor.noise_trend import LEVEL, NoiseTrend
from bigbatch.advisor.observations import Found, Measurement, Observations
from bigbatch.advisor.paired_groups import Pairing
from bigbatch.advisor.position_test import differs_by_position
from bigbatch.advisor.trial_result import TrialResult
from bigbatch.errors import LoopError
from bigbatch.log.row_schema import finite
from bigbatch.training.step_rates import RANGE, ema_decay

DEVICES = (1, 8, 64, 512)
_ENOUGH = 0.9  # of the present batch's time, from which on it is left as it is
_FEW = 16  # measured steps below which little is known
_REACH = 1024  # factor beyond the present batch size up to which the fastest one is looked for
FARTHEST = 32  # factor up to which a size is advised: docs/advise.md shows advice up to there


@dataclass(frozen=True)
class DeviceAdvice:
    """The fastest batch size on so many devices; the present one if that is left as it is."""

    devices: int  # how many, each like the observed one
    batch_size: int  # samples of a step of all of them
    # low, high: the same at the ends of the noise scale's interval; None without an upper end
    low: int
    high: int | None
    seconds: float  # of a step
    # time to the same progress, relative to the present batch size on these devices; nan if that is
    # smaller than their number
    time: float
    speedup: float  # how much faster than the present batch size on one device
    samples: float  # samples to the same progress, relative to the present batch size


@dataclass(frozen=True)
class BatchAdvice:
    """What was found about the batch size of a training."""

    observations: Observations
    network: Network = field(default_factory=Network)  # the assumed network between devices
    trial: TrialResult | None = None  # of `bigbatch advise --try`

    @property
    def refusal(self) -> str:
        """Why there is no advice; empty if there is."""
        return self.observations.refusal or self._position_refusal

    @cached_property
    def _position_refusal(self) -> str:
        """That of the measurements, which are complete where nothing else refuses."""
        return differs_by_position(self.observations.measurements)

    @property
    def found(self) -> Found:
        """The observed training."""
        assert self.observations.found is not None
        return self.observations.found

    @cached_property
    def trend(self) -> NoiseTrend:
        """The noise scale and how it moved; a LoopError if there is no advice."""
        if self.refusal:
            raise LoopError(f"no advice: {self.refusal}")
        return NoiseTrend.of(self.measurements, self.found.batch_size)

    @property
    def measurements(self) -> Sequence[Measurement]:
        """The measured steps, of joined groups where samples belong together."""
        measurements = self.observations.measurements
        if self.pairing is None:
            return measurements
        return [one for one in map(self.pairing.join, measurements) if one is not None]

    @cached_property
    def pairing(self) -> Pairing | None:
        """The groups of a backward whose samples belong together, which are joined."""
        return Pairing.find(self.observations.measurements, self.found.rows)

    @property
    def noise_scale(self) -> float:
        """Mean noise scale over the observed steps, in samples; nan without advice."""
        return math.nan if self.refusal else self.trend.noise_scale

    @property
    def noise_scale_interval(self) -> tuple[float, float]:
        """Its 90 % interval."""
        return (math.nan, math.nan) if self.refusal else (self.trend.low, self.trend.high)

    @property
    def batch_size(self) -> int | None:
        """The advised batch size on the observed ranks; None if none is known well enough."""
        row = self.this_machine
        return None if row is None else row.batch_size

    @property
    def this_machine(self) -> DeviceAdvice | None:
        """The advice for the observed ranks."""
        row = self.fastest_row
        if row is None or self.bound is not None:
            return None
        is_left = self.leaves_batch or self.is_undecided
        return self._row(self.found.ranks, leaves=True) if is_left else row

    @cached_property
    def fastest_row(self) -> DeviceAdvice | None:
        """The fastest batch size on the observed ranks, advised or not; None if it is unknown."""
        return None if self.refusal else self._row(self.found.ranks)

    @property
    def bound(self) -> int | None:
        """The size that the fastest one is beyond, if it is too far or too little known to advise.

        That is where the noise scale's interval has no upper end, or the fastest size is more than
        32 times the present one, or less than a 32nd. The bound itself is not farther than that.
        """
        row = self.fastest_row
        if row is None or self.leaves_batch or self.is_undecided:
            return None
        present = self.found.batch_size
        is_far = max(row.batch_size / present, present / row.batch_size) > FARTHEST
        if not (is_far or math.isinf(self.trend.high)):
            return None
        if row.high is None or row.batch_size > present:
            return min(row.low, FARTHEST * present)
        return max(row.high, -(-present // FARTHEST))

    @property
    def devices(self) -> tuple[DeviceAdvice, ...]:
        """The advice for 1, 8, 64 and 512 devices."""
        own = self.this_machine
        rows = (own if n == self.found.ranks else self._row(n) for n in DEVICES if own is not None)
        return tuple(row for row in rows if row is not None)

    @property
    def leaves_batch(self) -> bool:
        """Whether the fastest batch size saves less than 10 % of the time."""
        row = self.fastest_row
        return row is not None and row.high is not None and row.time > _ENOUGH

    @property
    def is_undecided(self) -> bool:
        """Whether the present batch size is farther, but may be the fastest for what is known."""
        row, present = self.fastest_row, self.found.batch_size
        if row is None or row.high is None or self.leaves_batch:
            return False
        return row.low <= present <= row.high

    def lr_factor(self, batch_size: float, optimizer: str | None = None) -> float:
        """Factor of the learning rate of an optimizer for another batch size.

            SGD:      (1 + B_n / B_now) / (1 + B_n / B)
            others:   sqrt(B / B_now)

        Args:
            batch_size: B.
            optimizer: name of its class; default: the first one of the training.
        Source:
            McCandlish et al. 2018 (arXiv 1812.06162), equation 2.9, for SGD; for optimizers that
            divide by the size of the gradient Malladi et al. 2022 (arXiv 2205.10287).
        """
        present, scale = self.found.batch_size, self.noise_scale
        if (optimizer or self.found.optimizers[0]) != "SGD":
            return math.sqrt(batch_size / present)
        return (1 + scale / present) / (1 + scale / batch_size)

    def betas(self, batch_size: int) -> tuple[tuple[float, ...], ...]:
        """Betas of the same half-life in samples; empty beyond a factor of 4, or without betas."""
        moved = (self._moved(betas, batch_size) for betas in self.found.betas)
        return tuple(betas for betas in moved if betas)

    def momentum(self, batch_size: int) -> tuple[float, ...]:
        """Likewise, the momentum."""
        return self._moved(self.found.momentum, batch_size)

    def _moved(self, decays: tuple[float, ...], batch_size: int) -> tuple[float, ...]:
        present = self.found.batch_size
        is_near = 1 / RANGE <= batch_size / present <= RANGE
        return tuple(ema_decay(b, batch_size, present) for b in decays) if is_near else ()

    @property
    def doubts(self) -> list[str]:
        """What makes this advice uncertain, in sentences."""
        measured, trend = len(self.observations.measurements), self.trend
        doubts = []
        if self.observations.way == "consecutive steps":
            doubts.append(
                "the noise scale is biased: it compares consecutive steps, between which the "
                "weights change, so it is usually too high"
            )
        if self.observations.way == "groups":
            doubts.append(
                "groups of a backward assume a loss that is a mean over samples, none of which "
                "changes another's part (no contrastive loss, no mining of hard samples, no mean "
                "over a varying number of tokens); bb.check_groups compares them with a loop"
            )
        if self.observations.batch_norm:
            doubts.append(self.observations.batch_norm)
        if self.pairing is not None:
            doubts.append(
                f"rows {self.pairing.rows} of the B rows of a backward belong together (Mixup with "
                "the reversed batch, chosen and rejected answers, two views), so the groups that "
                "have them were joined"
            )
        if self.observations.coupling:
            doubts.append(
                "samples of a backward influence each other in "
                f"{self.observations.coupling}, so this is about the number of backwards; "
                f"the {self.found.micro_batch} samples of each are part of the loss, and stay"
            )
        if measured < _FEW:
            doubts.append(f"only {measured} steps were measured; observe more (--steps, --budget)")
        if math.isinf(trend.high):
            doubts.append(
                "the signal was not distinguished from zero, so the noise scale has no upper end; "
                "observe more steps (--steps, --budget)"
            )
        if trend.factor >= 2:
            doubts.append("the noise scale was still rising; observe a later part of the training")
        doubts.append(
            "the noise scale usually rises during a training, and only "
            f"{self.observations.steps} steps were seen; it ignores curvature, so the largest "
            "batch size that loses nothing may differ by a factor of 2 or 3"
        )
        return doubts

    def fastest(self, noise_scale: float, devices: int | None = None) -> int:
        """The smallest batch of about the least time on so many devices; default: its own."""
        assert self.observations.time is not None
        cluster = self._cluster(devices or self.found.ranks)
        return cluster.fastest(min(noise_scale, self._most), self._most)

    @property
    def _most(self) -> float:
        return _REACH * max(self.found.batch_size, self.trend.noise_scale)

    def relative_time(self, batch_size: float, least_backwards: int = 1) -> float:
        """Time to the same progress on the observed ranks, relative to the present batch size."""
        cluster, scale = self._cluster(self.found.ranks), self.trend.noise_scale
        cluster = replace(cluster, least_backwards=least_backwards)
        present = cluster.relative_seconds(self.found.batch_size, scale)
        return cluster.relative_seconds(batch_size, scale) / present

    def relative_samples(self, batch_size: float) -> float:
        """Likewise the samples."""
        scale = self.trend.noise_scale
        return (batch_size + scale) / (self.found.batch_size + scale)

    def _cluster(self, devices: int) -> ClusterTime:
        assert self.observations.time is not None
        return ClusterTime(self.observations.time, self.found, self.network, devices)

    def _row(self, devices: int, *, leaves: bool = False) -> DeviceAdvice | None:
        trend, observed = self.trend, self.found.batch_size
        if self.observations.time is None or math.isinf(trend.noise_scale):
            return None
        is_own, scale = devices == self.found.ranks, trend.noise_scale
        present = observed if is_own else -(-observed // devices) * devices  # as many on each
        one, cluster = self._cluster(1), self._cluster(devices)
        best, low, high = (self.fastest(value, devices) for value in (scale, trend.low, trend.high))
        if leaves or present in cluster.fast_sizes(scale, self._most, present):
            best, low, high = present, min(low, present), max(high, present)
        seconds = cluster.relative_seconds(best, scale)
        return DeviceAdvice(
            devices,
            best,
            low,
            high if math.isfinite(trend.high) else None,
            cluster.seconds(best),
            seconds / cluster.relative_seconds(present, scale) if observed >= devices else math.nan,
            one.relative_seconds(observed, scale) / seconds,
            self.relative_samples(best),
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON; infinities and nan are None."""
        observations = self.observations
        keys = ("grad_sqnorm", "grad_variance", "samples", "micro_batches")
        result: dict[str, Any] = {
            "refusal": self.refusal,
            "measurements": [
                {"step": one.step, **{key: getattr(one.statistics, key) for key in keys}}
                for one in observations.measurements
            ],
        }
        if observations.found is not None:
            result["found"] = {**vars(observations.found), "way": observations.way}
        for name in ("steps", "seconds", "step_seconds", "batch_norm", "unseen"):
            result[name] = getattr(observations, name)
        if not self.refusal:
            result |= self._advised()
        return dict(finite(result))

    def _advised(self) -> dict[str, Any]:
        trend, time = self.trend, self.observations.time
        advised = self.batch_size
        return {
            "noise_scale": {
                "value": trend.noise_scale,
                "low": trend.low,
                "high": trend.high,
                "level": LEVEL,
            },
            "segments": [*map(vars, trend.segments)],
            "layers": [*map(vars, trend.layers)],
            "batch_size": advised,
            "bound": self.bound,
            "leave_it": self.leaves_batch or self.is_undecided,
            "lr_factor": None if advised is None else self.lr_factor(advised),
            "lr_factors": {
                name: self.lr_factor(advised, name)
                for name in self.found.optimizers
                if advised is not None
            },
            "betas": [] if advised is None else self.betas(advised),
            "momentum": [] if advised is None else self.momentum(advised),
            "largest_micro_batch": None if time is None else time.largest,
            "network": vars(self.network),
            "devices": [*map(vars, self.devices)],
            "doubts": self.doubts,
            "trial": None if self.trial is None else self.trial.as_dict(),
        }
