"""The trainer of examples/torchtitan on 2 ranks of the CPU: a small Llama, sequences made here.

Four things that a CPU or gloo lacks are replaced: the type of the device, the figures of its
memory, the device of a barrier, and the sum that scales (by 1), which becomes a plain one. Flex
attention has no backward on a CPU, so the layers have torch's own, which is causal: a sequence is
one document.
"""

# ruff: noqa: E402 - torchtitan asks for the device when it is imported
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy

torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan asks for it

from torchtitan.components import metrics
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.distributed import fsdp
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import bigbatch as bb

sys.path.append(str(Path(__file__).parents[3] / "examples" / "torchtitan"))
from adaptive_trainer import AdaptiveTrainer

RANKS, SEQUENCES, LENGTH, LR, WARM_UP = 2, 2, 16, 1e-3, 4
TOKENS = SEQUENCES * LENGTH  # of a micro-batch

figures = metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)
monitor = SimpleNamespace(
    device_name="cpu", get_peak_stats=lambda: figures, reset_peak_stats=lambda: None
)
metrics.build_device_memory_monitor = lambda: monitor
dist_utils.set_pg_timeouts = lambda **_: None


def sum_plainly(model: torch.nn.Module, disable=fsdp.disable_fsdp_gradient_division) -> None:
    disable(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = sum_plainly


def sequences(number: int, *, masked: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch by its number over all ranks; some have half of their labels masked."""
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 64, (SEQUENCES, LENGTH + 1), generator=draw)
    labels = tokens[:, 1:].clone()
    if masked and number % 3 == 1:
        labels[:, : LENGTH // 2] = IGNORE_INDEX
    return {"input": tokens[:, :-1].contiguous()}, labels


class Loader(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        masked: bool = False

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: object) -> None:
        self.number, self.ranks, self.masked = dp_rank, dp_world_size, config.masked

    def __iter__(self):
        while True:
            batch = sequences(self.number, masked=self.masked)
            self.number += self.ranks
            yield batch

    def state_dict(self):
        return {f"rank{dist.get_rank()}": self.number}

    def load_state_dict(self, state):
        self.number = state[f"rank{dist.get_rank()}"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: object) -> None:
        super().__init__()

    encode = decode = get_vocab_size = BaseTokenizer.get_chat_template = lambda self, *_: None


def model_spec():
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def settings(
    folder, steps, *, masked=False, chunked=False, param="float32", copies=1, **checkpoint
):
    loss = CrossEntropyLoss.Config()
    return {
        "model_spec": model_spec(),
        "dump_folder": folder,
        "tokenizer": NoTokenizer.Config(),
        "dataloader": Loader.Config(masked=masked),
        "optimizer": default_adamw(lr=LR, fused=False, foreach=True),
        "lr_scheduler": LRSchedulersContainer.Config(warmup_steps=WARM_UP, total_steps=100),
        "training": TrainingConfig(
            local_batch_size=SEQUENCES,
            global_batch_size=2 * RANKS * SEQUENCES,
            seq_len=LENGTH,
            steps=steps,
            disable_cuda_graphs=True,
            mixed_precision_param=param,
        ),
        "parallelism": ParallelismConfig(
            data_parallel_replicate_degree=copies,
            data_parallel_shard_degree=RANKS // copies,
            spmd_backend="partial_dtensor",
        ),
        "checkpoint": CheckpointManager.Config(
            enable=bool(checkpoint), last_save_model_only=False, **checkpoint
        ),
        "activation_checkpoint": None,
        "loss": ChunkedLossWrapper.Config(num_chunks=2, loss_fn=loss) if chunked else loss,
        "metrics": metrics.MetricsProcessor.Config(log_freq=1),
    }


def weights(trainer) -> dict[str, torch.Tensor]:
    named = trainer.model_parts[0].state_dict().items()
    return {name: w.full_tensor().clone() for name, w in named if hasattr(w, "full_tensor")}


def trained(config, *, watched=True):
    """The trainer after its steps; each step's weights before it, backwards, rates, statistics."""
    trainer, steps = config.build(), []
    (optimizer,) = trainer.optimizers

    def before(*_):
        step = {"lr": optimizer.param_groups[0]["lr"], "weights": weights(trainer)}
        if watched:
            step |= {"statistics": trainer.statistics, "next": trainer.controller.decision}
        steps.append(step)

    def train_step(data, run=trainer.train_step):
        accumulation = trainer.gradient_accumulation_steps
        run(data)
        steps[-1] |= {"accumulation": accumulation, "lr_after": optimizer.param_groups[0]["lr"]}

    trainer.optimizers.register_step_pre_hook(before)  # after the page's own
    trainer.train_step = train_step
    trainer.train()
    trainer.close()
    return weights(trainer), steps


def signal_and_noise(state, first: int, count: int, *, masked: bool) -> tuple[float, float]:
    """By autograd on one process: micro-batches one after the other, sums in float64."""
    config = model_spec().model
    config.update_from_config(config=AdaptiveTrainer.Config(**settings(".", 1)))
    model = config.build()
    model.init_weights(buffer_device=None)
    model.load_state_dict(state, strict=False)
    gradients, sizes = [], []
    for number in range(first, first + count):
        inputs, labels = sequences(number, masked=masked)
        logits = model(inputs["input"])
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        found = torch.autograd.grad(loss, list(model.parameters()))
        gradients.append(torch.cat([g.flatten() for g in found]).double())
        sizes.append(float((labels != IGNORE_INDEX).sum()))
    unit = count * TOKENS / sum(sizes)  # sizes count ignored tokens too
    n = unit * torch.tensor(sizes, dtype=torch.float64)
    g = torch.stack(gradients)
    mean = n @ g / n.sum()
    spread = (n * (g - mean).square().sum(1)).sum() / (count - 1)
    return float(mean.square().sum() - spread / n.sum()), float(spread)


def differences(steps, *, masked=False) -> list[tuple[float, float]]:
    """Relative errors of signal and noise of every step."""
    found, first = [], 0
    for step in steps:
        count = RANKS * step["accumulation"]
        signal, noise = signal_and_noise(step["weights"], first, count, masked=masked)
        measured = step["statistics"]
        scale = abs(signal) + noise / measured.samples  # of what signal is a difference of
        found.append(
            (abs(measured.grad_sqnorm - signal) / scale, abs(measured.grad_variance / noise - 1))
        )
        first += count
    return found


def largest_difference(a, b) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def refusals() -> dict[str, str]:
    """What is said of settings, each in a training of its own."""
    config = AdaptiveTrainer.Config
    graphs, parallel, samples, policy = (config(**settings(".", 1)) for _ in range(4))
    graphs.training.disable_cuda_graphs = False
    parallel.parallelism.context_parallel_degree = RANKS
    parallel.parallelism.data_parallel_shard_degree = 1
    samples.policy = bb.Schedule("128, x2 every 2K samples")
    policy.policy = bb.Goodput()
    cases = {"graphs": graphs, "ranks": parallel, "samples": samples, "policy": policy}
    found = {}
    for name, config in cases.items():
        try:
            config.build()
        except ValueError as error:
            found[name] = str(error)
    return found


def plain(steps) -> list[dict]:
    """What of the steps goes into the answer."""
    names = ("lr", "lr_after", "accumulation")
    return [
        {name: step[name] for name in names} | {"next": step["next"].batch_size} for step in steps
    ]


def main(folder: str) -> None:
    start = 2 * RANKS * TOKENS
    growing = bb.Schedule(f"{start}, x2 every {2 * start} tokens up to {8 * start}")
    measuring = bb.SimiGrad(target=0.99)  # always below it, so the batch grows by a tenth
    config = AdaptiveTrainer.Config
    same, _ = trained(Trainer.Config(**settings(folder, 3)), watched=False)
    fixed, _ = trained(config(policy=bb.Fixed(start), **settings(folder, 3)))
    _, scheduled = trained(config(policy=growing, **settings(folder, 6)))
    _, masked = trained(config(policy=measuring, **settings(folder, 3, masked=True)))
    _, chunked = trained(config(policy=measuring, **settings(folder, 2, chunked=True)))
    _, copied = trained(config(policy=measuring, **settings(folder, 2, copies=RANKS)))
    _, halved = trained(config(policy=measuring, **settings(folder, 2, param="bfloat16")))
    whole, steps = trained(config(policy=measuring, **settings(folder, 8)))
    halves = f"{folder}/halves"
    trained(config(policy=measuring, **settings(halves, 6, interval=6)))
    resumed, last = trained(config(policy=measuring, **settings(halves, 8, interval=6)))
    answer = {
        "fixed": largest_difference(same, fixed),
        "scheduled": plain(scheduled),
        "errors": differences(steps),
        "masked": differences(masked, masked=True),
        "chunked": differences(chunked),
        "replicated": differences(copied),
        "bfloat16": differences(halved),
        "steps": plain(steps),
        "resumed_steps": plain(last),
        "resumed": largest_difference(whole, resumed),
        "refused": refusals(),
    }
    if dist.get_rank() == 0:
        print("ANSWER", json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
