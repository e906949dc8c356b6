"""r and the base optimizer's step in one kernel pass are r, then torch's own fused step."""

import copy
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from bigbatch.kernels import native
from bigbatch.optim import VarianceReduced
from kernel_recorder import Recorded

pytestmark = pytest.mark.skipif(native.library() is None, reason="no compiled kernels here")

BASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, {}),
    "decay": (SGD, {"weight_decay": 0.1, "maximize": True}),
    "momentum": (SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "nesterov": (SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam": (Adam, {"weight_decay": 0.1, "maximize": True}),
    "AdamW": (AdamW, {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}),
}
SHAPES = [(), (3,), (40, 25), (0,), (5, 3, 2, 2), (300_007,)]


def made(base: str, beta3: float | None, **settings: Any) -> VarianceReduced:
    """The optimizer, over parameters in two groups of different rates."""
    make, others = BASES[base]
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    parameters[4].data = parameters[4].data.contiguous(memory_format=torch.channels_last)
    groups = [{"params": parameters[::2], "lr": 0.1}, {"params": parameters[1::2]}]
    own = {"gamma": settings.pop("gamma", 0.1), "watch": settings.pop("watch", False)}
    return VarianceReduced(make(groups, lr=0.01, **others, **settings), beta3=beta3, **own)


def step(optimizer: VarianceReduced, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(4):
        gradients = [torch.randn(p.shape, generator=draw) + 0.2 for p in parameters]
        torch.autograd.backward(parameters, gradients)
    optimizer.step()


def arrays(optimizer: VarianceReduced) -> list[torch.Tensor]:
    """Parameters, gradients and states."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [x for p in parameters for x in optimizer.state[p].values() if x is not None]
    return [*(p.detach() for p in parameters), *(p.grad for p in parameters), *states]


@pytest.mark.parametrize("beta3", [None, 0.9])
@pytest.mark.parametrize("base", BASES)
def test_one_pass_is_r_and_then_torchs_fused_step(base: str, beta3: float | None) -> None:
    """A hook of the user's on the base optimizer, which sees r g, leaves its step to torch."""
    one, two = (made(base, beta3, fused=True, watch=True) for _ in range(2))
    calls: list[Any] = []
    two.base.register_step_pre_hook(lambda *_: calls.append(None))
    for seed in range(4):
        step(one, seed)
        step(two, seed)
        expected = list(map(torch.clone, arrays(two)))
        for actual, other in zip(arrays(one), expected, strict=True):
            # a few roundings of values of at most 10, which Adam divides by small moments
            torch.testing.assert_close(actual, other, rtol=2e-5, atol=1e-5)
        torch.testing.assert_close(one.gsnr.rows, two.gsnr.rows, rtol=1e-5, atol=0)
        one.zero_grad()
        two.zero_grad()
    assert 4 == len(calls)


@pytest.mark.cpu  # where the kernels are
@pytest.mark.parametrize("base", ["SGD", "momentum", "AdamW"])
def test_torch_steps_nothing_unless_an_implementation_was_chosen(base: str) -> None:
    """But Adam's counters of steps, of two groups. With gamma = 1 it steps, to the bit as alone."""
    seen = []
    chosen = {"fused": False}, {"foreach": True}, {"foreach": False}, {"gamma": 1.0}
    for settings in ({}, {"fused": True}, *chosen):
        optimizer = made(base, None, **settings)
        step(optimizer, 0)  # makes the state
        optimizer.zero_grad()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for _ in range(2):
            torch.autograd.backward(parameters, list(map(torch.ones_like, parameters)))
        with Recorded() as operations:
            optimizer.step()
        seen.append({n: k for n, k in operations.seen.items() if "record_function" not in n})
    counters = {"_foreach_add_": 2} if base == "AdamW" else {}
    assert [counters] * 2 == seen[:2]
    assert all(sum(each.values()) > 2 for each in seen[2:])


@pytest.mark.parametrize("base", ["momentum", "AdamW"])
def test_arrays_that_are_replaced_between_steps_are_found(base: str) -> None:
    """States are loaded, and memory moves, as by `load_state_dict` and `.data`."""
    one, two = (made(base, 0.9, fused=True) for _ in range(2))
    two.base.register_step_pre_hook(lambda *_: None)
    for seed in range(5):
        for optimizer in (one, two):
            step(optimizer, seed)
            optimizer.zero_grad()
            if seed == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            first = optimizer.param_groups[0]["params"]
            if seed == 2:
                for parameter in first:
                    parameter.data = parameter.data.clone()
            if seed == 3:  # the same memory in another order
                first[1].data = first[1].data.view(25, 40).t()
    actual, expected = (o.param_groups[0]["params"][0] for o in (one, two))
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-5)


def test_what_torch_would_not_step_in_its_fused_kernel_is_left_to_torch() -> None:
    class Halved(SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(0.5)
            return super().step(closure)

    weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for weight, base in zip(weights, (SGD, Halved), strict=True):
        optimizer = VarianceReduced(base([weight], lr=1.0))
        for row in ([1.0, 2.0, 3.0], [1.5, 2.0, 5.0]):
            torch.autograd.backward([weight], [torch.tensor(row)])
        optimizer.step()
    torch.testing.assert_close(weights[1], weights[0] / 2)


def test_a_rate_of_zero_moves_nothing_and_a_frozen_parameter_is_left_out() -> None:
    optimizer = made("momentum", None)
    frozen = optimizer.param_groups[1]["params"][0]
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    for _ in range(2):
        for _ in range(3):
            torch.autograd.backward(parameters, list(map(torch.randn_like, parameters)))
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        starts = [p.detach().clone() for p in parameters]
        optimizer.step()
        optimizer.zero_grad()
        assert all(map(torch.equal, starts, parameters))
    assert torch.equal(before, frozen)


def test_a_state_that_is_replaced_is_not_kept() -> None:
    optimizer = made("momentum", None)
    for seed in range(3):
        step(optimizer, seed)
        optimizer.zero_grad()
    first = optimizer.param_groups[0]["params"][0]
    buffer = weakref.ref(optimizer.state[first]["momentum_buffer"])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert buffer() is None


def test_a_parameter_that_grows_in_place_is_refused_as_by_torch() -> None:
    """Its address stays, and so does its state's, which is too short by then."""
    memory = torch.zeros(40)
    weight = nn.Parameter(memory[:5])
    optimizer = VarianceReduced(SGD([weight], lr=0.1, momentum=0.9))
    for length in (5, 5, 5, 40):
        weight.data = memory[:length]
        for _ in range(2):
            torch.autograd.backward([weight], [torch.randn(length)])
        if length == 5:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="must match the size"):
        optimizer.step()


def test_a_step_warns_at_the_line_of_the_user() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = VarianceReduced(SGD([weight], lr=0.1))
    for edits, match in ((False, "k = 2 micro-batches"), (True, "gradients were changed between")):
        for row in ([1.0, 2.0, 3.0], [1.5, 2.0, 5.0]):
            torch.autograd.backward([weight], [torch.tensor(row)])
        if edits:
            weight.grad *= 2  # type: ignore[operator]
        with pytest.warns(UserWarning, match=match) as caught:
            optimizer.step()
        assert __file__ == caught[0].filename
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_gradient_that_has_a_graph_is_added_once() -> None:
    """Kernels add others to `.grad`, from the second step on."""
    model = nn.Linear(5, 3)
    optimizer = VarianceReduced(SGD(model.parameters(), lr=0.1))
    for makes_graph in (False, True):
        plain = copy.deepcopy(model)
        for _ in range(3):
            x = torch.randn(4, 5)
            for net in (model, plain):
                net(x).square().mean().backward(create_graph=makes_graph)
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_that_are_edited_now_and_then_are_warned_of_once() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = VarianceReduced(SGD([weight], lr=0.1))
    warned = []
    for number in range(40):
        for row in torch.randn(8, 3):
            torch.autograd.backward([weight], [row])
        if number % 5 == 3:
            weight.grad *= 0.5  # type: ignore[operator]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        warned += [number] * len(caught)
        optimizer.zero_grad()
    assert [3] == warned


def test_gradients_that_the_loop_rescales_are_no_edit() -> None:
    """As where the labels of a batch are not as many as its first micro-batch let expect."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = VarianceReduced(SGD([weight], lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(40):
            for row in torch.randn(8, 3):
                torch.autograd.backward([weight], [row])
            optimizer._source.scale(1.0 if number < 5 else 0.75)
            optimizer.step()
            optimizer.zero_grad()
