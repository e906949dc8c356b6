"""The simulated device counts what a GPU would launch, copy and wait for, and computes the same."""

import copy
import io
import os
from collections import Counter

import pytest
import torch
from torch import nn

from studies import simulated_device as module
from studies.simulated_device import NAME, simulated_device

pytestmark = pytest.mark.early


def counted(rank, ranks, name):
    """What a function of `CALLS` asks of the device, after its tensors are made."""
    device = simulated_device()
    tensors = [torch.arange(12.0).view(3, 4).to(NAME) for _ in range(3)]
    device.reset()
    CALLS[name](*tensors)
    return device.operations(), device.waits(), device.copies()


def multi_tensor(a, b, c):
    torch._foreach_add_([a, b], [c, c])


def multi_tensor_of_two_layouts(a, b, c):
    torch._foreach_add_([a, b], [c, c.T.contiguous().T])


def views(a, b, c):
    a.view(12)[2:5].unsqueeze(0).expand(2, 3).t().detach().diagonal()


def read(a, b, c):
    a.sum().item()
    b.tolist()


def pinned(a, b, c):
    host = torch.empty(3, 4, pin_memory=True)
    host.copy_(a, non_blocking=True)
    a.copy_(host, non_blocking=True)


def pageable(a, b, c):
    host = torch.empty(3, 4)
    host.copy_(a, non_blocking=True)
    a.copy_(host, non_blocking=True)


def events(a, b, c):
    event = torch.Event(NAME)
    event.record()
    assert event.query()
    event.synchronize()


CALLS = {
    "multi-tensor": multi_tensor,
    "multi-tensor, two layouts": multi_tensor_of_two_layouts,
    "views": views,
    "empty": lambda a, b, c: torch.empty_like(a),
    "read": read,
    "pinned": pinned,
    "pageable": pageable,
    "event": events,
    "synchronize": lambda a, b, c: torch.accelerator.synchronize(),
    "mask": lambda a, b, c: a[b > 1],
    "equal": lambda a, b, c: torch.equal(a, b),
    "copy": lambda a, b, c: a.copy_(b),
    "made of a number": lambda a, b, c: torch.tensor(1.0, device=NAME),
}
EXPECTED = {  # operations, waits, copies
    "multi-tensor": ({"_foreach_add_": 1}, {}, {}),
    "multi-tensor, two layouts": ({"copy_": 1, "_foreach_add_, one by one": 2}, {}, {}),
    "views": ({}, {}, {}),
    "empty": ({}, {}, {}),
    "read": ({"sum": 1}, {"item": 1, "copy to host": 1}, {"to host": 1}),
    "pinned": ({}, {}, {"to host": 1, "to device": 1}),
    "pageable": ({}, {"copy to host": 1}, {"to host": 1, "to device": 1}),
    "event": ({}, {"synchronize": 1}, {}),
    "synchronize": ({}, {"synchronize": 1}, {}),
    "mask": ({"gt": 1, "index": 1}, {"index": 1}, {}),
    "equal": ({"equal": 1}, {"equal": 1}, {}),
    "copy": ({"copy_": 1}, {}, {}),
    "made of a number": ({}, {"copy to device": 1}, {"to device": 1}),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_call_counts_what_a_gpu_would_do(name, on_simulated_device):
    assert tuple(map(Counter, EXPECTED[name])) == on_simulated_device(counted, name)


def training(rank, ranks):
    """Losses and weights on both devices, and the types of an autocast result."""
    simulated_device()
    simulated_device()  # changes nothing
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 1)
    model, found = nn.Sequential(*layers), []
    for name in ("cpu", NAME):
        placed = copy.deepcopy(model).to(name)
        optimizer = torch.optim.AdamW(placed.parameters(), fused=True)
        torch.manual_seed(1)
        for _ in range(3):
            placed(torch.randn(4, 6).to(name)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().cpu() for p in placed.parameters()])
    saved = io.BytesIO()
    torch.save(placed.state_dict(), saved)
    saved.seek(0)
    with torch.autocast(NAME, torch.bfloat16):
        result = placed(torch.randn(4, 6).to(NAME))
    places = {value.device.type for value in torch.load(saved).values()}
    return found, places, result.dtype


def test_it_computes_what_the_cpu_does(on_simulated_device):
    (expected, actual), places, dtype = on_simulated_device(training)
    torch.testing.assert_close(expected, actual, rtol=0, atol=0)
    assert ({NAME}, torch.bfloat16) == (places, dtype)


def memory(rank, ranks):
    device = simulated_device()
    before = device.in_use()
    kept = torch.ones(1000, device=NAME)
    device.reset()
    kept + kept
    return device.in_use() - before, device.peak() - before, device.allocations()


def test_its_peak_has_what_was_freed(on_simulated_device):
    in_use, peak, allocations = on_simulated_device(memory)
    assert (4000, 8000) == (in_use, peak)
    assert 0 == allocations  # of the operation's own


def numbers_of_the_host(rank, ranks):
    simulated_device()
    x = torch.ones(3, device=NAME)
    results = 1 - x, torch.tensor(2.0) * x, torch.lerp(x, x, 0.5), torch.where(x > 0, 2.0, x)
    return [(result.device.type, result.sum().item()) for result in results]


def test_numbers_of_the_host_are_taken_as_devices_take_them(on_simulated_device):
    expected = [(NAME, 0.0), (NAME, 6.0), (NAME, 3.0), (NAME, 6.0)]
    assert expected == on_simulated_device(numbers_of_the_host)


def mistakes(rank, ranks):
    simulated_device()
    found = []
    with torch.device(NAME):
        for make in (
            lambda: torch.ones(3) + torch.ones(3, device="cpu"),
            lambda: torch.empty(1 << 46),
        ):
            with pytest.raises(RuntimeError) as raised:
                make()
            found.append(f"{raised.typename}: {raised.value}")
    return found


def test_tensors_of_two_devices_and_too_large_ones_are_refused(on_simulated_device):
    mixed, too_large = on_simulated_device(mistakes)
    assert "expected all tensors on sim:0" in mixed
    assert "OutOfMemoryError: sim:0 out of memory" in too_large


def late(rank, ranks):
    torch.ones(3, requires_grad=True).sum().backward()
    try:
        simulated_device()
    except RuntimeError as error:
        return str(error)


def test_it_is_refused_after_a_backward(on_simulated_device):
    expected = "call simulated_device() before the first backward of the process"
    assert expected == on_simulated_device(late)


def test_without_a_compiler_the_reason_is_stated(monkeypatch, tmp_path):
    monkeypatch.setattr(module.sys, "prefix", str(tmp_path))
    monkeypatch.setitem(os.environ, "CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler; set CXX"):
        module.compiled_library()
