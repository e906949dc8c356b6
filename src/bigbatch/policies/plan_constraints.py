"""Constraints on the plans of a training, and a controller whose bounds these plans can keep."""

import warnings
from dataclasses import dataclass
from typing import Annotated

from bigbatch.errors import SettingError
from bigbatch.policies.controller import Controller
from bigbatch.policies.plan import BatchPlan
from bigbatch.policies.policy import Policy
from bigbatch.setting_types import In

MinMicroBatches = Annotated[int, In("[2, inf)", "one leaves nothing to compare")]


@dataclass(frozen=True)
class PlanConstraints:
    """Constraints on every plan of a training.

    Args:
        ranks: processes that share a step; virtual ranks, where there are any.
        micro_batch: most samples in one backward.
        fixed_micro_batch: whether every backward has that many.
        min_micro_batches: fewest micro-batches, over all ranks, of a step that is measured.
    """

    ranks: int
    micro_batch: int
    fixed_micro_batch: bool
    min_micro_batches: int

    def plan(
        self,
        batch_size: int,
        min_batch: int,
        max_batch: int | None,
        *,
        compared: bool = True,
        groups: int | None = None,
    ) -> BatchPlan:
        """The plan for a batch size.

        Args:
            batch_size: samples over all ranks.
            min_batch: lower bound.
            max_batch: upper bound; None for none.
            compared: whether micro-batches are compared; otherwise a single backward may do.
            groups: groups of samples in a backward, of which each counts as a micro-batch.
        """
        groups = groups or 1
        backwards = -(-self.min_micro_batches // groups) if compared else 1
        if groups > 1 and compared:
            min_batch = max(min_batch, self.min_micro_batches)  # samples, one of each group
        return BatchPlan.fit(
            batch_size,
            self.ranks,
            max_micro=self.micro_batch,
            min_micro_batches=backwards,
            min_batch=min_batch,
            max_batch=max_batch,
            micro=self.micro_batch if self.fixed_micro_batch else None,
        )

    def controller(
        self,
        policy: Policy | Controller,
        batch_size: int | None,
        base_batch: int | None,
        samples: int | None,
        groups: int | None = None,
    ) -> Controller:
        """The controller of a training, with bounds that the data set and these plans can keep.

        Args:
            policy: a policy, or a controller, whose bounds are narrowed.
            batch_size: the first batch size; None with a controller.
            base_batch: the batch size that the learning rate is for; default: `batch_size`.
            samples: samples in an epoch; None if unknown.
            groups: as for `plan`.
        Raises:
            SettingError: nothing lies between the bounds, or the controller and the call both have
                sizes.
        """
        if isinstance(policy, Controller):
            if (batch_size, base_batch) != (None, None):
                raise SettingError(
                    "the controller has batch_size and base_batch of its own; leave them out here"
                )
            controller = policy
        else:
            assert batch_size is not None
            controller = Controller(policy, batch_size, base_batch)
        if samples is not None and samples < self.ranks:
            raise SettingError(
                f"{samples} samples of an epoch are too few for {self.ranks} (virtual) ranks"
            )
        min_batch, is_new = controller.min_batch, controller.decision.reason == "start"
        start = controller.first_batch_size if is_new else controller.decision.batch_size
        if samples is not None and min_batch > samples:
            raise SettingError(f"min_batch={min_batch} exceeds the {samples} samples of an epoch")
        controller.limit(max_batch=samples)
        smallest = self.plan(1, 1, controller.max_batch, groups=groups).batch_size
        if 1 < min_batch < smallest:
            warnings.warn(
                f"min_batch={min_batch} is raised to {smallest}, the smallest step that can be cut "
                f"into {self.min_micro_batches} micro-batches",
                stacklevel=4,
            )
        controller.limit(min_batch=smallest)
        if controller.decision.batch_size != start:
            warnings.warn(
                f"batch_size={start} is out of bounds; min_batch={controller.min_batch} and "
                f"max_batch={controller.max_batch} hold, so training starts with "
                f"{controller.decision.batch_size}",
                stacklevel=4,
            )
        return controller
