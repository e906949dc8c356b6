"""The one stateful object of the decision: it asks the policy and remembers the answer."""

from dataclasses import replace
from typing import TypedDict

from bigbatch.decide.plan import require_ordered, require_positive
from bigbatch.decide.policy import Decision, Policy, Progress
from bigbatch.errors import SettingError
from bigbatch.measure.noise import GradientNoise


class ControllerState(TypedDict):
    """What a controller needs to go on."""

    target: int
    lr_factor: float
    samples: float
    steps: int


class Controller:
    """Asks a policy after every step and remembers the batch size that it wants.

    What is remembered is the policy's own number, before any rounding to a plan: feeding back the
    rounded one would stall where a step of the policy is smaller than the rounding.

    Args:
        policy: any object with `decide(noise, now) -> Decision`.
        batch_size: where it starts, in samples over all ranks.
        base_batch: batch size that the learning rate was tuned for; default `batch_size`.
        min_batch: what is remembered never falls below, in samples; nor below the policy's own.
        max_batch: nor rises above, nor above the policy's own; None for no bound.
    Raises:
        SettingError: a size is not positive, the bounds are crossed, or `policy` cannot decide.
    Example:
        >>> from bigbatch import GradientNoise, SimiGrad
        >>> controller = Controller(SimiGrad(target=0.2), batch_size=128)
        >>> controller.next(GradientNoise(1.0, 576.0, samples=128, micro_batches=4))
        Decision(batch_size=140, reason='similarity 0.100 < 0.2', lr_factor=1.0)
    """

    def __init__(
        self,
        policy: Policy,
        batch_size: int,
        base_batch: int | None = None,
        *,
        min_batch: int = 1,
        max_batch: int | None = None,
    ) -> None:
        require_positive(batch_size=batch_size, min_batch=min_batch)
        if not callable(getattr(policy, "decide", None)):
            raise SettingError(f"policy={policy!r} has no method decide(noise, now)")
        self.policy = policy
        self.base_batch = batch_size if base_batch is None else base_batch
        require_positive(base_batch=self.base_batch)
        self.min_batch: int = getattr(policy, "min_batch", 1)
        self.max_batch: int | None = getattr(policy, "max_batch", None)
        self.decision = Decision(batch_size, "start")
        self.limit(min_batch, max_batch)
        self._samples = 0.0
        self._steps = 0

    def next(self, noise: GradientNoise, now: Progress | None = None) -> Decision:
        """The decision after a step that measured `noise`.

        Args:
            noise: of the step just done, over all ranks.
            now: where the training stands; `target` is filled in. Without it, what the controller
                can count itself.
        Raises:
            SettingError: the policy returned something that is no Decision.
        """
        self._samples += noise.samples
        self._steps += 1
        if now is None:
            batch_size, samples = round(noise.samples), round(self._samples)
            now = Progress(0, batch_size, self.base_batch, samples, self._steps)
        now = replace(now, target=self.decision.batch_size)
        decision = self.policy.decide(noise, now)
        if not isinstance(decision, Decision):
            raise SettingError(f"{self.policy!r}.decide returned {decision!r}, not a Decision")
        self.decision = self._inside(decision)
        return self.decision

    def limit(self, min_batch: int = 1, max_batch: int | None = None) -> None:
        """Narrows the bounds, and moves what is remembered into them.

        Raises:
            SettingError: nothing is left between them.
        """
        self.min_batch = max(self.min_batch, min_batch)
        bounds = [bound for bound in (self.max_batch, max_batch) if bound is not None]
        self.max_batch = min(bounds, default=None)
        require_ordered(self.min_batch, self.max_batch)
        self.decision = self._inside(self.decision)

    def _inside(self, decision: Decision) -> Decision:
        batch_size = max(decision.batch_size, self.min_batch)
        if self.max_batch is not None:
            batch_size = min(batch_size, self.max_batch)
        return replace(decision, batch_size=batch_size)

    def state_dict(self) -> ControllerState:
        """What `load_state_dict` needs to go on."""
        return {
            "target": self.decision.batch_size,
            "lr_factor": self.decision.lr_factor,
            "samples": self._samples,
            "steps": self._steps,
        }

    def load_state_dict(self, state: ControllerState) -> None:
        """Goes on from a saved state; the policy stays the one given at construction."""
        self.decision = self._inside(Decision(state["target"], "resumed", state["lr_factor"]))
        self._samples, self._steps = state["samples"], state["steps"]
