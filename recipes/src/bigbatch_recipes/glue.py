"""Four small tasks of GLUE: another check of a pre-training, of neither paper.

SST-2 (does a reviewer like the film), CoLA (is a sentence English), MRPC (do two sentences say the
same), RTE (does one follow from the other); `glue_task` says which.

Source of the tasks: A. Wang et al., GLUE, 2018.
"""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from bigbatch_recipes.datasets.glue_tasks import ORIGIN, TASKS, Rows, read_task
from bigbatch_recipes.datasets.in_memory import InMemoryDataset
from bigbatch_recipes.distributed_eval import all_gather_rows, local_batches
from bigbatch_recipes.models import bert
from bigbatch_recipes.recipe import OURS, Data, Recipe, Sweep, sourced
from bigbatch_recipes.settings import Settings, require_choice
from bigbatch_recipes.vrgd_paper import CLIPS

_OFFICIAL = {  # scores, the first of which is the main one, and scikit-learn's metrics
    "SST-2": {"accuracy, %": "accuracy_score"},
    "CoLA": {"Matthews correlation, %": "matthews_corrcoef"},
    "MRPC": {"F1, %": "f1_score", "accuracy, %": "accuracy_score"},
    "RTE": {"accuracy, %": "accuracy_score"},
}


def _loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    *rows, classes = batch
    return functional.cross_entropy(model(*rows), classes)


def _data(settings: Settings) -> Data:
    name = str(settings.task["glue_task"])
    train, dev = (read_task(Path(settings.data), name, part) for part in ("train", "dev"))
    tokenizer, frame = bert.load_tokenizer(
        settings, lambda: (t for texts, _ in train for t in texts)
    )

    def dataset(rows: Rows) -> InMemoryDataset:
        """(tokens, segments, is_token, class) of each row."""
        columns = zip(*(texts for texts, _ in rows), strict=True)
        tokens = zip(*(tokenizer.encode(column) for column in columns), strict=True)
        encoded = [frame.encode(*row) for row in tokens]
        stacked = (torch.from_numpy(numpy.stack(column)) for column in zip(*encoded, strict=True))
        return InMemoryDataset(*stacked, torch.tensor([label for _, label in rows]))

    scores = partial(_scores, dev=dataset(dev), name=name, settings=settings)
    return Data(dataset(train), scores, run_files=bert.vocabulary_file(tokenizer))


def _scores(
    model: nn.Module, dev: InMemoryDataset, name: str, settings: Settings
) -> dict[str, float]:
    metrics: Any = import_module("sklearn.metrics")  # its import takes two seconds
    pairs = [
        torch.stack([classes, model(*rows).argmax(-1)], 1)
        for *rows, classes in local_batches(dev, settings)
    ]
    labels, predictions = all_gather_rows(torch.cat(pairs)).unbind(1)
    return {
        f"{score} ({name} dev)": 100 * float(getattr(metrics, metric)(labels, predictions))
        for score, metric in _OFFICIAL[name].items()
    }


def _example(settings: Settings, samples: int) -> tuple[Tensor, ...]:
    require_choice("GLUE task", str(settings.task["glue_task"]), TASKS)
    classes = torch.empty(samples, dtype=torch.long, device="meta")
    return (*bert.example_rows(settings, samples), classes)


GLUE = Recipe(
    name="glue",
    summary="one of four GLUE tasks, fine-tuned from a BERT of bert-pretrain: Adam against VR-Adam",
    paper="a check of ours, of neither paper",
    paper_scale={
        **sourced(OURS, epochs=3, policy="fixed", min_batch=32, max_batch=32, batch_size=32),
        **sourced(OURS, base_batch=32),
        "micro_batch": (4, OURS),  # eight groups, which variance reduction needs
        **sourced(OURS, optimizer="adam", lr=2e-5),
        **sourced(OURS, lr_schedule="warm-up 0.3 epochs; polynomial 1", weight_decay=0.01),
        **sourced(OURS, decay_all=False, clip=1.0),
        **CLIPS,
        **sourced(OURS, device="cuda", precision="float16", size="large", vocabulary=30_522),
        **sourced(OURS, vocab="", dropout=0.1, length=128, glue_task="SST-2"),
    },
    small={"epochs": 1, "samples": 8_000, "lr": 1e-3, **bert.TINY, "length": 48},
    paper_samples=67_349,
    minutes=0.8,
    origin=ORIGIN,
    arms=bert.FINE_TUNING_ARMS,
    sweep=Sweep(({"arm": tuple(bert.FINE_TUNING_ARMS), "lr": (5e-4, 1e-3, 2e-3)},), tuned=("lr",)),
    paper_sweep=Sweep(({"arm": tuple(bert.FINE_TUNING_ARMS), "lr": (2e-5, 3e-5, 5e-5)},), ("lr",)),
    model=lambda settings: bert.network(settings, "Classifier"),
    outline=lambda settings: bert.outline(settings, "Classifier"),
    packages=bert.PACKAGES,
    loss=lambda _: _loss,
    data=_data,
    example=_example,
    saved_as=bert.SAVED_AS,
)
