"""The gradients of groups of samples: from one backward, and from a loop of backwards on slices."""

import copy

import torch
from torch import Tensor, nn

from bigbatch import GradientMeter
from bigbatch.gradients import Subscriber
from oracles import noise as oracle


class Scaled(torch.autograd.Function):
    """x * w, written by hand."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


class Recorder(Subscriber):
    """Keeps the groups' own gradients of every backward, by parameter."""

    needs_exact_groups = True

    def begin(self):
        self.backwards = []

    def micro_batch(self, weight, groups):
        self.backwards.append({})

    def gradients(self, batch):
        pass

    def groups(self, parameter, gradient, groups):
        self.backwards[-1][parameter] = groups.gradients.clone()


def sizes_of(samples, k):
    k = min(k, samples)
    return [samples // k + (d < samples % k) for d in range(k)]


def of_samples(output: Tensor) -> Tensor:
    """A loss of each sample, which no linear function of the output is."""
    flat = output.flatten(1) if output.dim() > 1 else output[:, None]
    weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)
    return (flat.sin() * weights).sum(1) + 0.1 * flat.square().sum(1)


def mean_loss(model, *inputs):
    return of_samples(model(*inputs)).mean()


def loop(model, inputs, k, loss=mean_loss):
    """What each of k backwards on slices adds to the mean gradient, (k, *shape) by parameter."""
    model = copy.deepcopy(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    sizes, rows = sizes_of(len(inputs[0]), k), []
    parts = zip(*(x.split(sizes) for x in inputs), strict=True)
    for part, n in zip(parts, sizes, strict=True):
        share = loss(model, *part) * (n / sum(sizes))
        rows.append(torch.autograd.grad(share, parameters, materialize_grads=True))
    return [torch.stack(row) for row in zip(*rows, strict=True)]


def expected_noise(model, inputs, k, loss=mean_loss):
    """The oracle's answer for the groups."""
    sizes = sizes_of(len(inputs[0]), k)
    rows = torch.cat([r.reshape(len(r), -1) for r in loop(model, inputs, k, loss)], 1)
    return oracle.weighted(rows * (sum(sizes) / torch.tensor(sizes).double())[:, None], sizes)


def measured(model, inputs, k, loss=mean_loss, **options):
    """What a meter says of one backward."""
    with GradientMeter(model, groups=k, **options) as meter:
        loss(model, *inputs).backward()
        return meter.read(samples=[len(inputs[0])])


def error(model, inputs, k, loss=mean_loss) -> float:
    """The largest error of a group's gradient in one backward, relative to its parameter's.

    Relative to the largest gradient of all parameters, if its parameter's is zero.
    """
    expected, model = loop(model, inputs, k, loss), copy.deepcopy(model)
    recorder = Recorder()
    with GradientMeter(model, groups=k) as meter:
        meter.source.subscribe(recorder)
        loss(model, *inputs).backward()
        meter.read(samples=[len(inputs[0])])
    (groups,) = recorder.backwards
    trained = [p for p in model.parameters() if p.requires_grad]
    largest, errors = max(row.abs().max() for row in expected), []
    for parameter, row in zip(trained, expected, strict=True):
        actual = torch.zeros_like(row)
        if row.any() or parameter in groups:  # the loss may not reach it
            actual = groups[parameter].to(row.dtype)
        assert row.shape == actual.shape
        errors.append((actual - row).abs().max() / (row.abs().max() if row.any() else largest))
    return torch.stack(errors).max().item()


def scatter_of_sketches(model, inputs, k, draws, loss=mean_loss, read=lambda s: s.grad_variance):
    """(mean, standard deviation) of what random projections say of one batch, over the signs."""
    model, values = copy.deepcopy(model), []
    with GradientMeter(model, groups=k) as meter:
        for _ in range(draws):
            model.zero_grad()
            loss(model, *inputs).backward()
            values.append(read(meter.read(samples=[len(inputs[0])])))
    values = torch.tensor(values, dtype=torch.float64)
    return values.mean().item(), values.std().item()


class Function(nn.Module):
    """A function of a module and of its inputs, with the parameters and modules that it uses."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                part = nn.Parameter(part)
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)
