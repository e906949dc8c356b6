"""What a step costs on a GPU, by way of measuring: time, CPU, launches, waits, memory; as JSON.

python -m studies.gpu OUT.json [--tiny]: with --tiny on any device, small, to see that it runs.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile

import bigbatch as bb
from bigbatch.optim import VRLAMB, VRLARS, VarianceReduced, VRAdam

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDS = 5
PROFILED_STEPS = 4
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")

Batch = tuple[Tensor, Tensor]


class GPT(nn.Module):
    """A causal transformer with learned positions and a tied output layer, without dropout."""

    def __init__(self, layers: int, width: int, tokens: int, length: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every position, (samples, length, tokens)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.linear(self.norm(hidden), self.embedding.weight)


class Block(nn.Module):
    """Attention with heads of 64, and a hidden layer of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(samples, length, width) to the same."""
        samples, length, width = hidden.shape
        qkv = self.qkv(self.norms[0](hidden)).view(samples, length, 3, self.heads, 64)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        read = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(read.transpose(1, 2).reshape(samples, length, width))
        return hidden + self.down(functional.gelu(self.up(self.norms[1](hidden))))


@dataclass(frozen=True)
class Case:
    """A network, its batch, and how it is trained."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    optimizer: Callable[..., Optimizer]
    vr: Callable[..., Optimizer]
    compiled: bool = False


def images(samples: int) -> Batch:
    """Random images of 3 x 32 x 32 and labels."""
    return (
        torch.randn(samples, 3, 32, 32, device=DEVICE),
        torch.randint(10, (samples,), device=DEVICE),
    )


def windows(samples: int, length: int, tokens: int) -> Batch:
    """Random tokens and those that follow."""
    drawn = torch.randint(tokens, (samples, length + 1), device=DEVICE)
    return drawn[:, :-1], drawn[:, 1:]


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32 x 32, with GroupNorm."""
    from bigbatch_recipes.models.resnet import resnet_of_basic_blocks
    from studies.sized_networks import with_group_norm

    return with_group_norm(resnet_of_basic_blocks())


def readme_network() -> nn.Module:
    """The network of the README's eight lines, on images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 128), nn.ReLU(), nn.Linear(128, 10))


def fused_adamw(parameters: Any, lr: float) -> Optimizer:
    """torch's AdamW, fused."""
    return AdamW(parameters, lr=lr, fused=True)


def fused_sgd(parameters: Any, lr: float) -> Optimizer:
    """torch's SGD with momentum, fused."""
    return SGD(parameters, lr=lr, momentum=0.9, fused=True)


def reduced(base: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """The base inside VarianceReduced."""
    return lambda parameters, lr: VarianceReduced(base(parameters, lr))


def cases(*, tiny: bool) -> dict[str, Case]:
    """All networks; with `tiny` a small one of each kind."""
    sgd, adamw = (fused_sgd, reduced(fused_sgd)), (fused_adamw, reduced(fused_adamw))
    if tiny:
        small = partial(GPT, 1, 64, 256, 32)
        return {
            "MLP, 32": Case(readme_network, partial(images, 32), *sgd),
            "GPT, 16 x 32": Case(small, partial(windows, 16, 32, 256), *adamw),
        }
    gpt30 = partial(GPT, 9, 512, 8192, 256)
    gpt124 = partial(GPT, 12, 768, 50304, 1024)
    return {
        "MLP .4 M, 32": Case(readme_network, partial(images, 32), *sgd),
        "ResNet-18 GN, 128": Case(resnet18, partial(images, 128), *sgd),
        "ResNet-18 GN, 1024": Case(resnet18, partial(images, 1024), *sgd),
        "GPT 33 M, 32 x 256": Case(gpt30, partial(windows, 32, 256, 8192), *adamw),
        "GPT 33 M, 128 x 256": Case(gpt30, partial(windows, 128, 256, 8192), *adamw),
        "GPT 124 M, 16 x 1024": Case(gpt124, partial(windows, 16, 1024, 50304), *adamw),
        "GPT 124 M, 64 x 1024": Case(gpt124, partial(windows, 64, 1024, 50304), *adamw),
        "GPT 33 M compiled, 32 x 256": Case(gpt30, partial(windows, 32, 256, 8192), *adamw, True),
    }


def autocast() -> AbstractContextManager[None]:
    """bfloat16 on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if DEVICE.type == "cuda" else nullcontext()


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy."""
    with autocast():
        return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


WAYS: dict[str, dict[str, Any]] = {
    "not measured": {"budget": 0.0},
    "default": {},
    "groups, every step": {"budget": None, "groups": 8},
    "cut in 4, every step": {"budget": None},
    "VR, groups": {"groups": 8},
    "VR, cut in 8": {},
}


def plain_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    """One step of a plain loop."""
    loss_of(model, *batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def adaptive_step(train: bb.AdaptiveBatch) -> None:
    """One step of the adaptive loop, whose loader has one batch."""
    for step in train:
        for x, y in step:
            step.backward(loss_of(train.model, x, y))
        step.update()


def loop_of(case: Case, way: str | None) -> Callable[[], None]:
    """One step of this way; None is the plain loop."""
    model = case.build().to(DEVICE)
    if case.compiled:
        model.compile()
    batch = case.batch()
    if way is None:
        return partial(plain_step, model, case.optimizer(model.parameters(), lr=1e-4), batch)
    build = case.vr if way.startswith("VR") else case.optimizer
    optimizer = build(model.parameters(), lr=1e-4)
    samples = len(batch[0])
    train = bb.AdaptiveBatch(
        model, optimizer, [batch], policy=bb.Fixed(samples), micro_batch=samples, **WAYS[way]
    )
    return partial(adaptive_step, train)


def time_of(run: Callable[[], None], steps: int) -> tuple[float, float]:
    """Wall and CPU seconds of a step."""
    synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        run()
    synchronize()
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def synchronize() -> None:
    """Waits for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def counts(run: Callable[[], None]) -> dict[str, float]:
    """Kernel launches, waits of the host and copies to it, of a step."""
    synchronize()
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (DEVICE.type == "cuda")
    with profile(activities=kinds) as seen:
        for _ in range(PROFILED_STEPS):
            run()
    synchronize()
    events = {event.key: event.count for event in seen.key_averages()}

    def sum_of(names: tuple[str, ...]) -> float:
        return sum(events.get(name, 0) for name in names) / PROFILED_STEPS

    to_host = sum(count for key, count in events.items() if "Memcpy DtoH" in key)
    return {
        "launches": sum_of(LAUNCHES),
        "waits": sum_of(WAITS) - 1 / PROFILED_STEPS,  # the profiler's own
        "copies_to_host": to_host / PROFILED_STEPS,
        "operations": sum(c for k, c in events.items() if k.startswith("aten::")) / PROFILED_STEPS,
    }


def measure(name: str, case: Case, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each way of a network, timed in turn with the plain loop."""
    runs: dict[str, Callable[[], None]] = {}
    peaks: dict[str, float] = {}
    for way in ("plain", *WAYS):
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        try:
            run = loop_of(case, None if way == "plain" else way)
            for _ in range(20 if way == "default" else 4):
                run()
        except Exception as error:
            yield {"case": name, "way": way, "refused": f"{type(error).__name__}: {error}"[:300]}
            continue
        runs[way] = run
        if DEVICE.type == "cuda":
            peaks[way] = (torch.cuda.max_memory_allocated() - before) / 2**20
    once = max(1e-3, time_of(runs["plain"], 3)[0])
    steps = max(4, min(40, int(0.25 / once)))
    times = {way: [time_of(run, 1)] for way, run in runs.items()}
    for way in times:
        times[way].clear()
    for _ in range(rounds):
        for way, run in runs.items():
            times[way].append(time_of(run, steps))
    for way, run in runs.items():
        ratios = [one[0] / plain[0] for one, plain in zip(times[way], times["plain"], strict=True)]
        cpu = [one[1] / plain[1] for one, plain in zip(times[way], times["plain"], strict=True)]
        yield {
            "case": name,
            "way": way,
            "ms": 1e3 * median(one[0] for one in times[way]),
            "ratio": median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            "cpu_ratio": median(cpu),
            "peak_mib": peaks.get(way),
            "steps": steps * rounds,
            **counts(run),
        }


def optimizer_costs(rounds: int, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """VR optimizers on k = 4 micro-batches over torch's fused ones, without a network."""
    lists = (
        {"tiny": [(16, 16)] * 3}
        if tiny
        else {
            "167 tensors of 0.85 M": [(32, 32, 5)] * 167,
            "10 tensors of 25 M": [(1600, 1563)] * 10,
            "GPT 124 M": [tuple(p.shape) for p in GPT(12, 768, 50304, 1024).parameters()],
        }
    )
    ways: dict[str, Callable[..., Optimizer]] = {
        "SGD": fused_sgd,
        "VR SGD": reduced(fused_sgd),
        "AdamW": fused_adamw,
        "VR AdamW": reduced(fused_adamw),
        "VRAdam": lambda ps, lr: VRAdam(ps, lr=lr),
        "VRLARS": lambda ps, lr: VRLARS(ps, lr=lr),
        "VRLAMB": lambda ps, lr: VRLAMB(ps, lr=lr),
    }
    for name, shapes in lists.items():
        runs: dict[str, Callable[[], None]] = {}
        for way, build in ways.items():
            weights = [torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes]
            gradients = [torch.randn(shape, device=DEVICE) for shape in shapes]
            optimizer = build(weights, lr=1e-4)

            def run(w=weights, g=gradients, o=optimizer) -> None:  # type: ignore[no-untyped-def]
                for _ in range(4):
                    torch.autograd.backward([(a * b).sum() for a, b in zip(w, g, strict=True)])
                o.step()
                o.zero_grad()

            runs[way] = run
        for run in runs.values():
            run()
            run()
        steps = 4
        times: dict[str, list[float]] = {way: [] for way in runs}
        for _ in range(rounds):
            for way, run in runs.items():
                times[way].append(time_of(run, steps)[0])
        for way, run in runs.items():
            base = "SGD" if way in ("SGD", "VR SGD", "VRLARS") else "AdamW"
            extra = [1e3 * (a - b) for a, b in zip(times[way], times[base], strict=True)]
            yield {
                "parameters": name,
                "way": way,
                "ms_with_4_backwards": 1e3 * median(times[way]),
                "ms_over_fused_base": median(extra),
                "ms_over_range": [min(extra), max(extra)],
                **counts(run),
            }


def main() -> None:
    """Measures everything and writes it after each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=330, help="starts nothing later")
    given = parser.parse_args()
    start = time.perf_counter()
    about = {"torch": torch.__version__, "device": DEVICE.type, "date": time.strftime("%F")}
    if DEVICE.type == "cuda":
        about["device"] = torch.cuda.get_device_name()
    written: dict[str, Any] = {"about": about, "optimizers": [], "loops": [], "skipped": []}

    def keep(kind: str, rows: Iterator[dict[str, Any]]) -> None:
        for row in rows:
            print(f"{time.perf_counter() - start:.0f} s", json.dumps(row), flush=True)
            written[kind].append(row)
            given.out.write_text(json.dumps(written, indent=1))

    rounds = 2 if given.tiny else ROUNDS
    for name, case in cases(tiny=given.tiny).items():
        if time.perf_counter() - start > given.seconds:
            written["skipped"].append(name)
            continue
        try:
            keep("loops", measure(name, case, rounds))
        except Exception as error:
            print(name, type(error).__name__, error, flush=True)
            written["skipped"].append(f"{name}: {error}"[:300])
    if time.perf_counter() - start <= given.seconds:
        keep("optimizers", optimizer_costs(rounds, tiny=given.tiny))
    given.out.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
