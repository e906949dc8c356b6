"""Imports follow the data, and optional packages are imported where an extra brings them."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import bigbatch
import bigbatch.optim

SOURCE = Path(bigbatch.__file__).parent
# errors, interrupts, kernels < chart_axis, digest, optional_packages, setting_types < gradients
# < statistics < policies < data, optim < training < advisor < integrations, runs < experiments
# < bench < results < cli
LEVELS = {
    "errors": 0,
    "interrupts": 0,
    "kernels": 0,
    "chart_axis": 1,
    "digest": 1,
    "optional_packages": 1,
    "setting_types": 1,
    "gradients": 2,
    "statistics": 3,
    "policies": 4,
    "data": 5,
    "optim": 5,
    "training": 6,
    "advisor": 7,
    "public": 8,
    "": 8,  # the package itself
    "integrations": 8,
    "runs": 8,
    "experiments": 9,
    "bench": 10,
    "results": 11,
    "cli": 12,
    "__main__": 13,
}
LIBRARY = {folder for folder, level in LEVELS.items() if level <= LEVELS["advisor"]} | {"public"}
FILES = sorted(SOURCE.rglob("*.py"))


def folder_of(module: str) -> str:
    """The first name below bigbatch, "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def module_of(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide the direction"
            found.append(node.module)
    return found


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_imports_follow_the_data(file):
    folder = folder_of(module_of(file))
    if folder == "":
        return  # the package itself imports everything below
    for imported in imports_of(file):
        if imported.split(".")[0] == "bigbatch":
            other = folder_of(imported)
            assert other in LEVELS, f"{file} imports {imported}, which has no level in LEVELS"
            same_or_lower = other == folder or LEVELS[other] < LEVELS[folder]
            assert same_or_lower, f"{file}: {folder} may not import {imported}"


def test_every_folder_has_a_level():
    folders = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert folders - {"__init__", "__pycache__", "py"} <= set(LEVELS) | {"py.typed"}


def test_policies_import_no_tensors_clock_or_files():
    forbidden = {"torch", "numpy", "time", "datetime", "os", "pathlib", "io", "random"}
    for file in (SOURCE / "policies").glob("*.py"):
        assert not forbidden & {name.split(".")[0] for name in imports_of(file)}, file


def test_the_library_imports_torch_and_numpy_alone():
    allowed = {"torch", "numpy", "bigbatch"} | sys.stdlib_module_names
    for file in FILES:
        if folder_of(module_of(file)) in LIBRARY:
            assert {name.split(".")[0] for name in imports_of(file)} <= allowed, file


OPTIONAL = {  # the packages that a folder or a module may import
    "integrations.accelerate": {"accelerate"},
    "integrations.deepspeed": {"deepspeed"},
    "integrations.lightning": {"lightning"},
    "integrations.transformers": {"accelerate", "transformers"},
    "experiments.models.hf_bert": {"tokenizers", "transformers"},
    "cli": {"rich", "typer"},
    "runs": {"filelock", "jinja2", "matplotlib", "rich", "yaml"},
    "experiments": {"PIL", "filelock", "jinja2", "matplotlib", "rich"},
    "bench": {"matplotlib", "rich", "typer"},
    "results": {"matplotlib"},
}


def test_optional_packages_are_imported_in_their_folders_alone():
    packages = set().union(*OPTIONAL.values())
    for file in FILES:
        module = module_of(file).removeprefix("bigbatch.")
        allowed = [
            names for folder, names in OPTIONAL.items() if f"{module}.".startswith(f"{folder}.")
        ]
        imported = {name.split(".")[0] for name in imports_of(file)} & packages
        assert imported <= set().union(*allowed), f"{file} imports {imported}"


def module_state_of(file: Path) -> list[str]:
    """What a module can change after its import: `global`, and containers that begin empty."""
    tree = ast.parse(file.read_text())
    names = [name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names]
    found = [f"global {name}" for name in names]
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        text = ast.unparse(value) if value else ""
        if text in ("{}", "[]", "dict()", "list()", "set()") or text.startswith(
            ("Weak", "weakref.")
        ):
            found.append(ast.unparse(node))
    return found


LIBRARY_FILES = [file for file in FILES if folder_of(module_of(file)) in LIBRARY]


@pytest.mark.parametrize("file", LIBRARY_FILES, ids=module_of)
def test_no_module_of_the_library_keeps_state(file):
    assert [] == module_state_of(file)


def test_the_state_of_a_module_is_found(tmp_path):
    file = tmp_path / "stateful.py"
    lines = ["A = {}", "B: set = set()", "C = WeakKeyDictionary()", "E = {1: 2}", "def f():"]
    file.write_text("\n".join([*lines, "    global D", "    D = 1"]))
    assert ["global D", *lines[:3]] == module_state_of(file)


def test_no_two_modules_have_the_same_name():
    names = Counter(file.stem for file in FILES if file.stem != "__init__")
    names.update(folder.parent.name for folder in SOURCE.rglob("*/__init__.py"))
    assert not {name for name, count in names.items() if count > 1}


def test_contributing_lists_the_files_of_the_library():
    page = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()
    listed, folder = [], ""
    for line in page.split("**The library's files**")[1].split("**Numbers.**")[0].splitlines():
        if match := re.match(r"    (\w+/\w+/) ", line):
            folder = match[1]
        elif match := re.fullmatch(r"    (\w+/)? +(\w+(?:, \w+)*)  +\S.*", line):
            folder = match[1] or folder
            listed += [f"{folder}{name}.py" for name in match[2].split(", ")]
    files = [file.relative_to(SOURCE) for file in FILES if file.stem != "__init__"]
    folders = {name.split("/")[0] for name in listed}
    assert sorted(str(file) for file in files if file.parts[0] in folders) == sorted(listed)
    assert {
        "gradients",
        "statistics",
        "policies",
        "data",
        "optim",
        "training",
        "advisor",
    } == folders


def test_importing_bigbatch_imports_no_package_that_torch_does_not():
    code = (
        "import sys, torch, numpy, torch.utils.data; before = set(sys.modules)\n"
        "import bigbatch, bigbatch.public, bigbatch.optim\n"
        "roots = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(roots - set(sys.stdlib_module_names)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "['bigbatch']" == result.stdout.strip()


def test_the_public_names_are_imported_on_first_use():
    code = (
        "import sys, bigbatch\n"
        "assert 'torch' not in sys.modules\n"
        "assert not hasattr(bigbatch, 'nonsense')\n"
        "from bigbatch import *\n"
        "from bigbatch.training import adaptive_batch\n"
        "assert bigbatch.AdaptiveBatch is AdaptiveBatch is adaptive_batch.AdaptiveBatch\n"
        "assert {*bigbatch.__all__, 'optim', 'errors'} <= set(dir(bigbatch))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_public_names_are_these():
    assert [
        "AdaptiveBatch",
        "Advice",
        "BatchPlan",
        "Batches",
        "BigbatchError",
        "BranchTest",
        "BranchTestResult",
        "Controller",
        "Decision",
        "DistributedState",
        "ElasticDistributedSampler",
        "Fixed",
        "Goodput",
        "GradientMeter",
        "GradientStatistics",
        "LateSwitch",
        "Network",
        "NoiseAverage",
        "NoiseScale",
        "NormTest",
        "Policy",
        "Schedule",
        "Seesaw",
        "Shadow",
        "SimiGrad",
        "Step",
        "StepRecord",
        "TrainingState",
        "advise",
        "check_groups",
        "ema_decay",
        "largest_micro_batch",
    ] == bigbatch.__all__
    assert [
        "LAMB",
        "LARS",
        "VRLAMB",
        "VRLARS",
        "VRSGD",
        "VRAdam",
        "VarianceReduced",
    ] == bigbatch.optim.__all__
