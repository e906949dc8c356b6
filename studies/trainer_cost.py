"""The cost of our Lightning and HF Trainer integrations over the trainers' own accumulation."""

import contextlib
import itertools
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from bigbatch.optional_packages import import_optional
from bigbatch.policies.policy import Fixed
from studies.timing import Row, median_and_range

ROWS = 2
_WIDTH, _LAYERS, _CLASSES = 384, 4, 10
_MICRO, _ACCUMULATION = 64, 4
_UPDATES = 14
_WARMUP = 4  # untimed updates
_BATCH = _MICRO * _ACCUMULATION


def costs(rounds: int) -> Iterator[Row]:
    """Time of an update with our integration over the trainer's own, for every trainer.

    Trainings with and without the integration take turns.

    Raises:
        MissingPackageError: a trainer is not installed.
    """
    for name, update_seconds in (("Lightning", _lightning), ("HF Trainer", _transformers)):
        plain, adaptive = [], []
        with tempfile.TemporaryDirectory() as folder, _quiet():
            update_seconds(folder, adaptive=False)  # warm-up
            for _ in range(rounds):
                plain.append(update_seconds(folder, adaptive=False))
                adaptive.append(update_seconds(folder, adaptive=True))
        ratios = [ours / theirs for ours, theirs in zip(adaptive, plain, strict=True)]
        yield {
            "trainer": name,
            "update, ms": f"{1e3 * median(adaptive):.1f}",
            "its own, ms": f"{1e3 * median(plain):.1f}",
            "over its own": median_and_range(ratios),
        }


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    pairs = [(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_LAYERS)]
    return nn.Sequential(*itertools.chain(*pairs), nn.Linear(_WIDTH, _CLASSES))


def _data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    samples = _UPDATES * _BATCH
    return torch.randn(samples, _WIDTH), torch.randint(_CLASSES, (samples,))


def _median_difference(ends: list[float]) -> float:
    """Median seconds of an update, from the times at which updates ended."""
    times = [end - start for start, end in itertools.pairwise(ends)]
    return median(times[_WARMUP:])


def _lightning(folder: str, *, adaptive: bool) -> float:
    pl: Any = import_optional("lightning.pytorch", "lightning")
    from bigbatch.integrations.lightning import AdaptiveBatchCallback

    ends: list[float] = []

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
        callbacks.append(AdaptiveBatchCallback(Fixed(_BATCH), batch_size=_BATCH, every=1))
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
    return _median_difference(ends)


def _transformers(folder: str, *, adaptive: bool) -> float:
    hf: Any = import_optional("transformers", "transformers")
    from bigbatch.integrations.transformers import AdaptiveTrainer

    ends: list[float] = []

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
        **({"policy": Fixed(_BATCH), "batch_size": _BATCH, "every": 1} if adaptive else {}),
    )
    trainer.remove_callback(hf.PrinterCallback)
    trainer.train()
    return _median_difference(ends)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides the trainers' messages and warnings."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
