"""One run of a program at another batch size: what its loaders, rates, seeds and losses become."""

import json
import random
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from bigbatch.advisor.trial_process import Trial
from torchrun import run

PROCESSES = """
import json, os, sys, traceback
import torch._dynamo  # which the first optimizer imports
from pathlib import Path
from bigbatch.advisor.own_folder import OwnFolder
from bigbatch.advisor.trial_process import Trial, run

for trial, variables in json.load(open(sys.argv[1])):
    if os.fork() == 0:  # torch is imported once
        os.environ.update(variables)
        status = 0
        try:
            OwnFolder(Path(trial["folder"]), Path(trial["users"])).make()
            run(Trial(**trial))
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)
    assert os.wait()[1] == 0, trial["target"]
"""
START = """
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
import bigbatch as bb

torch.manual_seed(3)
x = torch.arange(640.0).reshape(320, 2) / 640
model = torch.nn.Linear(2, 1)
with torch.no_grad():
    model.weight.fill_(0.5)
    model.bias.fill_(0.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(x)

def loss_of(x):
    return (model(x) - 1).square().mean()

def step(x):
    optimizer.zero_grad()
    loss_of(x).backward()
    optimizer.step()
"""
PROGRAMS = {
    "a loader": "for x, in DataLoader(data, batch_size=8): step(x)",
    "a sampler": "for x, in DataLoader(data, batch_sampler=BatchSampler("
    "SequentialSampler(data), 8, False)): step(x)",
    "a sampler of lists": "for x, in DataLoader(data, None, sampler=BatchSampler("
    "SequentialSampler(data), 8, False)): step(x)",
    "a loader that is made again": "first = DataLoader(data, 8)\n"  # as trainers do it
    "for x, in DataLoader(data, batch_sampler=first.batch_sampler): step(x)",
    "a size that is used again": "for x, in DataLoader(data, DataLoader(data, 8).batch_size):\n"
    "    step(x)",
    "seeds by name": "import numpy, random\n"
    "torch.manual_seed(seed=3); numpy.random.seed(seed=2**32 - 1); random.seed(a=4, version=2)\n"
    "for x, in DataLoader(data, 8): step(x)",
    "another loader": "DataLoader(data, 5); DataLoader(data, batch_size=None)\n"
    "assert [5] * 64 == [len(x) for x, in DataLoader(data, 5)]\n"
    "for x, in DataLoader(data, 8): step(x)",
    "by hand": "for x in x.split(bb.advised_batch_size(8)): step(x)",
    "a schedule by hand": "for i, (x,) in enumerate(DataLoader(data, 8)):\n"
    "    optimizer.param_groups[0]['lr'] = 0.01 * (i + 1); step(x)",
    "OneCycleLR": "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 100)\n"
    "for x, in DataLoader(data, 8): step(x); schedule.step()",
    "its own rate": "optimizer.param_groups[0]['lr'] = bb.advised_lr(0.01)\n"
    "for x, in DataLoader(data, 8): step(x)",
    "a tensor as rate": "optimizer.param_groups[0]['lr'] = torch.tensor(0.01)\n"
    "for x, in DataLoader(data, 8): step(x)",
    "a scaler": "scaler = torch.amp.GradScaler('cpu', init_scale=1024)\n"
    "for x, in DataLoader(data, 8):\n"
    "    optimizer.zero_grad(); scaler.scale(loss_of(x)).backward()\n"
    "    scaler.step(optimizer); scaler.update()",
    "two backwards": "for i, (x,) in enumerate(DataLoader(data, 4)):\n"
    "    (loss_of(x) / 2).backward()\n"
    "    if i % 2: optimizer.step(); optimizer.zero_grad()",
    "another optimizer": "other = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])\n"
    "for x, in DataLoader(data, 8): step(x); other.step()",
    "a composite": "optimizer = bb.Composite(torch.optim.SGD([model.weight], lr=0.01), "
    "torch.optim.SGD([model.bias], lr=0.01))\nfor x, in DataLoader(data, 8): step(x)",
    "an evaluation": "for x, in DataLoader(data, 8):\n"
    "    step(x)\n    with torch.no_grad(): model(x)",
    "a copy of the model": "import copy, io\nfor x, in DataLoader(data, 8):\n"
    "    step(x); copy.deepcopy(model)(x); torch.save(model, io.BytesIO())",
    "a short end": "for i in range(3 * 19):\n"  # epochs of 19 backwards
    "    (loss_of(x[:bb.advised_batch_size(4)]) / 2).backward()\n"
    "    if i % 19 % 2 or i % 19 == 18: optimizer.step(); optimizer.zero_grad()",
    "time": "while True:\n    for x, in DataLoader(data, 8): step(x)",
    "an exit": "import sys\nfor x, in DataLoader(data, 8): step(x)\nsys.exit(0)",
}
OVERRIDES = {
    "two backwards": {"backwards": 2, "sizes": {"4": 16}},
    "a loader that is made again": {"sizes": {"8": 32, "32": 128}},
    "a size that is used again": {"sizes": {"8": 32, "32": 128}},
    "seeds by name": {"seed": 1},
    "a short end": {"backwards": 2, "sizes": {"4": 16}, "steps": 20},
    "time": {"seconds": 0.1, "steps": 10**9},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Rows, all rows, seconds, rates, losses of each step, at four times the program's batch."""
    folder = tmp_path_factory.mktemp("trials")
    trials = []
    for i, (name, code) in enumerate(PROGRAMS.items()):
        (users := folder / str(i)).mkdir()
        (users / "train.py").write_text(START + code)
        defaults = {
            "target": str(users / "train.py"),
            "arguments": (),
            "is_module": False,
            "users": str(users),
            "folder": str(users / "own"),
            "losses": str(users / "losses.jsonl"),
            "sizes": {"8": 32},
            "dim": 0,
            "backwards": 1,
            "seed": 0,
            "seconds": 60.0,
            "steps": 6,
            "lr_factors": {"SGD": 2.0},
        }
        trials.append(Trial(**(defaults | OVERRIDES.get(name, {}))))
    variables = {"BIGBATCH_BATCH_FACTOR": "4", "BIGBATCH_LR_FACTOR": "2"}
    text = json.dumps([(asdict(trial), variables) for trial in trials])
    (folder / "trials.json").write_text(text)
    done = run(sys.executable, "-c", PROCESSES, folder / "trials.json")
    assert (0, "") == (done.returncode, done.stderr)
    return {
        name: np.array([*map(json.loads, Path(trial.losses).read_text().splitlines())]).T
        for name, trial in zip(PROGRAMS, trials, strict=True)
    }


def expected_losses(rates):
    """Of SGD on the batches of 32 by hand, from the third step on."""
    x = np.arange(640.0).reshape(320, 2) / 640
    weight, bias, losses = np.array([0.5, 0.5]), 0.0, []
    for batch, rate in zip(np.split(x, 10), rates, strict=False):
        error = batch @ weight + bias - 1
        losses.append((error**2).mean())
        weight = weight - rate * 2 * (error @ batch) / 32
        bias = bias - rate * 2 * error.mean()
    return losses[2:]


FIXED = [0.02] * 8


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ("time", "a short end")])
def test_a_program_trains_with_the_batch_and_the_rate_of_the_trial(runs, name):
    rows, _, seconds, rates, losses = runs[name]
    used = {
        "a schedule by hand": 0.02 * np.arange(1, 9),
        "OneCycleLR": np.array([0.0, 0.0, *rates]),  # its first two steps are not written
    }.get(name, np.array(FIXED))
    if name == "OneCycleLR":
        assert rates[0] > 2 * 0.004  # twice 0.1 / 25, and rising
        assert (np.diff(rates) > 0).all()
        return
    assert [32] * 6 == rows.tolist()
    assert used[2:] == pytest.approx(rates, rel=1e-6)
    assert expected_losses(used) == pytest.approx(losses, rel=1e-5)
    assert (np.diff([0.0, *seconds]) > 0).all()


def test_the_end_of_an_epoch_with_fewer_backwards_is_left_out(runs):
    rows, seen, _, _, losses = runs["a short end"]
    assert [32] * 20 == rows.tolist()
    assert [*[32] * 7, 48, *[32] * 8, 48, *[32] * 3] == np.diff([0, *seen]).tolist()
    assert (losses[1:] > 0.7 * losses[:-1]).all()


def test_a_run_ends_after_its_time(runs):
    _, _, seconds, _, _ = runs["time"]
    assert seconds[-1] >= 0.1 > seconds[-2]


def test_seeds_are_added_to_those_of_the_program(tmp_path):
    code = (
        "import json, random, sys, numpy, torch\n"
        "from bigbatch.advisor.trial_process import shift_seeds\n"
        "shift_seeds(int(sys.argv[1]))\n"
        "first = [random.random(), numpy.random.rand(), torch.rand(1).item()]\n"
        "random.seed(5); numpy.random.seed(5); torch.manual_seed(5)\n"
        "print(json.dumps([*first, random.random(), numpy.random.rand(), torch.rand(1).item()]))"
    )
    zero, seven = (json.loads(run(sys.executable, "-c", code, seed).stdout) for seed in (0, 7))
    expected = []
    for first in (0, 5):
        random.seed(first)
        expected += [random.random(), np.random.RandomState(first).rand()]
        expected.append(torch.rand(1, generator=torch.Generator().manual_seed(first)).item())
    assert expected == zero
    random.seed(12)
    assert random.random() == seven[3]
    assert all(one != other for one, other in zip(zero, seven, strict=True))
