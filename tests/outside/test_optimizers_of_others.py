"""Every optimizer of timm and of pytorch_optimizer, as the base of VarianceReduced and in the loop.

At gamma = 1, r = 1: the step is the base's own, bit for bit. What cannot be wrapped is listed with
the sentence that says so.
"""

import copy
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.errors import BigbatchError
from bigbatch.optim import VarianceReduced

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
if importlib.util.find_spec("timm") is None:
    pytest.skip("timm is not installed", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")

MICRO, K = 16, 4
OWN_NAMES = "of its own in its parameter groups"
REFUSED = {  # by VarianceReduced
    "timm.Mars": OWN_NAMES,
    "adabound": OWN_NAMES,
    "alice": OWN_NAMES,
    "avagrad": OWN_NAMES,
    "focus": OWN_NAMES,
    "mars": OWN_NAMES,
    "prodigy": OWN_NAMES,
    "racs": OWN_NAMES,
}
NO_RATE_TO_SCALE = {  # by the loop, where the learning rate follows the batch
    "a2grad": "has no learning rate to scale; give it lr=, or pass lr_scaling=None",
    "asgd": "was set to .* during the step, .* or pass lr_scaling=None",
}
NOT_RUN = {  # alone, neither
    "timm.Adahessian": "wants backward(create_graph=True)",
    "timm.Lookahead": "wraps another optimizer",
    "adago": "wants groups with use_muon",
    "adahessian": "wants backward(create_graph=True)",
    "adalomo": "updates inside backward",
    "adammini": "wants named parameters",
    "adamuon": "wants groups with use_muon",
    "alig": "wants a closure that gives the loss",
    "bsam": "wants the number of samples",
    "demo": "wants a process group, and joins gradients itself",
    "distributedmuon": "wants groups with use_muon",
    "lbfgs": "wants a closure that it calls many times",
    "lomo": "updates inside backward",
    "magma": "wraps another optimizer",
    "muon": "wants groups with use_muon",
    "muonclip": "wants groups with use_muon",
    "normuon": "wants groups with use_muon",
    "ranger21": "wants the number of updates",
    "sophiah": "wants backward(create_graph=True)",
    "spectralsphere": "takes matrices alone",
}
NOT_DOWNHILL = {"kate", "ranger"}  # at a learning rate of .01, in a few steps, alone too


def timms() -> dict[str, type[Optimizer]]:
    """All of its optimizers, without the rest of it, which wants a torchvision that fits."""
    package = ModuleType("timms_optimizers")
    package.__path__ = [str(Path(importlib.util.find_spec("timm").origin).parent / "optim")]
    sys.modules[package.__name__] = package
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.name not in ("_param_groups", "_optim_factory", "optim_factory"):
            loaded = importlib.import_module(f"{package.__name__}.{module.name}")
            for name, value in vars(loaded).items():
                if getattr(value, "__module__", "") == loaded.__name__ and isinstance(value, type):
                    found[f"timm.{name}"] = value
    return {name: kind for name, kind in found.items() if issubclass(kind, Optimizer)}


OTHERS = timms() | {
    name: pytorch_optimizer.load_optimizer(name)
    for name in pytorch_optimizer.get_supported_optimizers()
}
RUN = sorted(OTHERS.keys() - NOT_RUN.keys())
WRAPPED = sorted(set(RUN) - REFUSED.keys())
one = partial(pytest.mark.parametrize, "name")


def data():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=draw)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def base_of(name, model):
    torch.manual_seed(2)  # some draw numbers
    kind = OTHERS[name]
    rate = {"lr": 0.01} if "lr" in inspect.signature(kind).parameters else {}
    return kind(model.parameters(), **rate)


def train(model, optimizer, steps):
    """K micro-batches a step, each another order of the samples."""
    x, y = data()
    for step in steps:
        torch.manual_seed(step)
        np.random.seed(step)  # noqa: NPY002  # whose generator Kron draws from
        optimizer.zero_grad()
        for rows in torch.randperm(len(x)).split(MICRO):
            (cross_entropy(model(x[rows]), y[rows]) / K).backward()
        optimizer.step()


def assert_same(expected, actual):
    for one_of, other in zip(expected.parameters(), actual.parameters(), strict=True):
        assert torch.equal(one_of, other)


def test_what_is_listed_is_there():
    for listed in (REFUSED, NO_RATE_TO_SCALE, NOT_RUN):
        assert listed.keys() <= OTHERS.keys()
    assert len(WRAPPED) > 110


@one(sorted(REFUSED))
def test_what_cannot_be_wrapped_is_refused_in_a_sentence(name):
    with pytest.raises(BigbatchError, match=REFUSED[name]):
        VarianceReduced(base_of(name, network()))


@one(WRAPPED)
def test_a_factor_of_one_is_its_own_step(name):
    expected, actual = network(), network()
    train(expected, base_of(name, expected), range(5))
    train(actual, VarianceReduced(base_of(name, actual), gamma=1.0, r_max=1.0), range(5))
    assert_same(expected, actual)


@one(WRAPPED)
def test_a_loaded_state_continues_as_if_never_saved(name):
    model = network()
    optimizer = VarianceReduced(base_of(name, model), beta3=0.9)
    train(model, optimizer, range(2))
    resumed = copy.deepcopy(model)
    loaded = VarianceReduced(base_of(name, resumed), beta3=0.9)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    train(resumed, loaded, range(2, 4))
    assert_same(model, resumed)


def in_the_loop(name, wrap, **settings):
    """The losses of a training whose batch follows SimiGrad."""
    model = network()
    loader = DataLoader(TensorDataset(*data()), batch_size=8)
    policy = bb.SimiGrad(target=0.3, min_batch=16, max_batch=32)
    settings = {"policy": policy, "batch_size": 32, "micro_batch": 4, "every": 1} | settings
    trained = bb.AdaptiveBatch(model, wrap(base_of(name, model)), loader, **settings)
    losses = []
    for _ in trained.epochs(6):
        for step in trained:
            for x, y in step:
                step.backward(cross_entropy(model(x), y))
            losses.append(step.update().loss)
    return losses


@one(RUN)
@pytest.mark.parametrize("wrap", [lambda base: base, VarianceReduced], ids=["alone", "wrapped"])
def test_it_goes_downhill_in_the_loop(name, wrap):
    if wrap is VarianceReduced and name in REFUSED:
        pytest.skip(REFUSED[name])
    settings = {}
    if name in NO_RATE_TO_SCALE:
        with pytest.raises(BigbatchError, match=NO_RATE_TO_SCALE[name]):
            in_the_loop(name, wrap)
        settings = {"lr_scaling": None}
    losses = in_the_loop(name, wrap, **settings)
    assert all(torch.tensor(losses).isfinite())
    if name not in NOT_DOWNHILL:
        assert losses[-1] < losses[0]
