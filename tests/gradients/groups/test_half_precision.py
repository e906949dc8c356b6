"""Groups of a backward under autocast and of half models, where a function's operands differ."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from bigbatch import GradientMeter
from group_gradients import Function, error

torch.set_num_threads(1)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to convolve on")


def normal(*shape):
    return torch.randn(shape) * 0.5


IMAGES = (8, 12, 9, 9)
MODELS = {
    "strided after GroupNorm, which autocast computes in float32": (
        lambda: Function(
            lambda s, x: s.c(s.n(s.a(x))),
            a=nn.Conv2d(12, 16, 3, padding=1),
            n=nn.GroupNorm(4, 16),
            c=nn.Conv2d(16, 32, 3, stride=2, bias=False),
        ),
        IMAGES,
    ),
    "1x1 shortcut": (
        lambda: Function(
            lambda s, x: s.n(s.c(x)) + s.s(x),
            n=nn.GroupNorm(4, 16),
            c=nn.Conv2d(12, 16, 3, padding=1, stride=2),
            s=nn.Conv2d(12, 16, 1, stride=2),
        ),
        IMAGES,
    ),
    "depthwise, transposed": (
        lambda: Function(
            lambda s, x: s.t(s.d(x)),
            d=nn.Conv2d(12, 12, 3, groups=12),
            t=nn.ConvTranspose2d(12, 10, 2, stride=2),
        ),
        IMAGES,
    ),
    "tied to an embedding": (
        lambda: Function(
            lambda s, x: s.n(s.e(x)) @ s.e.weight.t(), n=nn.LayerNorm(12), e=nn.Embedding(30, 12)
        ),
        None,
    ),
    "RMSNorm": (
        lambda: Function(lambda s, x: s.n(s.l(x)), l=nn.Linear(12, 16), n=nn.RMSNorm(16)),
        (8, 5, 12),
    ),
    "product of two parameters": (
        lambda: Function(lambda s, x: F.linear(x, s.a @ s.b), a=normal(16, 3), b=normal(3, 12)),
        (8, 12),
    ),
    "weight norm": (
        lambda: Function(lambda s, x: s.l(x), l=parametrizations.weight_norm(nn.Linear(12, 16))),
        (8, 12),
    ),
    "scale and shift": (
        lambda: Function(
            lambda s, x: s.l(x) * s.g + s.b, l=nn.Linear(12, 16), g=normal(16), b=normal(16)
        ),
        (8, 5, 12),
    ),
}


class ConvolutionDtypes(TorchDispatchMode):
    """The dtypes of gradient, input and weight in every backward of a convolution."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution_backward.default:
            self.calls.append({operand.dtype for operand in args[:3]})
        return function(*args, **(kwargs or {}))


def made(name, dtype, *, autocast):
    """A model with its loss and inputs."""
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build()
    x = torch.randint(30, (8, 5)) if shape is None else normal(*shape)
    if not autocast:
        model, x = model.to(dtype), x if shape is None else x.to(dtype)

    def loss(model, x):
        context = torch.autocast(x.device.type, dtype) if autocast else contextlib.nullcontext()
        with context:
            return model(x).float().sin().flatten(1).sum(1).mean()

    return model, x, loss


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "half model"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_groups_in_half_precision_have_the_gradients_of_a_backward_each(name, dtype, autocast):
    model, x, loss = made(name, dtype, autocast=autocast)
    # a loop of backwards rounds each group's gradient to half precision, at its own places
    assert error(model, (x,), 4, loss) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("per_layer", [False, True], ids=["projected", "exact"])
@pytest.mark.parametrize("name", [name for name, (_, shape) in MODELS.items() if shape == IMAGES])
def test_a_convolution_gets_operands_of_one_dtype_under_autocast(name, per_layer, device):
    """A CPU takes several dtypes; a GPU raises."""
    model, x, loss = made(name, torch.bfloat16, autocast=True)
    model, x = model.to(device), x.to(device)
    with ConvolutionDtypes() as dtypes, GradientMeter(model, groups=4, per_layer=per_layer) as m:
        loss(model, x).backward()
        m.read(samples=[len(x)])
    assert dtypes.calls
    assert all(len(call) == 1 for call in dtypes.calls)


class Casts(TorchDispatchMode):
    """The shapes of the tensors that are cast from bfloat16 to float32."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_cast = function is torch.ops.aten._to_copy.default
        if is_cast and args[0].dtype is torch.bfloat16 and kwargs["dtype"] is torch.float32:
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("per_layer", [False, True], ids=["projected", "exact"])
def test_a_convolution_casts_its_weight_once_in_a_backward_and_not_for_every_group(per_layer):
    model = nn.Conv2d(12, 16, 3).bfloat16()
    with GradientMeter(model, groups=4, per_layer=per_layer) as meter:
        loss = model(normal(*IMAGES).bfloat16()).float().mean()
        with Casts() as casts:
            loss.backward()
        meter.read(samples=[8])
    assert casts.shapes.count((16, 12, 3, 3)) <= 2  # the weight, and its gradient for comparison
