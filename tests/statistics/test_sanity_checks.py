"""What a meter says of the run itself, once, on one process; and two ratios of its numbers."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bigbatch import GradientMeter, GradientStatistics
from bigbatch.errors import GradientError

torch.set_num_threads(1)  # small tensors: a second thread only waits
OTHER = {"weighted": "mean", "mean": "weighted"}


class Run:
    """Training on ragged micro-batches of 1 to 16 samples, under a meter given `stated`."""

    def __init__(self, loss, seed, *, stated=None, noise=1.0, lr=0.05):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))
        self.x = torch.randn(600, 10)
        of_class = self.x @ torch.randn(10, 3) + noise * torch.randn(600, 3)
        self.y = of_class.argmax(1)
        self.loss = loss
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.meter = GradientMeter(self.model, loss=stated or loss)

    def step(self):
        sizes = torch.randint(1, 17, (4,)).tolist()
        for n in sizes:
            rows = torch.randint(600, (n,))
            value = cross_entropy(self.model(self.x[rows]), self.y[rows])
            (value * n / sum(sizes) if self.loss == "weighted" else value).backward()
        noise = self.meter.read(sizes)
        if self.loss == "mean":
            for p in self.model.parameters():
                p.grad /= len(sizes)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return noise


def said(run, steps):
    """(step, message) of every warning."""
    seen = []
    for step in range(steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.step()
        seen += [(step, str(warning.message)) for warning in caught]
    return seen


# the convention of the losses


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", ["weighted", "mean"])
def test_losses_of_the_other_convention_are_named_once_within_a_few_dozen_steps(loss, seed):
    seen = said(Run(loss, seed, stated=OTHER[loss]), 60)
    assert 1 == len(seen)
    step, message = seen[0]
    assert step < 40
    assert f'GradientMeter(loss="{loss}")' in message


# of noisy labels, and of classes that can be distinguished, where gradients get heavy tails
@pytest.mark.thorough
@pytest.mark.parametrize(("noise", "lr"), [(3.0, 0.05), (1.0, 0.05), (0.0, 0.05), (0.0, 0.5)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", ["weighted", "mean"])
def test_right_losses_are_never_doubted(loss, seed, noise, lr):
    assert [] == said(Run(loss, seed, noise=noise, lr=lr), 200)


@pytest.mark.parametrize("loss", ["weighted", "mean"])
def test_equal_micro_batches_say_nothing_of_the_convention(loss):
    weight = nn.Parameter(torch.zeros(9))
    generator = torch.Generator().manual_seed(0)
    with warnings.catch_warnings(), GradientMeter([weight], loss=loss) as meter:
        warnings.simplefilter("error")
        for _ in range(60):
            for _ in range(4):
                (weight * torch.randn(9, generator=generator)).sum().backward()
            meter.read([8] * 4)
            weight.grad = None


@pytest.mark.parametrize("loss", ["weighted", "mean"])
def test_samples_without_a_gradient_say_nothing_of_the_convention(loss):
    weight = nn.Parameter(torch.zeros(20))
    generator = torch.Generator().manual_seed(0)
    sizes = [1, 2, 4, 8]
    with warnings.catch_warnings(), GradientMeter([weight], loss=loss) as meter:
        warnings.simplefilter("error")
        for _ in range(60):
            for n in sizes:
                alive = torch.rand(n, 1, generator=generator) < 0.6  # a hinge loss, or padding
                gradients = (0.3 + torch.randn(n, 20, generator=generator)) * alive
                share = n / sum(sizes) if loss == "weighted" else 1.0
                (weight * gradients.mean(0) * share).sum().backward()
            meter.read(sizes)
            weight.grad = None


# what is wrong with the data


def feed(parameter, gradient):
    (parameter * gradient).sum().backward()


@pytest.mark.parametrize("loss", ["weighted", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_micro_batches_are_named_once(loss, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 3)).to(dtype)
    x, y = torch.randn(8, 10).to(dtype), torch.arange(8) % 3
    seen = []
    with GradientMeter(model, loss=loss) as meter:
        for _ in range(5):
            for _ in range(4):
                (cross_entropy(model(x), y) * (0.25 if loss == "weighted" else 1)).backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                meter.read([8] * 4)
            seen.append([str(warning.message) for warning in caught])
            model.zero_grad()
    assert [1, 0, 0, 0, 0] == [len(messages) for messages in seen]
    assert "all 4 micro-batches of a step have the same gradient" in seen[0][0]
    assert "same data" in seen[0][0]


@pytest.mark.parametrize("difference", [1e-2, 0.1])
def test_micro_batches_that_differ_a_little_are_not_identical(difference):
    torch.manual_seed(0)
    weight, common = nn.Parameter(torch.zeros(1000)), torch.randn(1000)
    with warnings.catch_warnings(), GradientMeter([weight]) as meter:
        warnings.simplefilter("error")
        for _ in range(4):
            feed(weight, common + difference * torch.randn(1000))
        # one sample each: noise / signal = difference^2; three differences of 1,000 elements
        assert pytest.approx(difference**2, rel=0.2) == meter.read([1] * 4).noise_scale


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("loss", ["weighted", "mean"])
def test_a_micro_batch_that_is_not_finite_is_named_by_its_number(loss, place, bad):
    torch.manual_seed(0)
    pair = [nn.Parameter(torch.zeros(9)) for _ in range(2)]
    gradients = torch.randn(5, 9)
    gradients[place, 4] = bad
    gradients[4, 1] = bad  # the first one is the one to look at
    with GradientMeter(
        pair, loss=loss, per_layer=False, confidence=0.9, half_batch_cosine=True
    ) as meter:
        for gradient in gradients:
            ((pair[0] * gradient) + pair[1]).sum().backward()
        with pytest.warns(UserWarning, match=f"micro-batch {place + 1} is not finite") as caught:
            step = meter.read([4, 4, 4, 4, 4])
    assert 1 == len(caught)
    assert math.isnan(step.similarity)


def test_it_is_said_once_that_a_micro_batch_is_not_finite():
    weight = nn.Parameter(torch.zeros(2))
    seen = []
    with GradientMeter([weight]) as meter:
        for _ in range(3):
            feed(weight, torch.tensor([1.0, math.nan]))
            feed(weight, torch.tensor([1.0, 0.0]))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                meter.read([1, 1])
            seen.append(len(caught))
            weight.grad = None
    assert [1, 0, 0] == seen


def test_a_sum_that_overflows_is_named_and_has_no_number():
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    with GradientMeter([weight]) as meter:
        for _ in range(2):
            feed(weight, torch.tensor([4e4, 1.0], dtype=torch.float16))  # twice: beyond 65,504
        with pytest.warns(UserWarning, match="of no micro-batch") as caught:
            step = meter.read([1, 1])
    assert 1 == len(caught)
    assert math.isnan(step.similarity)
    assert not math.isfinite(step.noise_scale)


def test_a_refused_step_leaves_health_as_it_was():
    run = Run("mean", 0, stated="weighted")
    for _ in range(2):
        run.step()
        (run.model(run.x).sum()).backward()
        with pytest.raises(GradientError):
            run.meter.read([600])
        run.optimizer.zero_grad()
    assert 1 == len(said(run, 60))


# AdaScale's gain, and the generalization ratio


def step_of(signal, noise, samples=256):
    return GradientStatistics(signal, noise, samples, micro_batches=8)


@pytest.mark.parametrize(("signal", "noise"), [(1.0, 64.0), (0.01, 64.0), (7.0, 0.5)])
@pytest.mark.parametrize("batch", [None, 64, 1024])
def test_adascales_gain_is_that_of_its_formula(signal, noise, batch):
    size = batch or 256
    expected = (signal + noise / 64) / (signal + noise / size)
    assert pytest.approx(expected) == step_of(signal, noise).adascale_gain(64, batch)


def test_adascales_gain_is_one_without_noise_and_that_of_the_batch_without_signal():
    assert 1.0 == step_of(3.0, 0.0).adascale_gain(64)
    assert 4.0 == step_of(0.0, 5.0).adascale_gain(64)
    assert 4.0 == step_of(-0.01, 5.0).adascale_gain(64)  # an estimate below 0 counts as 0
    assert 1.0 == step_of(0.0, 0.0).adascale_gain(64)
    assert 1.0 == step_of(2.0, 5.0).adascale_gain(256)  # the base batch itself


@pytest.mark.parametrize("noise_scale", [0.1, 10.0, 1e4])
def test_adascales_gain_grows_with_the_batch_and_stays_between_its_limits(noise_scale):
    gains = [step_of(1.0, noise_scale).adascale_gain(64, batch) for batch in (64, 128, 256, 4096)]
    assert sorted(gains) == gains
    assert all(1 <= gain <= b / 64 for gain, b in zip(gains, (64, 128, 256, 4096), strict=True))


@pytest.mark.parametrize(
    ("signal", "noise"), [(math.nan, math.nan), (math.nan, 5.0), (1.0, math.nan)]
)
def test_a_step_without_numbers_has_neither_gain_nor_ratio(signal, noise):
    assert math.isnan(step_of(signal, noise).adascale_gain(64))
    assert math.isnan(step_of(signal, noise).generalization_ratio())


@pytest.mark.parametrize("batch", [None, 16, 4096])
def test_the_generalization_ratio_is_that_of_its_formula(batch):
    expected = 2.0 / (2.0 + 64.0 / (batch or 256))
    assert pytest.approx(expected) == step_of(2.0, 64.0).generalization_ratio(batch)


def test_the_generalization_ratio_is_one_without_noise_and_zero_without_signal():
    assert 1.0 == step_of(3.0, 0.0).generalization_ratio()
    assert 0.0 == step_of(0.0, 5.0).generalization_ratio()
    assert 0.0 == step_of(-1e-9, 5.0).generalization_ratio()
    assert math.isnan(step_of(0.0, 0.0).generalization_ratio())


@pytest.mark.parametrize("noise", [1.0, 64.0, 1e4])
def test_the_ratio_and_the_similarity_are_one_number_at_half_the_batch(noise):
    step = step_of(1.0, noise)
    assert pytest.approx(step.similarity) == step.generalization_ratio(128)
