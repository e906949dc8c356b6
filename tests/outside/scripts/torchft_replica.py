"""One replica of examples/torchft: python torchft_replica.py LIGHTHOUSE NUMBER FAULT STEPS."""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torchft
from torch import nn
from torch.distributed import TCPStore
from torch.nn.functional import mse_loss

import bigbatch as bb

sys.path.append(str(Path(__file__).parents[3] / "examples" / "torchft"))
from adaptive_replicas import committed_steps

MICRO, START, LARGEST, RATE = 4, 32, 64, 0.05

Batch = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]  # with the weights it met


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def micro_batches(model, number: int, fault: str, replicas: list[int], seen: list[Batch]):
    """Batches of this replica; the second after two steps of two replicas is one of a fault."""
    draw, after = torch.Generator().manual_seed(number), 0
    while True:
        x = torch.randn(MICRO, 3, generator=draw, dtype=torch.float64)
        y = x.sum(1, keepdim=True) + torch.randn(MICRO, 1, generator=draw, dtype=torch.float64)
        after += replicas.count(2) >= 2
        if after == 2 and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if after == 2 and fault == "nan":
            y[0] = torch.nan
        seen.append((x, y, {name: w.clone() for name, w in model.state_dict().items()}))
        yield x, y


def own_signal_and_noise(batches: list[Batch]) -> tuple[float, float]:
    """From the definition, of one gradient after the other."""
    model, gradients = network(), []
    for x, y, weights in batches:
        model.load_state_dict(weights)
        found = torch.autograd.grad(mse_loss(model(x), y), list(model.parameters()))
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
    g, n = torch.stack(gradients), MICRO
    noise = float(n * (g - g.mean(0)).square().sum() / (len(g) - 1))
    return float(g.mean(0).square().sum()) - noise / (n * len(g)), noise


def main(lighthouse: str, number: str, fault: str, lasts: str) -> None:
    model, store = network(), TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    controller = bb.Controller(
        bb.SimiGrad(target=0.999), START, max_batch=LARGEST, smoothing=None
    )  # always below it
    seen, replicas = list[Batch](), list[int]()  # what was read; replicas of each step
    steps = committed_steps(
        model,
        optimizer,
        micro_batches(model, int(number), fault, replicas, seen),
        mse_loss,
        controller,
        micro=MICRO,
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=20)),
        min_replica_size=1,
        replica_id=f"replica{number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=20),
    )
    for plan, statistics in steps:
        replicas.append(plan.ranks)
        row = {
            "steps": controller.state_dict()["steps"],
            "plan": [plan.ranks, plan.accumulation, plan.batch_size],
            "measured": [statistics.grad_sqnorm, statistics.grad_variance],
            "own": own_signal_and_noise(seen[-plan.accumulation :]),
            "next": controller.decision.batch_size,
            "weights": float(sum(w.double().abs().sum() for w in model.state_dict().values())),
            "lr": optimizer.param_groups[0]["lr"],
        }
        print(json.dumps(row), flush=True)
        if replicas.count(2) >= int(lasts):
            break
    steps.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
