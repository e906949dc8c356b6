"""What a step costs on a GPU, by way of measuring: time, CPU, launches, waits, memory.

python -m studies.gpu --out costs.json --seconds 330
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile

import bigbatch as bb
from bigbatch.optim import VarianceReduced
from bigbatch_recipes.models.resnet import resnet_of_basic_blocks
from studies.markdown_tables import Row, show
from studies.sized_networks import GPT, mean_loss, with_group_norm
from studies.timing import interleaved, seconds

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_PROFILED_STEPS = 4
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")

Batch = tuple[Tensor, Tensor]
Build = Callable[[Any, float], Optimizer]


@dataclass(frozen=True)
class Case:
    """A network, its batch, its optimizer, and whether it is compiled."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    optimizer: Build
    compiled: bool = False


def _images(samples: int) -> Batch:
    x = torch.randn(samples, 3, 32, 32, device=DEVICE)
    return x, torch.randint(10, (samples,), device=DEVICE)


def _windows(samples: int, length: int, tokens: int) -> Batch:
    drawn = torch.randint(tokens, (samples, length + 1), device=DEVICE)
    return drawn[:, :-1], drawn[:, 1:]


def _resnet18() -> nn.Module:
    return with_group_norm(resnet_of_basic_blocks())


def _readme_network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 128), nn.ReLU(), nn.Linear(128, 10))


def _adamw(parameters: Any, lr: float) -> Optimizer:
    return AdamW(parameters, lr=lr, fused=True)


def _sgd(parameters: Any, lr: float) -> Optimizer:
    return SGD(parameters, lr=lr, momentum=0.9, fused=True)


def _cases(*, tiny: bool) -> dict[str, Case]:
    """All networks; with `tiny` a small one of each kind."""
    if tiny:
        small = partial(GPT, 1, 64, 256, 32)
        return {
            "MLP, 32": Case(_readme_network, partial(_images, 32), _sgd),
            "GPT, 16 x 32": Case(small, partial(_windows, 16, 32, 256), _adamw),
        }
    gpt33, gpt124 = partial(GPT, 9, 512, 8192, 256), partial(GPT, 12, 768, 50304, 1024)
    windows33 = {n: partial(_windows, n, 256, 8192) for n in (32, 128)}
    windows124 = {n: partial(_windows, n, 1024, 50304) for n in (16, 64)}
    return {
        "MLP .4 M, 32": Case(_readme_network, partial(_images, 32), _sgd),
        "ResNet-18 GN, 128": Case(_resnet18, partial(_images, 128), _sgd),
        "ResNet-18 GN, 1024": Case(_resnet18, partial(_images, 1024), _sgd),
        "GPT 33 M, 32 x 256": Case(gpt33, windows33[32], _adamw),
        "GPT 33 M, 128 x 256": Case(gpt33, windows33[128], _adamw),
        "GPT 124 M, 16 x 1024": Case(gpt124, windows124[16], _adamw),
        "GPT 124 M, 64 x 1024": Case(gpt124, windows124[64], _adamw),
        "GPT 33 M compiled, 32 x 256": Case(gpt33, windows33[32], _adamw, compiled=True),
    }


def autocast() -> AbstractContextManager[None]:
    """bfloat16 on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if DEVICE.type == "cuda" else nullcontext()


def _loss(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    with autocast():
        return mean_loss(model, x, y)


WAYS: dict[str, dict[str, Any]] = {
    "not measured": {"budget": 0.0},
    "default": {},
    "groups, every step": {"budget": None, "groups": 8},
    "cut in 4, every step": {"budget": None},
    "VR, groups": {"groups": 8},
    "VR, cut in 8": {},
}


def _plain_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    _loss(model, *batch).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def _adaptive_step(train: bb.AdaptiveBatch) -> None:
    """One step of the adaptive loop, whose loader has one batch."""
    for step in train:
        for x, y in step:
            step.backward(_loss(train.model, x, y))
        step.update()


def _step_of(case: Case, way: str) -> Callable[[], None]:
    """One step of this way; "plain" is a loop without the library."""
    model, batch = case.build().to(DEVICE), case.batch()
    if case.compiled:
        model.compile()
    optimizer = case.optimizer(model.parameters(), 1e-4)
    if way == "plain":
        return partial(_plain_step, model, optimizer, batch)
    if way.startswith("VR"):
        optimizer = VarianceReduced(optimizer)
    size = len(batch[0])
    options = WAYS[way] | {"policy": bb.Fixed(size), "micro_batch": size}
    return partial(_adaptive_step, bb.AdaptiveBatch(model, optimizer, [batch], **options))


def _counts(run: Callable[[], None]) -> dict[str, float]:
    """Kernel launches, waits of the host, copies to it and operations, of a step."""
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (DEVICE.type == "cuda")
    with profile(activities=kinds) as seen:
        for _ in range(_PROFILED_STEPS):
            run()
    events = {event.key: event.count / _PROFILED_STEPS for event in seen.key_averages()}
    waits = sum(events.get(name, 0) for name in _WAITS)
    return {
        "launches": sum(events.get(name, 0) for name in _LAUNCHES),
        "waits": max(0.0, waits - 1 / _PROFILED_STEPS),  # less the profiler's own
        "copies_to_host": sum(n for key, n in events.items() if "Memcpy DtoH" in key),
        "operations": sum(n for key, n in events.items() if key.startswith("aten::")),
    }


def _repeat(run: Callable[[], None], steps: int) -> None:
    for _ in range(steps):
        run()


def _warmed(case: Case, way: str) -> tuple[Callable[[], None], float | None]:
    """A step that has run a few times, and its peak of memory in MiB on a GPU."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    run = _step_of(case, way)
    _repeat(run, 20 if way == "default" else 4)
    if DEVICE.type != "cuda":
        return run, None
    return run, (torch.cuda.max_memory_allocated() - before) / 2**20


def step_costs(name: str, case: Case, rounds: int) -> Iterator[dict[str, Any]]:
    """Numbers of each way of a network, timed in turn with the plain loop."""
    warmed = {"plain": _warmed(case, "plain")}
    for way in WAYS:
        try:
            warmed[way] = _warmed(case, way)
        except Exception as error:  # a way that fails is a result
            yield {"case": name, "way": way, "refused": f"{type(error).__name__}: {error}"[:300]}
    steps = max(4, min(40, int(0.25 / max(1e-3, seconds(warmed["plain"][0])))))
    rows = interleaved([partial(_repeat, run, steps) for run, _ in warmed.values()], rounds)
    for number, (way, (run, peak)) in enumerate(warmed.items()):
        ratios = [row[number].wall / row[0].wall for row in rows]
        yield {
            "case": name,
            "way": way,
            "ms": 1e3 * median(row[number].wall for row in rows) / steps,
            "ratio": median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            "cpu_ratio": median(row[number].cpu / row[0].cpu for row in rows),
            "peak_mib": peak,
            "steps": steps * rounds,
            **_counts(run),
        }


def _cells(numbers: Mapping[str, Any]) -> Row:
    """The row of a table; what was refused takes the place of the ratio."""
    ratio = numbers.get("refused") or f"{numbers['ratio']:.2f}"
    cells = {"network": numbers["case"], "way": numbers["way"], "step / plain step": ratio}
    for key in ("launches", "waits", "peak_mib"):
        value = numbers.get(key)
        cells[key] = "-" if value is None else f"{value:.0f}"
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table, and writes all numbers to a file after each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON of all numbers")
    parser.add_argument("--seconds", type=float, default=330, help="starts nothing later")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each ratio")
    parser.add_argument("--tiny", action="store_true", help="small networks, two rounds")
    given = parser.parse_args(arguments)
    rounds, end = 2 if given.tiny else given.rounds, time.monotonic() + given.seconds
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    about = {"torch": torch.__version__, "device": device, "date": time.strftime("%F")}
    written: dict[str, Any] = {"about": about, "loops": [], "skipped": []}

    def rows() -> Iterator[Row]:
        for name, case in _cases(tiny=given.tiny).items():
            if time.monotonic() > end:
                written["skipped"].append(name)
                continue
            for numbers in step_costs(name, case, rounds):
                written["loops"].append(numbers)
                if given.out is not None:
                    given.out.write_text(json.dumps(written, indent=1))
                yield _cells(numbers)

    show(f"{device}, torch {torch.__version__}; a step by way of measuring", rows())


if __name__ == "__main__":
    main()
