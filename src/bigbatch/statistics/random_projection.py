"""Random projections of gradients, which keep norms and angles on average."""

import torch
from torch import Tensor

from bigbatch.gradients import GradientSource, GroupGradients, Subscriber
from bigbatch.gradients.dtypes import FULL_PRECISION, to_device, widest_float, without_autocast
from bigbatch.gradients.rank_reducer import ShardIndices
from bigbatch.statistics.confidence import MAX_RATIO, MIN_RATIO
from bigbatch.statistics.norms import flattened

_SIZE = 1021  # prime, so that rows do not align with those of a weight matrix
_PROBES = 8  # number of projections
_MAX_PARAMETERS = 16  # number of probed parameters
_ELEMENTS = 256  # number of probed elements of each parameter


class RandomProjections(Subscriber):
    """Subscriber of a source: each micro-batch's gradient projected on 1,021 floats.

    A tensor is read as rows of 1,021; each row is added with a random sign, the same for every
    micro-batch and on every rank. Sketches of sums are sums of sketches, and dot products of
    sketches estimate those of the gradients. Costs one read of each gradient.

    Source:
        Charikar et al. 2002 (count sketch); docs/theory.md (9).
    """

    needs_exact_groups = True

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters
        self._sketches: list[Tensor] = []
        self._signs: dict[Tensor, Tensor] = {}  # parameter -> one sign per row

    def begin(self) -> None:
        """A step starts."""
        self._sketches.clear()

    def micro_batch(self, weight: float, groups: int = 1) -> None:
        """A micro-batch starts."""
        self._sketches.append(self.zeros(groups))

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Adds the gradient to the current projection, unless its groups follow."""
        if len(self._sketches[-1]) == 1:
            self._add(parameter, gradient, self._sketches[-1][0])

    def groups(self, parameter: Tensor, gradient: Tensor, groups: GroupGradients) -> None:
        """Adds the gradient of each group to its projection."""
        for group, sketch in zip(groups.gradients, self._sketches[-1], strict=True):
            self._add(parameter, group, sketch)

    def _add(self, parameter: Tensor, gradient: Tensor, sketch: Tensor) -> None:
        flat = flattened(gradient, parameter.stride())
        if flat.dtype not in FULL_PRECISION:
            flat = flat.float()
        rows, rest = divmod(flat.numel(), _SIZE)
        signs = self._signs_of(parameter, flat)
        if rows:
            with without_autocast(flat.device):
                projected = torch.mv(flat[: rows * _SIZE].view(rows, _SIZE).t(), signs[:rows])
            sketch.add_(to_device(projected, sketch.device))
        if rest:
            last = flat[rows * _SIZE :] * signs[rows]
            sketch[:rest].add_(to_device(last, sketch.device))

    def stack(self) -> Tensor:
        """The sketches of the step, (k, 1021)."""
        return torch.cat(self._sketches)

    def zeros(self, count: int) -> Tensor:
        """Sketches of zero gradients, (count, 1021)."""
        device = self._parameters[0].device
        return torch.zeros(count, _SIZE, dtype=torch.float32, device=device)

    def _signs_of(self, parameter: Tensor, flat: Tensor) -> Tensor:
        signs = self._signs.get(parameter)
        if signs is None or signs.device != flat.device or signs.dtype != flat.dtype:
            seed = next(i for i, p in enumerate(self._parameters) if p is parameter)
            signs = random_signs((flat.numel() // _SIZE + 1,), seed).to(flat.device, flat.dtype)
            self._signs[parameter] = signs
        return signs


class ProjectionProbe(Subscriber):
    """Subscriber of a source: eight projections of a few elements of some parameters, summed.

    The sum of the hooks' gradients over micro-batches and ranks must equal `.grad` at the end; the
    projections of both are compared. This finds an edit of `.grad` that changes no version counter
    (`unscale_`), a lossy or summing reduction, and gradients that no hook reported. The probe reads
    256 elements of each of 16 parameters, so it does not find an edit of other elements.
    """

    def __init__(self, source: GradientSource) -> None:
        self._source = source
        self._views: dict[Tensor, Tensor] = {}  # probed parameter -> its part of `_elements`
        # layout of the shards, parameter -> `_indices_of`
        self._indices: dict[tuple[int, Tensor], ShardIndices | None] = {}
        self._elements = torch.zeros(0, dtype=torch.int8)  # assigned by `_choose_parameters`
        self._projected: list[Tensor] = []  # the projections of each micro-batch, (8,)
        self.begin()

    def begin(self) -> None:
        """A step starts."""
        self._choose_parameters()
        self._projected.clear()

    def _choose_parameters(self) -> None:
        """Chooses up to 16 of the trained parameters, evenly from the first to the last."""
        shape = self._source.reducer.shape
        trained = [p for p in self._source.parameters if p.requires_grad and shape(p).numel()]
        gaps = max(1, min(_MAX_PARAMETERS, len(trained)) - 1)
        numbers = {i * (len(trained) - 1) // gaps for i in range(gaps + 1)} if trained else set()
        chosen = [trained[number] for number in sorted(numbers)]
        device = self._source.parameters[0].device
        dtype = widest_float(device)
        is_unchanged = [id(p) for p in chosen] == [id(p) for p in self._views]
        if is_unchanged and (self._elements.device, self._elements.dtype) == (device, dtype):
            return
        self._indices.clear()
        size = _ELEMENTS * len(chosen)
        self._elements = torch.zeros(size, dtype=dtype, device=device)
        self._views = {
            p: elements[: shape(p).numel()]
            for p, elements in zip(chosen, self._elements.view(len(chosen), _ELEMENTS), strict=True)
        }
        self._signs = random_signs((_PROBES, size), 0).to(self._elements)

    def micro_batch(self, weight: float, groups: int = 1) -> None:
        """A micro-batch starts."""
        self._elements.zero_()

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Keeps the first elements of the gradient of a probed parameter."""
        if parameter in self._views:
            _write_head(self._views[parameter], _head(gradient, gradient.shape))

    def end(self) -> None:
        """The micro-batch is complete."""
        self._projected.append(self._projections())

    def micro_batch_projections(self) -> Tensor:
        """The projections of each micro-batch of the step, (k, 8)."""
        if not self._projected:
            return self._elements.new_zeros(0, _PROBES)
        return torch.stack(self._projected)

    def grad_projections(self) -> Tensor:
        """The projections of this rank's shards of `.grad`, (8,)."""
        self._elements.zero_()
        for parameter, elements in self._views.items():
            grad = self._source.local_grad(parameter)
            if grad is not None:
                key = self._source.reducer.shards.layout, parameter
                if key not in self._indices:
                    self._indices[key] = self._indices_of(parameter, grad.device)
                indices = self._indices[key]
                head = _head(grad, self._source.reducer.shape(parameter))
                if indices is None:
                    _write_head(elements, head)
                else:
                    positions, numbers = indices
                    elements[numbers] = to_device(head[positions], elements.device, elements.dtype)
        return self._projections()

    def _projections(self) -> Tensor:
        with without_autocast(self._elements.device):
            return torch.mv(self._signs, self._elements)

    def _indices_of(self, parameter: Tensor, device: torch.device) -> ShardIndices | None:
        """Positions in this rank's shard of the probed elements that it has, and their numbers.

        None if it has all of them, in order.
        """
        count = min(_ELEMENTS, self._source.reducer.shape(parameter).numel())
        indices = self._source.reducer.shards.shard_indices(parameter, count)
        if indices is None:
            return None
        positions, numbers = indices
        return to_device(positions, device), to_device(numbers, self._elements.device)


def _head(tensor: Tensor, full_shape: torch.Size) -> Tensor:
    """The rows of a gradient, or of a shard, that have the first elements of the full gradient.

    Returns all of a flat shard of a gradient that is not flat, since it may have any order.
    """
    if not full_shape or tensor.ndim < len(full_shape):
        return tensor.reshape(-1)
    rows = -(-_ELEMENTS * full_shape[0] // full_shape.numel())
    return (tensor[:rows] if rows < tensor.shape[0] else tensor).reshape(-1)


def _write_head(elements: Tensor, head: Tensor) -> None:
    """Writes as many of the elements as are probed."""
    size = elements.numel()
    values = head[:size] if size < head.numel() else head
    elements.copy_(values, non_blocking=not elements.is_cpu)


def random_signs(shape: tuple[int, ...], seed: int) -> Tensor:
    """Random -1 or 1, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(2, shape, generator=generator, dtype=torch.float32, device="cpu")
    return bits.mul_(2).sub_(1)


def leave_one_out(
    means: Tensor,
    sizes: Tensor,
    total_projection: Tensor,
    spread: Tensor,
    count: Tensor,
    samples: Tensor,
) -> Tensor:
    """x without each micro-batch in turn, from sketches of the gradients.

    With t_d the sketch of g_d, a_d = |t_d|^2, t = sum n_d t_d / N, c_d = t_d . t, A = sum n_d a_d:

        N_d = N - n_d,   G2_d = (N^2 |t|^2 - 2 N n_d c_d + n_d^2 a_d) / N_d^2
        noise_d = (A - n_d a_d - N_d G2_d) / (k - 2),   signal_d = G2_d - noise_d / N_d
        x_d = ln(1 + N signal_d / noise_d)

    x_d has N and not N_d, since it estimates the x of the whole step. `means` are t_d of this
    rank, (k_r, m), and `sizes` n_d; N t, A (`spread`), k and N are over all ranks.

    Source:
        The delete-one jackknife (Quenouille 1949, Tukey 1958); docs/theory.md (9).
    """
    mean = total_projection / samples
    squares, dots = means.square().sum(1), means @ mean
    rest = samples - sizes
    rest_sqnorm = (
        samples**2 * mean.square().sum() - 2 * samples * sizes * dots + sizes**2 * squares
    ) / rest**2
    noise = (spread - sizes * squares - rest * rest_sqnorm) / (count - 2)
    tiny = torch.finfo(noise.dtype).tiny
    ratio = 1 + samples * (rest_sqnorm - noise / rest) / noise.clamp_min(tiny)
    return ratio.clamp(MIN_RATIO, MAX_RATIO).log()
