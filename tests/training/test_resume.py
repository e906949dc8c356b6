"""A killed run continues bit for bit: saved at any step, loaded into new objects."""

import io
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.optim import VRAdam

torch.set_num_threads(1)
EPOCHS = 3
SEED, OTHER_SEED = 11, 12  # the resumed process draws from other seeds until it has loaded


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002  # what users' data sets draw from


def fixed_data(n: int = 90) -> TensorDataset:
    """The same in every process, whatever the seed of the run."""
    own = torch.Generator().manual_seed(1)
    x = torch.randn(n, 5, generator=own)
    return TensorDataset(x, torch.randint(3, (n,), generator=own))


class Augmented(TensorDataset):
    """The same with noise from every generator that users' data sets draw from."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        noise = torch.randn(()) + random.random() + numpy.random.rand()  # noqa: NPY002
        return x + 0.1 * noise, y


@dataclass
class Run:
    """Everything that one training is made of."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: bb.AdaptiveBatch

    def save(self) -> bytes:
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        file = io.BytesIO()
        torch.save(parts, file)
        return file.getvalue()

    def load(self, file: bytes) -> None:
        state = torch.load(io.BytesIO(file), weights_only=True)
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "train": self.train}
        return {**parts, "scaler": self.train.scaler} if self.train.scaler else parts


def momentum(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.05, momentum=0.9)


def vr_adam(parameters: Any) -> VRAdam:
    return VRAdam(parameters, lr=0.01)


def built(
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum,
    loader: Callable[[], DataLoader] = lambda: DataLoader(fixed_data(), 12, shuffle=True),
    scheduled: bool = True,
    **settings: Any,
) -> Run:
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
    opt = optimizer(model.parameters())
    policy = bb.SimiGrad(target=0.3, min_batch=8, max_batch=40)
    train = bb.AdaptiveBatch(model, opt, loader(), policy=policy, **{"every": 1, **settings})
    if scheduled:
        total = train.base_steps(EPOCHS)
        train.scheduler = OneCycleLR(opt, 0.1, total_steps=total, cycle_momentum=False)
    return Run(model, opt, train)


def finish(run: Run, *, save: bool = False) -> tuple[list[bb.StepRecord], list[bytes]]:
    """(the records of what is left of the training, a file of every step and every epoch)."""
    records, files = [], []
    for _ in run.train.epochs(EPOCHS):
        for step in run.train:
            for x, y in step:
                step.backward(cross_entropy(run.model(x), y))
            step.clip_grad_norm_(1.0)
            records.append(replace(step.update(), elapsed_seconds=0.0))
            if save:
                files.append(run.save())
        if save:
            files.append(run.save())
    return records, files


def assert_resumes(every: int = 1, **settings: Any) -> list[bb.StepRecord]:
    """Resumes from every so manyth file and finds the records and weights of the whole run."""
    seed_all(SEED)
    uninterrupted = built(**settings)
    expected, files = finish(uninterrupted, save=True)
    for file in files[::every]:
        seed_all(OTHER_SEED)
        resumed = built(**settings)
        resumed.load(file)
        done = resumed.train.steps + resumed.train.skipped
        assert expected[done:] == finish(resumed)[0]
        for name, weight in uninterrupted.model.state_dict().items():
            assert torch.equal(weight, resumed.model.state_dict()[name])
    return expected


def test_a_run_resumes_from_every_step_and_between_epochs():
    expected = assert_resumes()
    # otherwise this says little: the batch changed, and steps of all epochs were resumed from
    assert 3 < len({record.batch_size for record in expected})
    assert {0, 1, 2} == {record.epoch for record in expected}


def test_a_saved_run_continues_as_one_that_was_not_saved():
    seed_all(SEED)
    expected, _ = finish(built())
    seed_all(SEED)
    assert expected == finish(built(), save=True)[0]


@pytest.mark.parametrize("scaling", ["sqrt", "adascale"])
def test_a_variance_reduced_run_resumes(scaling):
    assert_resumes(3, optimizer=vr_adam, lr_scaling=scaling)


@pytest.mark.parametrize("remainder", ["share", "step", "drop"])
def test_every_kind_of_remainder_resumes(remainder):
    def loader() -> bb.Batches:
        return bb.Batches(DataLoader(fixed_data(), 12, shuffle=True), remainder=remainder)

    assert_resumes(4, loader=loader)


def test_a_run_with_a_generator_of_its_own_resumes():
    def loader() -> DataLoader:
        own = torch.Generator().manual_seed(5)
        return DataLoader(fixed_data(), 12, shuffle=True, generator=own)

    assert_resumes(3, loader=loader)


def test_augmentation_from_every_generator_resumes():
    def loader() -> DataLoader:
        return DataLoader(Augmented(*fixed_data().tensors), 12, shuffle=True)

    assert_resumes(3, loader=loader)


@pytest.mark.thorough
@pytest.mark.cpu  # workers of the loader
@pytest.mark.parametrize("dataset", [TensorDataset, Augmented])
def test_a_run_over_two_workers_resumes(dataset):
    def loader() -> DataLoader:
        return DataLoader(dataset(*fixed_data().tensors), 12, shuffle=True, num_workers=2)

    assert_resumes(9, loader=loader)


def test_batches_kept_in_a_list_resume():
    def loader() -> list[tuple[Tensor, Tensor]]:
        x, y = fixed_data().tensors
        return list(zip(x.split([20, 7, 33, 30]), y.split([20, 7, 33, 30]), strict=True))

    assert_resumes(3, loader=loader, scheduled=False, batch_size=12, micro_batch=8)


def test_batches_that_a_function_draws_resume_and_are_not_drawn_again():
    x, y = fixed_data().tensors
    draws = [0]

    def draw() -> tuple[Tensor, Tensor]:
        draws[0] += 1
        rows = torch.randint(90, (12,))
        return x[rows] + 0.1 * random.random() + 0.1 * numpy.random.rand(), y[rows]  # noqa: NPY002

    def thirty_steps(run: Run) -> tuple[list[bb.StepRecord], list[bytes]]:
        records, files = [], []
        for step in run.train:
            for inputs, labels in step:
                step.backward(cross_entropy(run.model(inputs), labels))
            records.append(replace(step.update(), elapsed_seconds=0.0))
            files.append(run.save())
            if run.train.steps == 30:
                return records, files
        raise AssertionError

    def new() -> Run:
        sizes = {"batch_size": 12, "micro_batch": 8, "scheduler": lambda tick: 0.1 / (9 + tick)}
        return built(loader=lambda: draw, scheduled=False, **sizes)

    seed_all(SEED)
    uninterrupted = new()
    expected, files = thirty_steps(uninterrupted)
    assert len({record.batch_size for record in expected}) > 3
    for file in files[4:29:5]:
        seed_all(OTHER_SEED)
        resumed = new()
        draws[0] = 0
        resumed.load(file)
        assert draws[0] <= 1  # the samples that wait
        assert expected[resumed.train.steps :] == thirty_steps(resumed)[0]
        for name, weight in uninterrupted.model.state_dict().items():
            assert torch.equal(weight, resumed.model.state_dict()[name])


def test_a_run_with_a_scaler_and_a_skipped_step_resumes():
    def loader() -> DataLoader:
        x, y = fixed_data().tensors
        x = x.clone()
        x[50] = torch.inf
        return DataLoader(TensorDataset(x, y), 12, shuffle=True)

    seed_all(SEED)
    first = built(loader=loader, scaler=GradScaler("cpu", init_scale=256.0, growth_interval=5))
    expected, files = finish(first, save=True)
    assert EPOCHS == first.train.skipped
    for file in files[::3]:
        seed_all(OTHER_SEED)
        second = built(loader=loader, scaler=GradScaler("cpu", init_scale=2.0))
        second.load(file)
        done = second.train.steps + second.train.skipped
        # nan differs from itself, so the losses of skipped steps are compared as text
        assert repr(expected[done:]) == repr(finish(second)[0])
        assert EPOCHS == second.train.skipped
        assert first.train.scaler.state_dict() == second.train.scaler.state_dict()


def test_a_run_that_is_killed_after_every_step_is_the_same_run():
    seed_all(SEED)
    expected, _ = finish(built())
    seed_all(SEED)
    run, records = built(), []
    while run.train.epoch < EPOCHS:
        for step in run.train:
            for x, y in step:
                step.backward(cross_entropy(run.model(x), y))
            step.clip_grad_norm_(1.0)
            records.append(replace(step.update(), elapsed_seconds=0.0))
            file = run.save()
            seed_all(OTHER_SEED)
            run = built()
            run.load(file)
            break
    assert expected == records
