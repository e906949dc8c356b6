"""Between the first backward and the end of `measure` the host never waits for the device."""

import contextlib

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss

from bigbatch import AdaptiveBatch, Fixed, GradientMeter
from kernel_recorder import Recorded, no_synchronization

torch.set_num_threads(1)  # small tensors: a second thread only waits
SIZES = [4, 4, 4, 4]
WIDTH = 40  # so that a weight is longer than a sketch
OPTIONS = {
    "plain": {},
    "interval": {"confidence": 0.9},
    "layers": {"per_layer": True},
    "halves": {"half_batch_cosine": True},
    "all": {"confidence": 0.9, "per_layer": True, "half_batch_cosine": True},
}


def network(depth=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))


def backwards(model, scaler=None, loss="weighted"):
    generator = torch.Generator().manual_seed(1)
    device = next(model.parameters()).device
    for n in SIZES:
        x = torch.randn(n, WIDTH, generator=generator).to(device)
        value = mse_loss(model(x), torch.zeros(n, WIDTH, device=device))
        value = value * n / sum(SIZES) if loss == "weighted" else value
        (value if scaler is None else scaler.scale(value)).backward()


def recorded_step(model, meter, scaler=None, loss="weighted"):
    """One step's operations, from its first backward to the end of `measure`."""
    with Recorded() as seen:
        backwards(model, scaler, loss)
        meter.measure(SIZES)
    model.zero_grad()
    meter.source.restart()
    meter.next_step()
    return seen


def test_the_recorder_sees_a_wait():
    with Recorded() as seen:
        value = torch.ones(3)
        value.sum().item()
        bool(value.any())
        value.nonzero()
    assert {"_local_scalar_dense": 2, "nonzero": 1} == seen.waits


def test_the_recorder_sees_what_a_hook_does_in_a_backward():
    model = network(1)
    model[0].weight.register_hook(lambda gradient: gradient if gradient.sum() > 0 else None)
    with Recorded() as seen:
        backwards(model)
    assert {"_local_scalar_dense": len(SIZES)} == seen.waits


@pytest.mark.parametrize("loss", ["weighted", "mean"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_step_waits_for_nothing_once_the_first_one_is_over(options, loss):
    model = network()
    with GradientMeter(model, loss=loss, **options) as meter:
        recorded_step(model, meter, loss=loss)
        for _ in range(2):
            seen = recorded_step(model, meter, loss=loss)
            assert {} == seen.waits
            assert [] == seen.moved


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_first_step_waits_a_bounded_number_of_times(options):
    waits = []
    for depth in (16, 64):
        with GradientMeter(model := network(depth), **options) as meter:
            waits.append(sum(recorded_step(model, meter).waits.values()))
    few, many = waits
    assert few == many  # of 32 parameters and of 128
    assert many <= 16


def test_a_scaler_brings_no_wait():
    model, scaler = network(), GradScaler("cpu", init_scale=1024.0)
    with GradientMeter(model, scaler=scaler, **OPTIONS["all"]) as meter:
        recorded_step(model, meter, scaler)
        assert {} == recorded_step(model, meter, scaler).waits


def test_marked_micro_batches_bring_no_wait():
    model = network()
    with GradientMeter(model, **OPTIONS["all"]) as meter:
        for _ in range(2):
            with Recorded() as seen:
                for _ in SIZES:
                    with meter.micro_batch():
                        (model(torch.ones(4, WIDTH)).square().mean() / 4).backward()
                meter.measure(SIZES)
            model.zero_grad()
            meter.source.restart()
    assert {} == seen.waits


def test_micro_batches_that_miss_parameters_bring_no_wait():
    model = network(4)

    def step():
        with Recorded() as seen:
            for d in range(4):
                (model[d](torch.ones(4, WIDTH)).square().mean() / 4).backward()
            meter.measure(SIZES)
        model.zero_grad()
        meter.source.restart()
        return seen

    with GradientMeter(model, **OPTIONS["all"]) as meter:
        step()
        assert {} == step().waits


@pytest.mark.parametrize("every", [1, 2])
def test_a_step_of_a_loop_waits_once_in_its_update(every):
    model = network()
    meter = GradientMeter(model, **OPTIONS["all"])
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    train = AdaptiveBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=True),
        list(x.split(4)) * 5,
        policy=Fixed(16),
        micro_batch=4,
        meter=meter,
        every=every,
    )
    for number, step in enumerate(train):
        with Recorded() as seen:
            for batch in step:
                step.backward(model(batch).square().mean())
        if number:
            assert {} == seen.waits
        with Recorded() as seen:
            step.update()
        # one tolist() is a read of each element on a CPU, and one copy elsewhere
        assert set(seen.waits) <= {"_local_scalar_dense"}
        assert len(seen.moved) <= 1


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to wait for")


@GPU
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_gpu_is_not_waited_for_between_backward_and_measure(options):
    model = network().cuda()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()
    with GradientMeter(model, **options) as meter:
        for number in range(4):
            with no_synchronization() if number else contextlib.nullcontext():
                for n in SIZES:
                    (model(x).square().mean() * n / sum(SIZES)).backward()
                measured = meter.measure(SIZES)
            assert measured.isfinite().any()
            model.zero_grad()
            meter.source.restart()
            meter.next_step()


@GPU
def test_a_gpu_is_waited_for_where_a_gradient_is_looked_at():
    value = torch.ones(3, device="cuda")
    with no_synchronization(), pytest.raises(RuntimeError, match="synchronizing"):
        value.sum().item()


@GPU
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_gpu_measures_what_a_cpu_does(options):
    seen = []
    for device in ("cpu", "cuda"):
        model = network().double().to(device)
        with GradientMeter(model, **options) as meter:
            generator = torch.Generator().manual_seed(1)
            for n in SIZES:
                x = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64).to(device)
                (model(x).square().mean() * n / sum(SIZES)).backward()
            seen.append(meter.read(SIZES))
    cpu, gpu = seen
    assert pytest.approx((cpu.grad_sqnorm, cpu.grad_variance)) == (
        gpu.grad_sqnorm,
        gpu.grad_variance,
    )
    assert (
        pytest.approx(cpu.half_batch_cosine) == gpu.half_batch_cosine
        if "half_batch_cosine" in options
        else gpu.half_batch_cosine is None
    )
    if "confidence" in options:  # sketches are float32
        assert pytest.approx(cpu.similarity_interval, rel=1e-4) == gpu.similarity_interval


@GPU
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_model_may_move_to_a_gpu_and_back(options):
    model = network()
    seen = []
    with GradientMeter(model, **options) as meter:
        for device in ("cpu", "cuda", "cpu"):
            model.zero_grad()
            backwards(model.to(device))
            seen.append(meter.read(SIZES))
    for on_cpu in seen[1:]:
        assert pytest.approx((seen[0].grad_sqnorm, seen[0].grad_variance), rel=1e-4) == (
            on_cpu.grad_sqnorm,
            on_cpu.grad_variance,
        )
