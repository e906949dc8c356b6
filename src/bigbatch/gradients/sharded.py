"""Sharded parameters (FSDP2): reduced gradients, of which each rank sees its shard; their mesh."""

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import GradientError, SettingError
from bigbatch.gradients.grad_guard import GradGuard, all_zero
from bigbatch.gradients.gradient_hooks import watching_hook
from bigbatch.gradients.leaf_tap import GradientTap
from bigbatch.gradients.protocols import OnGradient
from bigbatch.gradients.rank_reducer import RankReducer
from bigbatch.gradients.tapped_source import TappedSource

_REMEDY = (
    "tensor parallelism cannot be measured in this release; leave parallelize_module out, and "
    "shard by fully_shard alone over all ranks"
)


class ShardedSource(TappedSource):
    """Watches the local shards of `.grad`; see [Note: FSDP2's shards] in `fsdp2.py`.

    An engine that reduces in every backward leaves the sum so far, S_j, in the shard. What the
    micro-batch of all ranks together added is S_j - S_{j-1}, for one copy of the shard. A backward
    whose gradient is not reduced is not seen.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        guard = ShardSumsGuard()
        reducer = RankReducer(reduces_each_backward=True)
        super().__init__(parameters, _accumulate_tap(guard), guard, reducer)


class ShardSumsGuard(GradGuard):
    """Keeps S_{j-1}, each shard's sum before the current micro-batch."""

    def __init__(self) -> None:
        # autograd.grad runs no hook here, so every backward that is seen counts
        super().__init__(grad_may_wait=True, local_grad=local_shard)
        self.arriving: Tensor | None = None  # the parameter whose hook runs
        self._sums: dict[Tensor, Tensor] = {}

    def begin(self, *, foreign_backward: bool) -> None:
        """Forgets the sums of the previous step."""
        super().begin(foreign_backward=foreign_backward)
        self._sums.clear()

    def added_by(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """S_j - S_{j-1}."""
        previous_sum = self._sums.get(parameter)
        return gradient if previous_sum is None else gradient - previous_sum

    def after_report(self, parameter: Tensor, gradient: Tensor) -> None:
        """Keeps S_j, once every subscriber has read what was added to S_{j-1}."""
        if parameter in self._sums:
            self._sums[parameter].copy_(gradient)
        else:
            self._sums[parameter] = gradient.clone()

    keeps_sums = True

    def sum_of(self, parameter: Tensor) -> Tensor | None:
        """This rank's shard of S_j, in a buffer that nobody else writes to."""
        return self._sums.get(parameter)

    def is_clean(self) -> bool:
        """Whether the other shards are empty; the arriving one holds the gradient already."""
        other_parameters = [p for p in self.parameters if p is not self.arriving]
        return all_zero(grad for p in other_parameters if (grad := self.local_grad(p)) is not None)

    def is_clean_within_step(self) -> bool:
        """Whether gradients were set to None. Zeros are not looked for, as one rank may have them.

        Raises:
            GradientError: `.grad` was written to more than once, on every rank alike.
        """
        for last, now in zip(self._stamps, self.stamps_before, strict=True):
            if last and (now is None or now[0] != last[0]):
                return True
            if last and now and now[1] - last[1] > 1:
                raise GradientError(
                    ".grad was written to between two backwards of a step; where a step was "
                    "left out, call optimizer.zero_grad(), or zero_grad(set_to_none=True)"
                )
        return False


def _accumulate_tap(guard: ShardSumsGuard) -> GradientTap:
    """Post-accumulate hooks on sharded parameters, which report S_j."""

    def register(parameter: Tensor, report: OnGradient) -> RemovableHandle:
        def on_accumulation(parameter: Tensor) -> None:
            shard = local_shard(parameter)
            assert shard is not None
            guard.arriving = parameter
            report(parameter, shard)
            guard.arriving = None

        hook = watching_hook(on_accumulation)
        return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call,no-any-return]

    return GradientTap(register)


def local_shard(parameter: Tensor) -> Tensor | None:
    """This rank's shard of `.grad`, whether that is a DTensor or plain."""
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def require_no_tensor_parallelism(parameters: Iterable[Tensor]) -> None:
    """Raises SettingError for a parameter that something else than `fully_shard` has sharded."""
    for parameter in parameters:
        if isinstance(parameter, DTensor) or hasattr(parameter, "_st_info"):
            raise SettingError(
                f"a parameter of shape {tuple(parameter.shape)} is sharded over a mesh that "
                f"fully_shard has not made: {_REMEDY}"
            )


def require_one_mesh(parameters: Sequence[Tensor]) -> DTensor:
    """The first parameter, whose mesh all must have; raises SettingError if they do not."""
    first = parameters[0]
    assert isinstance(first, DTensor)
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        if parameter.device_mesh != first.device_mesh:
            raise SettingError(
                f"parameters are sharded over two meshes, {first.device_mesh} and "
                f"{parameter.device_mesh} (experts?); in this release they share one"
            )
        if parameter.device.type == "cpu" != parameter.device_mesh.device_type:
            raise SettingError(
                "parameters are offloaded to the CPU (CPUOffloadPolicy), away from the ranks' "
                f"{first.device_mesh.device_type}; that cannot be measured in this release"
            )
        *copies, shard = [isinstance(p, Replicate) for p in parameter.placements]
        if shard or not all(copies) or len(copies) > 1:
            raise SettingError(
                f"a parameter has the placements {parameter.placements}, where fully_shard alone "
                f"gives (Shard,) or (Replicate, Shard): {_REMEDY}; for replicate(), wrap the model "
                "in DistributedDataParallel"
            )
    return first
