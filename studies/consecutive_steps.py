"""Two consecutive steps that are compared, against micro-batches and the truth, in trainings.

python -m studies.consecutive_steps

Digits of scikit-learn, SGD with momentum .9. At every second step three values are found:
"consecutive steps" compares the step's gradient with the one before it; "micro-batches" are four
that the same batch is cut into; the truth is of 32 other batches of the same size at the weights
of the step. Hypotheses, stated before the first run:

1. At the smallest rate the noise of consecutive steps is within 5 % of the truth in both networks.
2. Their noise grows and their signal falls with the rate, the noise by more than 20 % at the
   largest.
3. Their signal scatters less than that of micro-batches, their noise more (by 3^(1/2)).
4. With BatchNorm at a batch of 32, the noise scale of micro-batches, which see 8 samples, is
   further from the truth than that of consecutive steps at the middle rate.
5. Intervals at .9 over 16 measured steps cover the window's truth in .85 or more of the cases at
   the smallest rate, in fewer at the largest.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bigbatch.optional_packages import import_optional
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.confidence import log_ratio
from bigbatch.statistics.consecutive_steps import ConsecutiveSteps
from bigbatch.statistics.noise_scale import GradientStatistics, from_weighted_losses
from studies.markdown_tables import Row, show

_BATCHES, _RATES = (32, 128), (0.002, 0.02, 0.1)
_MICRO_BATCHES, _TRUTH = 4, 32  # gradients that are compared
_WINDOW, _LEVEL = 16, 0.9

Draw = Callable[[int], tuple[Tensor, Tensor]]


def mlp() -> nn.Module:
    """One hidden layer, without BatchNorm."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def batch_norm_cnn() -> nn.Module:
    """Two convolutions, each followed by BatchNorm."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)),
    )


_NETWORKS = {"MLP": mlp, "CNN, BatchNorm": batch_norm_cnn}


@dataclass
class Estimates:
    """One way to measure, and the truth at the same steps of some trainings."""

    ours: list[GradientStatistics] = field(default_factory=list)
    truth: list[GradientStatistics] = field(default_factory=list)
    covered: list[bool] = field(default_factory=list)  # by the interval of a window, at each step

    def start(self) -> None:
        """A training starts."""
        self._averages = [NoiseAverage(_WINDOW, "steps", confidence=_LEVEL) for _ in range(2)]
        self._count = 0

    def add(self, ours: GradientStatistics, truth: GradientStatistics) -> None:
        """Adds a step."""
        self.ours.append(ours)
        self.truth.append(truth)
        average, true_average = (
            one.update(two) for one, two in zip(self._averages, (ours, truth), strict=True)
        )
        self._count += 1
        if self._count >= _WINDOW and average.interval is not None:
            signal, noise = true_average.grad_sqnorm, true_average.grad_variance
            x = log_ratio(signal, noise, ours.samples)
            self.covered.append(average.interval.low <= x <= average.interval.high)

    def row(self) -> Row:
        """Ratios of averages, errors of single steps, coverage."""
        signal, true_signal = (fmean(s.grad_sqnorm for s in x) for x in (self.ours, self.truth))
        noise, true_noise = (fmean(s.grad_variance for s in x) for x in (self.ours, self.truth))
        pairs = [*zip(self.ours, self.truth, strict=True)]
        errors = [one.similarity - two.similarity for one, two in pairs]
        noise_errors = [one.grad_variance / two.grad_variance for one, two in pairs]
        scale = fmean(two.grad_sqnorm + two.grad_variance / two.samples for two in self.truth)
        signal_errors = [(one.grad_sqnorm - two.grad_sqnorm) / scale for one, two in pairs]
        numbers = {
            "noise": noise / true_noise,
            "sd": stdev(noise_errors),
            "signal": signal / true_signal,
            "sd / E|g|^2": stdev(signal_errors),
            "noise scale": noise / true_noise / (signal / true_signal) if signal > 0 else math.inf,
            "similarity error": fmean(errors),
            "its sd": stdev(errors),
            "covered": fmean(self.covered) if self.covered else math.nan,
        }
        return {name: f"{number:.2f}" for name, number in numbers.items()}


def digits(seed: int) -> Draw:
    """Draws batches of the digits, with replacement."""
    datasets = import_optional("sklearn.datasets", "experiments")
    images, labels = map(torch.tensor, datasets.load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8) / 16
    own = torch.Generator().manual_seed(seed)

    def draw(samples: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(labels), (samples,), generator=own)
        return images[chosen], labels[chosen]

    return draw


def gradient_of(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """The gradient of the mean loss."""
    return [*torch.autograd.grad(cross_entropy(model(x), y), [*model.parameters()])]


def compare(gradients: Sequence[Sequence[Tensor]], samples: int) -> GradientStatistics:
    """Statistics of the mean gradients of equal micro-batches, of so many samples together."""
    k = len(gradients)
    rows = torch.stack([torch.cat([g.flatten() for g in one]) for one in gradients]).double()
    mean_sqnorm = float(rows.mean(0).square().sum())
    return from_weighted_losses(float(rows.square().sum()) / k / samples, mean_sqnorm, k, samples)


def train(
    model: nn.Module, draw: Draw, lr: float, batch: int, steps: int, truths: int
) -> Iterator[tuple[GradientStatistics, GradientStatistics, GradientStatistics]]:
    """Statistics of consecutive steps, of micro-batches and the truth, at every second step."""
    parameters = [*model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    pairs = ConsecutiveSteps()
    for _ in range(steps):
        x, y = draw(batch)
        gradient = gradient_of(model, x, y)
        sums = pairs.add(parameters, gradient, batch)
        if sums is not None:
            parts = zip(x.chunk(_MICRO_BATCHES), y.chunk(_MICRO_BATCHES), strict=True)
            cut = compare([gradient_of(model, *part) for part in parts], batch)
            others = [gradient_of(model, *draw(batch)) for _ in range(truths)]
            yield pairs.statistics(sums.tolist()), cut, compare(others, truths * batch)
        for parameter, one in zip(parameters, gradient, strict=True):
            parameter.grad = one
        optimizer.step()


def rows(
    seeds: int, steps: int, truths: int = _TRUTH, batches: Sequence[int] = _BATCHES
) -> Iterator[Row]:
    """A row for each network, rate, batch size and way to measure."""
    for (name, network), lr, batch in itertools.product(_NETWORKS.items(), _RATES, batches):
        ways = {"consecutive steps": Estimates(), "4 micro-batches": Estimates()}
        for seed in range(seeds):
            torch.manual_seed(seed)
            for way in ways.values():
                way.start()
            for pair, cut, whole in train(network(), digits(seed), lr, batch, steps, truths):
                truth = GradientStatistics(whole.grad_sqnorm, whole.grad_variance, batch, truths)
                for way, ours in zip(ways.values(), (pair, cut), strict=True):
                    way.add(ours, truth)
        for compared, way in ways.items():
            similarity = fmean(one.similarity for one in way.truth)
            labels = {"network": name, "rate": f"{lr:g}", "batch": str(batch)}
            yield {**labels, "similarity": f"{similarity:.2f}", "compared": compared, **way.row()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each row")
    parser.add_argument("--steps", type=int, default=240, help="steps of each")
    parser.add_argument("--tiny", action="store_true", help="four steps of one training")
    given = parser.parse_args(arguments)
    tiny = rows(1, 4, truths=3, batches=(8,))
    found = tiny if given.tiny else rows(given.seeds, given.steps)
    show(f"estimates over the truth; averages over {_WINDOW} measured steps", found)


if __name__ == "__main__":
    main()
