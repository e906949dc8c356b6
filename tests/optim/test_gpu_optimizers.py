"""Optimizers on a GPU: as on a CPU, and the host never waits in a step.

What can be tested of that without a GPU is which operations a step asks for.
"""

import contextlib
import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW

from bigbatch.optim import LAMB, LARS, VRLAMB, VRLARS, VRSGD, VarianceReduced, VRAdam
from kernel_recorder import Recorded, no_synchronization
from tensors import difference

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to step on")
K = 8
SHAPES = [(64, 33), (64,), (8, 4, 3, 3), (1,)]  # a matrix, a bias, a convolution, one weight
# Gradients are the same to the bit on both devices, and sums over a layer are 1e-6 apart there;
# bfloat16 weights may then be rounded otherwise, by 4e-3 of themselves, in each of three steps.
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}

VR = {
    "VRSGD": partial(VRSGD, lr=0.1),
    "VRMomentum": partial(VRSGD, lr=0.02, momentum=0.9),
    "VRAdam": partial(VRAdam, lr=0.01),
    "VRLARS": partial(VRLARS, lr=1.0, trust_coefficient=0.02, weight_decay=0.01),
    "VRLAMB": partial(VRLAMB, lr=0.01),
    "VarianceReduced(AdamW)": lambda parameters, **own: VarianceReduced(
        AdamW(parameters, lr=0.01, fused=True), **own
    ),
}
MAKE = VR | {
    "LARS": partial(LARS, lr=1.0, trust_coefficient=0.02, weight_decay=0.01),
    "LAMB": partial(LAMB, lr=0.01),
}
every_optimizer = pytest.mark.parametrize("name", MAKE)
every_vr_optimizer = pytest.mark.parametrize("name", VR)


class Given(nn.Module):
    """Weights of several shapes whose micro-batch gradients are what it is called on, exactly."""

    def __init__(self, dtype, device="cpu", shapes=SHAPES):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        weights = [laid_out(torch.randn(shape, generator=draw)) for shape in shapes]
        self.weights = nn.ParameterList(weight.to(device, dtype) for weight in weights)

    def forward(self, gradients):
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))


def laid_out(tensor):
    """Convolutions as GPUs like them."""
    return tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def gradients_of(model, step, k=K):
    """What the micro-batches of a step add to `.grad`, drawn on the CPU for every device."""
    draw = torch.Generator().manual_seed(step)
    for _ in range(k):
        yield [
            laid_out(0.5 + torch.randn(w.shape, generator=draw)).to(w.device, w.dtype) / k
            for w in model.weights
        ]


def accumulate(model, step, k=K):
    for gradients in gradients_of(model, step, k):
        model(gradients).backward()


def train(model, optimizer, steps, ks=()):
    for step in steps:
        accumulate(model, step, ks[step] if ks else K)
        optimizer.step()
        optimizer.zero_grad()


# on a CPU: what a GPU would be asked for


def without_kernels(name):
    """As where there are none: by torch, but for torch's own fused steps."""
    if name in ("VRSGD", "VRMomentum"):
        momentum = 0.9 if name == "VRMomentum" else 0.0
        return lambda parameters, **own: VarianceReduced(
            SGD(parameters, lr=0.02, momentum=momentum, fused=True), fused=False, **own
        )
    if name == "VRAdam":
        return lambda parameters, **own: VarianceReduced(
            AdamW(parameters, lr=0.02, fused=True), fused=False, beta3=0.9, **own
        )
    return partial(MAKE[name], fused=False)


def recorded_steps(name, **own):
    """The operations of every step but the first."""
    model = Given(torch.float32)
    optimizer = without_kernels(name)(model.parameters(), **own)
    for step in range(3):
        accumulate(model, step)
        with Recorded() as seen:
            optimizer.step()
        optimizer.zero_grad()
        if step:
            yield seen


WATCHED = [
    (name, watch) for name in MAKE for watch in ([{}, {"watch": True}] if name in VR else [{}])
]


@pytest.mark.parametrize(
    ("name", "own"), WATCHED, ids=[f"{name}{', watch' if own else ''}" for name, own in WATCHED]
)
def test_a_step_reads_no_number_and_sends_none_to_the_device(name, own):
    # LAMB's own step counts stand on the CPU, where reading one is no wait
    counts = {"_local_scalar_dense": len(SHAPES)} if "LAMB" in name else {}
    for seen in recorded_steps(name, **own):
        assert counts == seen.waits
        assert [] == seen.moved
        # a tensor of Python's numbers: on a GPU a copy that the host waits for
        assert 0 == seen.seen["lift_fresh"]


def test_the_recorder_sees_a_tensor_of_numbers():
    with Recorded() as seen:
        torch.ones(3).new_tensor(0.5)
        torch.ones(3).new_full((), 0.5)
    assert 1 == seen.seen["lift_fresh"]


# on a GPU


@GPU
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@every_optimizer
def test_a_gpu_steps_as_a_cpu_does(name, dtype):
    models = [Given(dtype, device) for device in ("cpu", "cuda")]
    for model in models:
        train(model, MAKE[name](model.parameters()), range(3))
    cpu, gpu = models
    assert difference(cpu, gpu) < CLOSE[dtype]


@GPU
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@every_vr_optimizer
def test_factors_on_a_gpu_are_those_on_a_cpu(name, dtype):
    results = []
    for device in ("cpu", "cuda"):
        model = Given(dtype, device)
        optimizer = VR[name](model.parameters(), watch=True)
        train(model, optimizer, [0])
        factors = optimizer.gsnr
        assert device == factors.mean.device.type
        results.append([factors.mean.cpu(), factors.lr_factor.cpu()])
    for on_cpu, on_gpu in zip(*results, strict=True):
        # squares of rounded bfloat16 gradients are summed in float32 on both
        torch.testing.assert_close(on_cpu, on_gpu, rtol=CLOSE[dtype], atol=0)


@GPU
@pytest.mark.parametrize("own", [{}, {"watch": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_vr_optimizer
def test_the_host_waits_for_no_step_after_the_first(name, dtype, own):
    model = Given(dtype, "cuda")
    optimizer = VR[name](model.parameters(), **own)
    for step in range(4):
        accumulate(model, step)
        with no_synchronization() if step > 1 else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()
    assert not own.get("watch") or optimizer.gsnr.mean.isfinite().all()


@GPU
@pytest.mark.parametrize("name", ["LARS", "LAMB"])
def test_the_host_waits_for_no_step_of_a_baseline(name):
    model = Given(torch.float32, "cuda")
    optimizer = MAKE[name](model.parameters())
    for step in range(4):
        accumulate(model, step)
        with no_synchronization() if step else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()


@GPU
def test_the_host_waits_for_no_backward_that_an_optimizer_watches():
    model = Given(torch.float32, "cuda")
    optimizer = VRAdam(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    gradients = list(gradients_of(model, 2))
    with no_synchronization():
        for of_one in gradients:
            model(of_one).backward()
        optimizer.step()


@GPU
@every_optimizer
def test_a_state_moves_between_devices_and_no_step_waits_then(name):
    models = [Given(torch.float32, device) for device in ("cpu", "cuda")]
    optimizers = [MAKE[name](model.parameters()) for model in models]
    cpu, gpu = models
    train(cpu, optimizers[0], range(2))
    file = io.BytesIO()
    torch.save(optimizers[0].state_dict(), file)
    file.seek(0)
    optimizers[1].load_state_dict(torch.load(file, map_location="cpu"))
    gpu.load_state_dict(cpu.state_dict())
    for step in range(2, 5):
        train(cpu, optimizers[0], [step])
        accumulate(gpu, step)
        with no_synchronization() if step > 3 else contextlib.nullcontext():
            optimizers[1].step()
        optimizers[1].zero_grad()
    assert difference(cpu, gpu) < CLOSE[torch.float32]


def half_precision_steps(name, scale, overflow=()):
    """A network in float16 autocast under a scaler; `overflow` names steps whose loss is inf."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).cuda()
    optimizer = VR[name](model.parameters())
    scaler = GradScaler("cuda", init_scale=scale, growth_interval=1000)
    draw = torch.Generator().manual_seed(1)
    for step in range(4):
        for number in range(K):
            x = torch.randn(8, 16, generator=draw).cuda()
            with torch.autocast("cuda", torch.float16):
                loss = mse_loss(model(x).float(), x[:, :4]) / K
            if step in overflow and number == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update(scale)
        optimizer.zero_grad()
        skipped = all(map(torch.equal, before, model.parameters()))
        assert (step in overflow) == skipped
    return model


@GPU
@every_vr_optimizer
def test_a_scale_of_half_precision_does_not_change_r(name):
    # float16 gradients have 3 digits, and less where a small scale lets them underflow
    small, large = half_precision_steps(name, 2.0**8), half_precision_steps(name, 2.0**12)
    assert difference(small, large) < 2e-2


@GPU
@every_vr_optimizer
def test_a_step_that_overflows_is_left_out_and_forgotten(name):
    model = half_precision_steps(name, 2.0**10, overflow=[1])
    assert all(p.isfinite().all() for p in model.parameters())


@GPU
def test_fused_adamw_is_what_steps_on_a_gpu():
    models = [Given(torch.float32, "cuda") for _ in range(2)]
    bare = AdamW(models[0].parameters(), lr=0.01, fused=True)
    off = VarianceReduced(AdamW(models[1].parameters(), lr=0.01, fused=True), gamma=1.0)
    for model, optimizer in zip(models, (bare, off), strict=True):
        train(model, optimizer, range(3))
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    assert off.param_groups[0]["fused"]
