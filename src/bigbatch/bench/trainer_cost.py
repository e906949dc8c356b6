"""What the connections to trainers cost over the trainers' own accumulation of as many samples."""

import contextlib
import itertools
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from bigbatch.optional_packages import import_optional
from bigbatch.policies.policy import Fixed

ROWS = 2
COLUMNS = ("trainer", "update, ms", "its own, ms", "over its own")
_WIDTH, _LAYERS, _CLASSES = 384, 4, 10
_MICRO, _ACCUMULATION = 64, 4
_UPDATES = 14
_WARM = 4  # updates that are not counted
_BATCH = _MICRO * _ACCUMULATION

Seconds = list[float]


@dataclass(frozen=True)
class Overhead:
    """One trainer's, a round each.

    Args:
        trainer: its name.
        own: seconds of an update by the trainer itself.
        ours: of one with the connection.
    """

    trainer: str
    own: Seconds = field(default_factory=list)
    ours: Seconds = field(default_factory=list)

    def row(self) -> tuple[str, ...]:
        """For a table under `COLUMNS`."""
        ratios = [ours / own for ours, own in zip(self.ours, self.own, strict=True)]
        return (
            self.trainer,
            f"{1e3 * median(self.ours):.1f}",
            f"{1e3 * median(self.own):.1f}",
            f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]",
        )


def costs(rounds: int) -> Iterator[Overhead]:
    """Of every trainer; plain and connected trainings take turns.

    Raises:
        MissingPackageError: one of them is not installed.
    """
    for name, update_of in (("Lightning", _lightning), ("HF Trainer", _transformers)):
        overhead = Overhead(name)
        with tempfile.TemporaryDirectory() as folder, _quiet():
            update_of(folder, adaptive=False)  # what a process does once
            for _ in range(rounds):
                overhead.own.append(update_of(folder, adaptive=False))
                overhead.ours.append(update_of(folder, adaptive=True))
        yield overhead


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    pairs = [(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_LAYERS)]
    return nn.Sequential(*(part for pair in pairs for part in pair), nn.Linear(_WIDTH, _CLASSES))


def _data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    samples = _UPDATES * _BATCH
    return torch.randn(samples, _WIDTH), torch.randint(_CLASSES, (samples,))


def _median_of(ends: Seconds) -> float:
    """Seconds of an update, from when each of them ended."""
    times = [b - a for a, b in itertools.pairwise(ends)]
    return median(times[_WARM:])


def _lightning(folder: str, *, adaptive: bool) -> float:
    pl: Any = import_optional("lightning.pytorch", "lightning")
    from bigbatch.integrations.lightning import AdaptiveBatchCallback

    ends: Seconds = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = _network()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    class Clock(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step > len(ends):
                ends.append(time.perf_counter())

    callbacks: list[Any] = [Clock()]
    if adaptive:
        callbacks.append(AdaptiveBatchCallback(Fixed(_BATCH), batch_size=_BATCH))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=1 if adaptive else _ACCUMULATION,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(*_data()), _MICRO))
    return _median_of(ends)


def _transformers(folder: str, *, adaptive: bool) -> float:
    hf: Any = import_optional("transformers", "transformers")
    from bigbatch.integrations.transformers import AdaptiveTrainer

    ends: Seconds = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = _network()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            output = self.network(x)
            return {"loss": cross_entropy(output, labels), "logits": output}

    class Clock(hf.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    kind: Callable[..., Any] = AdaptiveTrainer if adaptive else hf.Trainer
    model = Model()
    trainer = kind(
        model=model,
        args=hf.TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=_MICRO,
            gradient_accumulation_steps=1 if adaptive else _ACCUMULATION,
            max_grad_norm=0.0,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"x": x, "labels": y} for x, y in zip(*_data(), strict=True)],
        callbacks=[Clock()],
        optimizers=(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), None),
        **({"policy": Fixed(_BATCH), "batch_size": _BATCH} if adaptive else {}),
    )
    trainer.remove_callback(hf.PrinterCallback)
    trainer.train()
    return _median_of(ends)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Trainers say much."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
