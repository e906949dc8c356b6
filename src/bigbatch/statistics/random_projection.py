"""Random projections of gradients, which keep norms and angles on average."""

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from bigbatch.gradients import GradientSource, GroupGradients, MicroBatchGradients, Subscriber
from bigbatch.gradients.dtypes import full_precision, to_device, widest_float, without_autocast
from bigbatch.statistics.confidence import MAX_RATIO, MIN_RATIO
from bigbatch.statistics.norms import flattened

_SIZE = 1021  # prime, so that rows do not align with those of a weight matrix
_PROBES = 8  # number of projections
_MAX_PARAMETERS = 16  # number of probed parameters
_ELEMENTS = 256  # number of probed elements of each parameter
_DEVICE = operator.attrgetter("device")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class RandomProjections(Subscriber):
    """Subscriber of a source: each micro-batch's gradient projected on 1,021 floats.

    A tensor is read as rows of 1,021; each row is added with a random sign, the same for every
    micro-batch and on every rank. Sketches of sums are sums of sketches, and dot products of
    sketches estimate those of the gradients. Costs one read of each gradient.

    Source:
        Charikar et al. 2002 (count sketch); docs/theory.md (9).
    """

    needs_exact_groups = True

    def __init__(self, source: GradientSource) -> None:
        self._parameters, self._reducer = source.parameters, source.reducer
        # other signs on each process of a rank, which has other elements
        self._place = source.process % (source.processes // source.ranks)
        self._sketches: list[Tensor] = []
        self._signs: dict[Tensor, Tensor] = {}  # parameter -> one sign per row

    def begin(self) -> None:
        """A step starts."""
        self._sketches.clear()

    def micro_batch(self, weight: float, groups: int = 1) -> None:
        """A micro-batch starts."""
        self._sketches.append(self._zeros(groups))

    def gradients(self, batch: MicroBatchGradients) -> None:
        """Adds the gradients to the current projection, unless their groups follow."""
        if len(self._sketches[-1]) == 1:
            for parameter, gradient in zip(batch.parameters, batch.gradients, strict=True):
                self._add(parameter, gradient, self._sketches[-1][0])

    def groups(self, parameter: Tensor, gradient: Tensor, groups: GroupGradients) -> None:
        """Adds the gradient of each group to its projection."""
        for group, sketch in zip(groups.gradients, self._sketches[-1], strict=True):
            self._add(parameter, group, sketch)

    def _add(self, parameter: Tensor, gradient: Tensor, sketch: Tensor) -> None:
        flat = full_precision(flattened(gradient, parameter.stride()))
        rows, rest = divmod(flat.numel(), _SIZE)
        signs = self._signs.get(parameter)
        if signs is None or signs.device != flat.device or signs.dtype != flat.dtype:
            index = list(map(id, self._parameters)).index(id(parameter))
            seed = self._place * len(self._parameters) + index
            signs = self._signs[parameter] = random_signs((rows + 1,), seed).to(flat)
        if rows:
            with without_autocast(flat.device):
                projected = torch.mv(flat[: rows * _SIZE].view(rows, _SIZE).t(), signs[:rows])
            sketch.add_(to_device(projected, sketch.device))
        if rest:
            last = flat[rows * _SIZE :] * signs[rows]
            sketch[:rest].add_(to_device(last, sketch.device))

    def stack(self) -> Tensor:
        """The sketches of the step, (k, 1021). Collective over the processes of a rank."""
        sketches = torch.cat(self._sketches) if self._sketches else self._zeros(0)
        self._reducer.sum_slices(sketches)
        return sketches

    def _zeros(self, count: int) -> Tensor:
        device = self._parameters[0].device
        return torch.zeros(count, _SIZE, dtype=torch.float32, device=device)


class ProjectionProbe(Subscriber):
    """Subscriber of a source: eight projections of 256 elements of each of 16 parameters, summed.

    Summed over micro-batches and ranks, they must equal those of `.grad` at the end. This finds an
    edit of `.grad` that changes no version counter (`unscale_`), a lossy or summing reduction, and
    gradients that no hook reported, but no edit of other elements.
    """

    def __init__(self, source: GradientSource) -> None:
        self._source = source
        self._trained: list[Tensor] = []  # the trained parameters, when some of them were chosen
        # probed parameters, their ids, and how many elements of each
        self._chosen: list[tuple[Tensor, int, int]] = []
        # layout of the shards, number -> positions in this rank's shard of the probed elements that
        # it has, and their numbers; empty if it has all of them, in order
        self._indices: dict[tuple[int, int], list[Tensor]] = {}
        self._signs = torch.zeros(0)  # (8, elements)
        # of each open micro-batch, by chosen parameter
        self._open: dict[int, list[Tensor | None]] = {}
        self._rows: list[Tensor] = []  # elements of each micro-batch
        self.begin()

    def begin(self) -> None:
        """A step starts."""
        self._rows.clear()
        parameters = self._source.parameters
        trained = list(itertools.compress(parameters, map(_REQUIRES_GRAD, parameters)))
        is_same = list(map(id, trained)) == list(map(id, self._trained))
        if not is_same or self._signs.device != parameters[0].device:
            self._trained = trained
            self._choose_parameters(parameters[0].device)

    def _choose_parameters(self, device: torch.device) -> None:
        """Chooses up to 16 of the trained parameters, evenly from the first to the last."""
        sizes = [(p, self._source.reducer.shape(p).numel()) for p in self._trained]
        sizes = [(p, size) for p, size in sizes if size]
        gaps = max(1, min(_MAX_PARAMETERS, len(sizes)) - 1)
        numbers = {i * (len(sizes) - 1) // gaps for i in range(gaps + 1)} if sizes else set()
        chosen = map(sizes.__getitem__, sorted(numbers))
        self._chosen = [(p, id(p), min(_ELEMENTS, size)) for p, size in chosen]
        self._indices.clear()
        signs = random_signs((_PROBES, sum(count for *_, count in self._chosen)), 0)
        self._signs = signs.to(device, widest_float(device))

    def micro_batch(self, weight: float, groups: int = 1) -> None:
        """A micro-batch starts."""
        self._open[self.number] = [None] * len(self._chosen)

    def gradients(self, batch: MicroBatchGradients) -> None:
        """Keeps the first elements of the gradients of probed parameters."""
        gradients = dict(zip(map(id, batch.parameters), batch.gradients, strict=True))
        heads = self._open[self.number]
        for i, (_, number, count) in enumerate(self._chosen):
            if number in gradients:
                head = _head(gradients[number], count)
                # a gradient that came alone is freed now, or the engine writes to its memory
                heads[i] = head.clone() if len(gradients) == 1 else head

    def end(self) -> None:
        """The micro-batch is complete."""
        self._rows.append(self._joined(self._open[self.number]))
        self._open[self.number] = []  # views of gradients, whose memory they would keep

    def projections(self, *, with_grad: bool = False) -> Tensor:
        """The projections of each micro-batch of the step, (k, 8); then of `.grad`, (k + 1, 8)."""
        rows = [*self._rows, self._joined(self._grad_heads())] if with_grad else self._rows
        if not rows:
            return self._signs.new_zeros(0, _PROBES)
        with without_autocast(self._signs.device):
            return torch.stack(rows).to(self._signs.dtype) @ self._signs.t()

    def _grad_heads(self) -> list[Tensor | None]:
        """The probed elements of this rank's shards of `.grad`, zeros where others have them."""
        heads: list[Tensor | None] = []
        shards = self._source.reducer.shards
        for number, (parameter, _, count) in enumerate(self._chosen):
            head = grad = self._source.local_grad(parameter)
            if grad is not None:
                key = shards.layout, number
                if key not in self._indices:
                    found = shards.shard_indices(parameter, count) or ()
                    self._indices[key] = [to_device(some, grad.device) for some in found]
                if indices := self._indices[key]:
                    positions, numbers = indices
                    head = grad.new_zeros(count)
                    head[numbers] = grad.reshape(-1)[positions]
                else:
                    head = _head(grad, count)
            heads.append(head)
        return heads

    def _joined(self, heads: Sequence[Tensor | None]) -> Tensor:
        """The probed elements of all chosen parameters, zeros where there is no gradient."""
        if not self._chosen:
            return self._signs.new_zeros(0)
        parts = [
            torch.zeros(count, device=self._signs.device) if head is None else head
            for head, (*_, count) in zip(heads, self._chosen, strict=True)
        ]
        if len(set(map(_DEVICE, parts))) > 1:
            parts = [to_device(part, self._signs.device) for part in parts]
        return torch.cat(parts)


def _head(gradient: Tensor, count: int) -> Tensor:
    if not gradient.is_contiguous():  # only the rows that have them are copied
        rows = -(-count * gradient.shape[0] // gradient.numel())
        gradient = gradient[:rows]
    return gradient.reshape(-1)[:count]


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
    """x without each micro-batch in turn, from sketches t_d of this rank's g_d, (k_r, m) `means`.

    With a_d = |t_d|^2, c_d = t_d . t, and over all ranks k, N, N t and A = sum n_d a_d (`spread`):

        N_d = N - n_d,   G2_d = (N^2 |t|^2 - 2 N n_d c_d + n_d^2 a_d) / N_d^2
        noise_d = (A - n_d a_d - N_d G2_d) / (k - 2),   signal_d = G2_d - noise_d / N_d
        x_d = ln(1 + N signal_d / noise_d), with N since it estimates the x of the whole step

    Source:
        The delete-one jackknife (Quenouille 1949, Tukey 1958); docs/theory.md (9).
    """
    mean = total_projection / samples
    squares, dots = means.square().sum(1), means @ mean
    rest, total = samples - sizes, samples**2 * mean.square().sum()
    rest_sqnorm = (total - 2 * samples * sizes * dots + sizes**2 * squares) / rest**2
    noise = (spread - sizes * squares - rest * rest_sqnorm) / (count - 2)
    tiny = torch.finfo(noise.dtype).tiny
    ratio = 1 + samples * (rest_sqnorm - noise / rest) / noise.clamp_min(tiny)
    return ratio.clamp(MIN_RATIO, MAX_RATIO).log()
