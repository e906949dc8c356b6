"""What a user pays for the loop: its steps over those of a plain loop with one backward a step.

python -m studies.overhead --networks "digits network" "small CNN" --batches 32 128
python -m studies.overhead --ranks 2 --networks "README network" "GPT, 6 x 64" --batches 32
python -m studies.overhead --device cuda --out costs.json --rounds 3 --seconds 400
"""

import argparse
import copy
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from bigbatch.optim import VRSGD, VarianceReduced
from bigbatch.policies.policy import Fixed
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch_recipes.models.resnet import resnet_of_basic_blocks
from bigbatch_recipes.tasks.digit_images import network
from studies.gloo_processes import on_ranks
from studies.markdown_tables import Row, show
from studies.sized_networks import (
    GPT,
    MicroBatches,
    mean_loss,
    readme_network,
    small_cnn,
    with_group_norm,
)
from studies.timing import Times, interleaved

_WARM_UP = 16  # steps, in which groups are checked
_MAX_STEPS = 256  # of a way, in all rounds
_MICRO_BATCHES = 1280  # of the tiny network in one timing
_PROFILED_STEPS = 4
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")

Build = Callable[..., Optimizer]
Loader = MicroBatches | DataLoader[Any]


@dataclass(frozen=True)
class Network:
    """A network, what it is trained on and by: one CPU core or a GPU."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of an image, or the length of a sequence
    tokens: int = 0  # size of the vocabulary; 0 for images
    batches: tuple[int, ...] = (32, 128)
    steps: int = 1  # of one pass
    optimizer: Build = SGD
    vr_optimizer: Build = VRSGD
    device: str = "cpu"
    compiled: bool = False

    def batch(self, samples: int) -> tuple[Tensor, Tensor]:
        """Random inputs and labels."""
        if self.tokens:
            tokens = torch.randint(self.tokens, (samples, *self.shape), device=self.device)
            return tokens, tokens.roll(-1, 1)
        images = torch.randn(samples, *self.shape, device=self.device)
        return images, torch.randint(10, (samples,), device=self.device)


def _group_norm_resnet() -> nn.Module:
    return with_group_norm(resnet_of_basic_blocks())


def _vr(optimizer: Build) -> Build:
    return lambda parameters, lr: VarianceReduced(optimizer(parameters, lr=lr))


def _on_gpu(optimizer: Build, build: Callable[[], nn.Module], *shape: Any, **more: Any) -> Network:
    """A network on a GPU, by a fused optimizer."""
    more |= {"optimizer": optimizer, "vr_optimizer": _vr(optimizer), "device": "cuda"}
    return Network(build, *shape, **more)


def _gpt33() -> nn.Module:
    return GPT(9, 512, 8192, 256)


_IMAGE = (3, 32, 32)
_SGD, _ADAMW = partial(SGD, momentum=0.9, fused=True), partial(AdamW, fused=True)

NETWORKS = {
    "README network": Network(readme_network, (64,), steps=64),
    "digits network": Network(network, (1, 8, 8), steps=64),
    "small CNN": Network(small_cnn, _IMAGE, steps=8),
    "ResNet-18": Network(resnet_of_basic_blocks, _IMAGE),
    "ResNet-18, GroupNorm": Network(_group_norm_resnet, _IMAGE),
    "GPT, 1 x 512": Network(lambda: GPT(1, 512, 4096, 32), (32,), 4096, steps=2),
    "GPT, 6 x 256": Network(lambda: GPT(6, 256, 1024, 32), (32,), 1024, steps=2),
    "GPT, 6 x 64": Network(lambda: GPT(6, 64, 256, 16), (16,), 256, steps=8),
    "MLP .4 M": _on_gpu(_SGD, partial(readme_network, 3072), _IMAGE, batches=(32,), steps=8),
    "ResNet-18 GN": _on_gpu(_SGD, _group_norm_resnet, _IMAGE, batches=(128, 1024)),
    "GPT 33 M": _on_gpu(_ADAMW, _gpt33, (256,), 8192),
    "GPT 124 M": _on_gpu(
        _ADAMW, lambda: GPT(12, 768, 50304, 1024), (1024,), 50304, batches=(16, 64)
    ),
    "GPT 33 M compiled": _on_gpu(_ADAMW, _gpt33, (256,), 8192, batches=(32,), compiled=True),
}

WAYS: dict[str, dict[str, Any]] = {  # options of AdaptiveBatch
    "not measured": {"every": 0},
    "default": {"every": 16},  # as it is from step 512 on
    "groups, every step": {"every": 1, "groups": 8},
    "cut, every step": {"every": 1},
    "VR, groups": {"groups": 8},
    "VR, cut": {},
}


def costs(
    name: str, samples: int, rounds: int, most_steps: int = _MAX_STEPS
) -> Iterator[dict[str, Any]]:
    """Numbers of each way, timed in turn with the plain loop; a way that fails is a number too."""
    shape = NETWORKS[name]
    model, batches = shape.build(), _loader(shape, samples)
    passes = {"plain": _plain_loop(shape, model, batches)}
    loops = {}
    peaks = {"plain": _peak(shape, passes["plain"])}
    for way in WAYS:
        try:
            loop = _loop(shape, model, batches, samples, way)
            peaks[way] = _peak(shape, partial(_warm, loop))
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"[:300]
            yield {"network": name, "batch": samples, "way": way, "refused": refused}
            continue
        loops[way], passes[way] = loop, partial(_run, loop)
    # so many passes that measured steps have their share, in all rounds together
    steps = min(most_steps, 2 * max(loop.every or 0 for loop in loops.values()))
    times = max(1, -(-steps // (rounds * shape.steps)))
    timed = interleaved([partial(_repeat, run, times) for run in passes.values()], rounds)
    for number, (way, run) in enumerate(passes.items()):
        pairs = [(row[number], row[0]) for row in timed]
        ratios = [one.wall / plain.wall for one, plain in pairs]
        yield {
            "network": name,
            "batch": samples,
            "way": way,
            "ms": 1e3 * median(one.wall for one, _ in pairs) / times / shape.steps,
            "ratio": sum(one.wall for one, _ in pairs) / sum(plain.wall for _, plain in pairs),
            "ratio_range": [min(ratios), max(ratios)],
            "cpu_ratio": sum(one.cpu for one, _ in pairs) / sum(plain.cpu for _, plain in pairs),
            **peaks[way],
            **(_counts(run, shape.steps) if shape.device == "cuda" else {}),
        }


def _loader(shape: Network, samples: int) -> Loader:
    """The batches of one pass; on several ranks a loader deals their samples."""
    batches = [shape.batch(samples) for _ in range(shape.steps)]
    if not dist.is_initialized():
        return batches
    inputs, labels = map(torch.cat, zip(*batches * dist.get_world_size(), strict=True))
    dataset = TensorDataset(inputs, labels)
    return DataLoader(dataset, samples, sampler=DistributedSampler(dataset))


def _costs_of_rank(name: str, samples: int, rounds: int, most_steps: int, _: int) -> Any:
    yield from costs(name, samples, rounds, most_steps)


def _loop(
    shape: Network, model: nn.Module, batches: Loader, samples: int, way: str
) -> AdaptiveBatch:
    """A loop over these batches that measures in this way."""
    model = _copied(shape, model)
    build = shape.vr_optimizer if way.startswith("VR") else shape.optimizer
    options = WAYS[way] | {"micro_batch": samples}
    optimizer = build(model.parameters(), lr=1e-4)
    policy = Fixed(samples * _ranks())
    return AdaptiveBatch(model, optimizer, batches, policy=policy, **options)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _copied(shape: Network, model: nn.Module) -> nn.Module:
    """The model on its device, without the hooks of a meter; under DDP on several ranks."""
    copied = copy.deepcopy(model).to(shape.device)
    if shape.compiled:
        copied.compile()
    return DistributedDataParallel(copied) if dist.is_initialized() else copied


def _warm(train: AdaptiveBatch) -> None:
    while train.steps < _WARM_UP:
        _run(train)


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    on_gpu = x.device.type == "cuda"
    autocast: AbstractContextManager[Any] = nullcontext()
    with torch.autocast("cuda", torch.bfloat16) if on_gpu else autocast:
        return mean_loss(model, x, y)


def _run(train: AdaptiveBatch) -> None:
    """One pass over the batches."""
    for step in train:
        for x, y in step:
            step.backward(_loss(train.model, x, y))
        step.update()


def _plain_loop(
    shape: Network, model: nn.Module, batches: Loader, k: int = 1
) -> Callable[[], None]:
    """Steps of k batches, in a loop without the library."""
    model = _copied(shape, model)
    optimizer = shape.optimizer(model.parameters(), lr=1e-4)

    def run() -> None:
        for number, (x, y) in enumerate(batches, start=1):
            (_loss(model, x, y) / k).backward()  # type: ignore[no-untyped-call]
            if number % k == 0:
                optimizer.step()
                optimizer.zero_grad()

    return run


def _repeat(run: Callable[[], None], times: int) -> None:
    for _ in range(times):
        run()


def _peak(shape: Network, run: Callable[[], None]) -> dict[str, float]:
    """Runs it; the peak of memory in MiB on a GPU."""
    if shape.device != "cuda":
        run()
        return {}
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return {"peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}


def _counts(run: Callable[[], None], steps: int) -> dict[str, float]:
    """Kernel launches, waits of the host, copies to it and operations, of a step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        _repeat(run, _PROFILED_STEPS)
    count = _PROFILED_STEPS * steps
    events = {event.key: event.count / count for event in seen.key_averages()}
    waits = sum(events.get(name, 0) for name in _WAITS)
    return {
        "launches": sum(events.get(name, 0) for name in _LAUNCHES),
        "waits": max(0.0, waits - 1 / count),  # less the profiler's own
        "copies_to_host": sum(n for key, n in events.items() if "Memcpy DtoH" in key),
        "operations": sum(n for key, n in events.items() if key.startswith("aten::")),
    }


def _cells(numbers: dict[str, Any]) -> Row:
    """The row of a table; what was refused takes the place of the ratio."""
    cells = {key: str(numbers[key]) for key in ("network", "batch", "way")}
    if "refused" in numbers:
        return cells | dict.fromkeys(_COLUMNS, "-") | {"step / plain step": numbers["refused"]}
    low, high = numbers["ratio_range"]
    ratio = f"{numbers['ratio']:.3f} [{low:.2f}, {high:.2f}], CPU {numbers['cpu_ratio']:.3f}"
    counts = ("launches", "waits", "peak_mib")
    texts = (f"{numbers[key]:,.0f}" if key in numbers else "-" for key in counts)
    return cells | dict(zip(_COLUMNS, (f"{numbers['ms']:.2f}", ratio, *texts), strict=True))


_COLUMNS = ("ms", "step / plain step", "launches", "waits", "peak, MiB")


def python_rows(rounds: int, count: int = _MICRO_BATCHES) -> Iterator[Row]:
    """Microseconds that the loop adds to a micro-batch of a tiny network.

    A step's fixed overhead is divided by its k micro-batches.
    """
    model, shape = nn.Linear(4, 3), Network(nn.Module, ())
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(count)]
    for kind, every in (("not measured", 0), ("measured", 1)):
        for k in (64, 8):
            copied = copy.deepcopy(model)
            optimizer = SGD(copied.parameters(), lr=1e-4)
            options: dict[str, Any] = {"policy": Fixed(8 * k), "min_micro_batches": k}
            loop = AdaptiveBatch(copied, optimizer, batches, micro_batch=8, every=every, **options)
            runs = _plain_loop(shape, model, batches, k), partial(_run, loop)
            times: list[list[Times]] = interleaved(runs, rounds)
            extra = [1e6 * (ours.wall - plain.wall) / count for plain, ours in times]
            yield {
                "loop": f"{kind}, k = {k}",
                "Python a micro-batch, us": f"{median(extra):.1f}",
                "least and most": f"{min(extra):.1f} to {max(extra):.1f}",
                "goal": "50" if (kind, k) == ("not measured", 64) else "",
            }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints both tables, and writes all numbers to a file after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, help="[all of the device]")
    parser.add_argument("--batches", nargs="+", type=int, help="[those of each network]")
    parser.add_argument("--ranks", type=int, default=1, help="processes under DDP on gloo")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each ratio")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="starts nothing later")
    parser.add_argument("--out", type=Path, help="JSON of all numbers")
    parser.add_argument("--tiny", action="store_true", help="one round of one small network")
    given = parser.parse_args(arguments)
    if given.tiny:
        given.networks, given.batches, given.rounds = ["GPT, 6 x 64"], [4], 1
    end, most_steps = time.monotonic() + given.seconds, 1 if given.tiny else _MAX_STEPS
    device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    about = {"torch": torch.__version__, "device": device, "date": time.strftime("%F")}
    written: dict[str, Any] = {"about": about, "loops": [], "skipped": []}

    def rows() -> Iterator[Row]:
        of_device = [name for name, one in NETWORKS.items() if one.device == given.device]
        for name in given.networks or of_device:
            for samples in given.batches or NETWORKS[name].batches:
                if time.monotonic() > end:
                    written["skipped"].append(f"{name}, {samples}")
                    continue
                work = partial(_costs_of_rank, name, samples, given.rounds, most_steps)
                alone = given.ranks == 1
                for numbers in work(0) if alone else on_ranks(given.ranks, work, counts=False):
                    written["loops"].append(numbers)
                    if given.out is not None:
                        given.out.write_text(json.dumps(written, indent=1))
                    yield _cells(numbers)

    rounds = f"all rounds [least, most of {given.rounds}]"
    device = device if given.ranks == 1 else f"{device}, {given.ranks} ranks"
    show(f"{device}: step / plain step of one backward; {rounds}", rows())
    if given.device == "cpu" and given.ranks == 1:
        show("what the loop adds", python_rows(given.rounds, 64 if given.tiny else _MICRO_BATCHES))


if __name__ == "__main__":
    main()
