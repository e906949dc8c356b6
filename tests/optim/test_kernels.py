"""Kernels are built where there is a compiler; without one everything installs and trains."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import bigbatch
from bigbatch.errors import GradientError, SettingError
from bigbatch.kernels import native
from bigbatch.optim import LAMB, LARS, VRSGD, VRAdam

ROOT = Path(__file__).parents[2]
TRAINS = """
import torch
from studies.optimizer_cost import implementation
from bigbatch.errors import GradientError, SettingError
from bigbatch.optim import LARS, VRLAMB
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = VRLAMB(model.parameters(), 0.1)
for x in torch.randn(8, 5, 4):
    (model(x).square().mean() / 8).backward()
optimizer.step()
try:
    LARS(model.parameters(), fused=True)
except SettingError as error:
    print(error)
print(implementation())
print(model.weight.tolist())
"""


def installed(folder, compiler):
    """What a training prints with the package in `folder`, built with that compiler."""
    sources = folder / "sources"
    shutil.copytree(ROOT / "src", sources / "src", ignore=shutil.ignore_patterns("*.so"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, sources)
    options = "-q --no-deps --no-build-isolation --no-cache-dir --disable-pip-version-check"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options.split(), "--target", folder, sources],
        check=True,
        env=os.environ | {"CC": compiler},
        capture_output=True,
    )
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{TRAINS}"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder
    )
    return result.stdout.splitlines()


@pytest.mark.release
def test_without_a_compiler_it_installs_trains_and_says_so(tmp_path):
    *lines, path, weights = installed(tmp_path / "without", "false")
    assert "no kernels were built" in lines[0]
    assert path.startswith("torch operations (no C compiler at installation)")
    if native.library() is None:
        return
    path, with_kernels = installed(tmp_path / "with", os.environ.get("CC", "cc"))
    assert path.startswith("compiled kernels")
    expected, actual = (torch.tensor(eval(text)) for text in (weights, with_kernels))
    torch.testing.assert_close(expected, actual, rtol=1e-6, atol=1e-7)


def test_kernels_are_asked_for_where_they_are_missing_or_found():
    weights = [nn.Parameter(torch.zeros(3))]
    if native.library() is None:
        with pytest.raises(SettingError, match="no kernels were built"):
            LAMB(weights, fused=True)
    else:
        assert LAMB(weights, fused=True).param_groups[0]["fused"]
        assert VRAdam(weights, fused=True).param_groups[0]["fused"]


WARNS = """
import sys, warnings
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from bigbatch.optim import LAMB, VRSGD

rank = int(sys.argv[1])
if rank >= 0:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
warnings.simplefilter("always")
for make in (LAMB, LAMB) if rank >= 0 else (VRSGD, VRSGD, LAMB):  # VR needs DDP on ranks
    weight = torch.nn.Parameter(torch.ones(3, dtype=getattr(torch, sys.argv[2])))
    optimizer = make([weight], lr=0.1)
    for _ in range(2):
        for k in range(8):
            (k * weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def without_kernels(tmp_path_factory):
    """Runs `WARNS` with a copy of the package that has no compiled library."""
    place = tmp_path_factory.mktemp("without-kernels")
    source = Path(bigbatch.__file__).parent
    shutil.copytree(source, place / "bigbatch", ignore=shutil.ignore_patterns("*.so", "*.pyd"))

    def run(*arguments):
        result = subprocess.run(
            [sys.executable, "-c", WARNS, *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(place)},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        return result.stderr

    return run


@pytest.mark.parametrize(
    ("rank", "dtype", "warnings"),
    [
        (0, "float32", 1),
        (1, "float32", 0),
        pytest.param(-1, "float32", 1, marks=pytest.mark.release),
        pytest.param(-1, "float64", 0, marks=pytest.mark.release),
    ],
)
def test_missing_kernels_are_warned_of_once_on_rank_0(without_kernels, rank, dtype, warnings):
    said = without_kernels(rank, dtype)
    assert warnings == said.count("UserWarning: the compiled kernels are not installed")
    assert warnings == said.count("install a C compiler, then install bigbatch again")


# what they must not be given


needs_kernels = pytest.mark.skipif(native.library() is None, reason="no compiled kernels here")


@pytest.mark.cpu
@needs_kernels
def test_kernels_take_plain_float32_arrays_of_one_shape_and_layout():
    x = torch.zeros(4, 6)
    image = torch.zeros(2, 3, 4, 5)
    last = image.contiguous(memory_format=torch.channels_last)
    assert native.fits([x], None, [torch.ones(4, 6)], [nn.Parameter(x)])
    assert native.fits([last], [last.clone()])
    assert not native.fits([x], [torch.zeros(6, 4)])
    assert not native.fits([x], [torch.zeros(4, 5)])
    assert not native.fits([x], [x.double()])
    assert not native.fits([x], [torch.zeros(4, 12)[:, ::2]])
    assert not native.fits([image], [last])
    assert not native.fits([x.to("meta")])
    assert not native.fits([torch.zeros(3, dtype=torch.complex64).conj().imag])
    assert not native.fits([TwoTensor(x, x)])


class Negated(nn.Module):
    """The imaginary part of a conjugate: its gradient is a view with a minus in front."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self, factor):
        z = torch.complex(torch.ones(1), self.weight).conj()
        return (z.imag * factor).sum()


@pytest.mark.parametrize("make", [LARS, LAMB, VRSGD, VRAdam], ids=lambda c: c.__name__)
def test_gradients_that_are_negated_views_go_the_right_way(make):
    ends = []
    for fused in (None, False):
        model = Negated()
        optimizer = make(model.parameters(), lr=1.0, fused=fused)
        for factor in (1.0, 3.0):
            model(factor).backward()
        optimizer.step()
        ends.append(model.weight.item())
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)
    assert ends[0] > 2.0  # the gradient is -4


@pytest.mark.parametrize("make", [LARS, LAMB], ids=lambda c: c.__name__)
def test_a_tensor_subclass_goes_by_torch(make):
    ends = []
    for of in (lambda t: t, lambda t: TwoTensor(t, t.clone())):
        weight = nn.Parameter(of(torch.ones(3, 2)))
        weight.grad = of(torch.arange(6.0).view(3, 2))
        make([weight], lr=0.5).step()
        ends.append(weight.a if isinstance(weight, TwoTensor) else weight)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1e-24, 1e18])
def test_the_norms_of_lars_neither_under_nor_overflow(size):
    ends = []
    for fused in (None, False):
        weight = nn.Parameter(torch.ones(4, 5))
        weight.grad = torch.full((4, 5), size)
        LARS([weight], lr=0.5, fused=fused).step()
        ends.append(weight)
    torch.testing.assert_close(*ends, rtol=1e-6, atol=0)
    assert (ends[0] < 0.9999).all()


@pytest.mark.parametrize("make", [LARS, LAMB], ids=lambda c: c.__name__)
def test_sparse_gradients_are_refused_before_anything_is_stepped(make):
    embedding, weight = nn.Embedding(5, 2, sparse=True), nn.Parameter(torch.ones(2, 2))
    optimizer = make([weight, embedding.weight])
    (embedding(torch.tensor([1, 3])) @ weight).sum().backward()
    with pytest.raises(GradientError, match="not support gradients of layout torch"):
        optimizer.step()
    assert torch.equal(torch.ones(2, 2), weight)
    assert not optimizer.state


@pytest.mark.cpu  # a fused step is chosen on CPUs and CUDA alone
@pytest.mark.parametrize("make", [VRSGD, VRAdam], ids=lambda c: c.__name__)
def test_torchs_fused_step_is_not_chosen_for_gradients_of_another_type(make):
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    assert not make([weight]).param_groups[0]["fused"]
    assert make([nn.Parameter(torch.ones(3))]).param_groups[0]["fused"]
