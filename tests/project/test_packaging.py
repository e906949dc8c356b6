"""What an installation needs: torch and numpy for the library, extras for the rest."""

import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import distributions, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from bigbatch.optional_packages import install_command, requirements
from extras import NEEDED, RECIPES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
BLOCK = """
import sys

class Filtered:
    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        return None if {condition} else self._finder.find_spec(name, path, target)

sys.meta_path = [Filtered(finder) for finder in sys.meta_path]
"""
COMMAND = """
from bigbatch.cli import main
main()
"""
TWO_STEPS = """
import torch
import bigbatch as bb
from bigbatch.optim import VRAdam

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
data = torch.utils.data.TensorDataset(torch.randn(128, 4), torch.randn(128, 2))
loader = torch.utils.data.DataLoader(data, batch_size=32)
optimizer = VRAdam(model.parameters(), lr=1e-2)
with bb.GradientMeter(model) as meter:
    for x, y in loader:
        (model(x) - y).square().mean().div(4).backward()
    assert meter.read([32] * 4).grad_variance > 0
optimizer.step()
optimizer.zero_grad()
train = bb.AdaptiveBatch(model, optimizer, loader, policy=bb.Fixed(64))
for epoch in train.epochs(1):
    for step in train:
        for x, y in step:
            step.backward((model(x) - y).square().mean())
        print(step.update().batch_size)
"""


def run(condition, code, *arguments):
    """Runs code in a process where packages under this condition cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(condition=condition) + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def packages_with(*distributions):
    """The names to import of distributions and of all that they need."""
    needed, remaining = set(), list(distributions)
    while remaining:
        name = remaining.pop()
        if name not in needed:
            needed.add(name)
            found = map(Requirement, installed_requirements(name))
            remaining += [one.name for one in found if not one.marker or one.marker.evaluate()]
    plain = {name.replace("_", "-").lower() for name in needed}
    return {
        package
        for package, owners in packages_distributions().items()
        if plain & {owner.replace("_", "-").lower() for owner in owners}
    }


def installed_requirements(name):
    try:
        return requires(name) or []
    except ModuleNotFoundError:
        return []


def test_the_library_depends_on_torch_and_numpy_alone():
    assert ["numpy", "torch"] == sorted(Requirement(one).name for one in PROJECT["dependencies"])


def test_the_library_trains_where_no_other_package_can_be_imported():
    allowed = packages_with("torch", "numpy") | sys.stdlib_module_names | {"bigbatch"}
    condition = f"root not in {allowed} and not root.startswith('_sysconfigdata')"
    result = run(condition, TWO_STEPS)
    assert (["64", "64"], 0) == (result.stdout.split(), result.returncode), result.stderr
    result = run(condition, "import pytest")
    assert "No module named 'pytest'" in result.stderr


def test_an_extra_names_its_packages_and_those_of_the_extras_in_it():
    def packages(extra):
        for one in map(Requirement, EXTRAS[extra]):
            if one.name == "bigbatch":
                for inner in one.extras:
                    yield from packages(inner)
            else:
                yield str(one)

    for extra in EXTRAS:
        assert sorted(set(packages(extra))) == sorted(
            map(str, map(Requirement, requirements(extra)))
        )
    assert 'pip install "deepspeed>=0.19.8" "ninja>=1.11"' == install_command("deepspeed")


def test_without_its_metadata_the_command_is_one_for_the_source_folder():
    assert 'pip install ".[nonsense]"' == install_command("nonsense")


@pytest.mark.parametrize("arguments", [["--help"], ["report", "--help"], ["advise", "--help"]])
def test_the_command_runs_where_no_other_package_can_be_imported(arguments):
    allowed = packages_with("torch", "numpy") | sys.stdlib_module_names | {"bigbatch"}
    condition = f"root not in {allowed} and not root.startswith('_sysconfigdata')"
    result = run(condition, "sys.argv[0] = 'bigbatch'\n" + COMMAND, *arguments)
    assert (0, "") == (result.returncode, result.stderr)
    assert "usage: bigbatch" in result.stdout.lower()


def test_every_folder_that_needs_an_extra_exists():
    for place, extra in NEEDED.items():
        assert extra in EXTRAS or extra == RECIPES
        assert list(ROOT.glob(place + "*")), place


def test_a_source_distribution_has_every_file_of_the_repository():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("no git repository")
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    grafted = tuple(f"{folder}/" for kind, *names in lines if kind == "graft" for folder in names)
    included = [name for kind, *names in lines if kind == "include" for name in names]
    for file in listed.stdout.splitlines():
        covered = file.startswith(grafted) or any(fnmatch(file, name) for name in included)
        assert covered, f"{file}: add it to MANIFEST.in"


PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
)


def test_every_pinned_package_is_pinned_once():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert len({name.lower() for name in PINS}) == sum("==" in line for line in lines)


def test_the_first_supported_python_can_have_every_pinned_version():
    """Debian 12 has 3.11.2; pip refuses there what needs 3.11.5."""
    first = PROJECT["requires-python"].removeprefix(">=") + ".0"
    known = {one.metadata["Name"].lower(): one.metadata for one in distributions()}
    needs = {name: known.get(name.lower(), {}).get("Requires-Python") for name in PINS}
    assert [] == [name for name in PINS if first not in SpecifierSet(needs[name] or "")]
