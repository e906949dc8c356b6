"""A training on the simulated device takes the decisions and steps of one on the CPU."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.optim import VRLAMB, VRLARS, VRSGD, VRAdam
from studies.launches import network
from studies.simulated_device import NAME, simulated_device
from tensors import difference, through_a_file

pytestmark = pytest.mark.early
STEPS, RESUMED_AT = 6, 3
ROUNDING = 1e-5  # of float32 sums in another order, over six steps

SGD = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
WAYS = {  # the optimizer, options of AdaptiveBatch, and what the loop does
    "default": (SGD, {}, ""),
    "cut": (SGD, {"every": 1, "min_micro_batches": 2}, ""),
    "groups": (SGD, {"every": 1, "groups": 8}, ""),
    "clipped": (SGD, {"every": 1}, "clip"),
    "scaler": (SGD, {"every": 1}, "scale"),
    "resumed": (SGD, {"every": 1}, "resume"),
    "fused AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True), {"every": 1}, ""),
    "VR-SGD": (lambda p: VRSGD(p, lr=0.1, momentum=0.9), {"every": 1}, ""),
    "VR-Adam": (lambda p: VRAdam(p, lr=1e-3), {"every": 1}, ""),
    "VR-LARS": (lambda p: VRLARS(p, lr=0.1), {"every": 1}, ""),
    "VR-LAMB": (lambda p: VRLAMB(p, lr=1e-3), {"every": 1}, ""),
    "VR-Adam, resumed": (lambda p: VRAdam(p, lr=1e-3), {"every": 1}, "resume"),
}


def start(way, device):
    """The loop of a training at its start."""
    optimizer, options, doing = WAYS[way]
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(512, 8, generator=draw)
    data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0))
    model = network().to(device)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0) if doing == "scale" else None
    return bb.AdaptiveBatch(
        model,
        optimizer(model.parameters()),
        DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(2)),
        policy=bb.SimiGrad(0.3, min_batch=16, max_batch=128),
        batch_size=32,
        scaler=scaler,
        **options,
    )


def run(train, device, doing, steps):
    """[(batch size, similarity, loss)] of so many steps."""
    records = []
    for step in train:
        for x, y in step:
            step.backward(cross_entropy(train.model(x.to(device)), y.to(device)))
        if doing == "clip":
            step.clip_grad_norm_(0.5)
        record = step.update()
        records.append((record.batch_size, record.similarity, record.loss))
        if len(records) == steps:
            return records
    raise AssertionError("one pass has too few steps")


def trained(way, device):
    """The records of a training, and its weights on the CPU."""
    doing = WAYS[way][2]
    train = start(way, device)
    if doing != "resume":
        records = run(train, device, doing, STEPS)
    else:
        records = run(train, device, doing, RESUMED_AT)
        states = train.state_dict(), train.model.state_dict(), train.optimizer.state_dict()
        ours, model, optimizer = map(through_a_file, states)
        train = start(way, device)
        train.model.load_state_dict(model)
        train.optimizer.load_state_dict(optimizer)
        train.load_state_dict(ours)
        records += run(train, device, doing, STEPS - RESUMED_AT)
    return records, [p.detach().cpu() for p in train.model.parameters()]


def on_both(rank, ranks, way):
    simulated_device()
    return [trained(way, device) for device in ("cpu", NAME)]


@pytest.mark.filterwarnings("ignore:k = ")
@pytest.mark.parametrize("way", WAYS)
def test_a_training_on_a_device_is_that_on_the_cpu(way, on_simulated_device):
    (expected, weights), (actual, device_weights) = on_simulated_device(on_both, way)
    assert [record[0] for record in expected] == [record[0] for record in actual]
    for (_, similarity, loss), record in zip(expected, actual, strict=True):
        assert pytest.approx((similarity, loss), rel=1e-4, abs=1e-6) == record[1:]
    assert difference(weights, device_weights) < ROUNDING


def branches(rank, ranks):
    simulated_device()
    return [branch_losses(device) for device in ("cpu", NAME)]


def branch_losses(device):
    train = start("cut", device)
    run(train, device, "", 2)

    def loss_of(batch):
        x, y = batch
        return cross_entropy(train.model(x.to(device)), y.to(device))

    result = train.branch_test(loss_of, [8, 16], samples=160, repeats=2, held_aside=32)
    return torch.tensor([result.first_losses, *result.losses])


def test_a_branch_test_on_a_device_finds_the_losses_of_the_cpu(on_simulated_device):
    expected, actual = on_simulated_device(branches)
    torch.testing.assert_close(expected, actual, rtol=1e-4, atol=0)
