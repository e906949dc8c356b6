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

ROOT = Path(__file__).parents[2]
SOURCE = Path(bigbatch.__file__).parent
RECIPES = ROOT / "recipes/src/bigbatch_recipes"
STUDIES = ROOT / "studies"
# imports go to the left: docs/decisions/0023
LEVELS = {
    folder: level
    for level, folders in enumerate(
        (
            "errors interrupts kernels loop_warning",
            "digest optional_packages setting_types state_checks",
            "gradients",
            "statistics",
            "policies",
            "data optim",
            "log",
            "training",
            "advisor",
            "public",
            "integrations",
            "cli",
            "__main__",
        )
    )
    for folder in folders.split()
}
PACKAGES = {"bigbatch": 0, "bigbatch_recipes": 1, "studies": 2}
FILES = sorted(SOURCE.rglob("*.py"))
TREES = {"bigbatch": FILES, "bigbatch_recipes": sorted(RECIPES.rglob("*.py"))}
TREES["studies"] = sorted(STUDIES.rglob("*.py"))
ALL_FILES = [file for files in TREES.values() for file in files]


def folder_of(module: str) -> str:
    """The first name below bigbatch, "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def module_of(file: Path) -> str:
    above = next(tree for tree in (SOURCE, RECIPES, STUDIES) if tree in file.parents)
    parts = file.relative_to(above.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide the direction"
            inside = [f"{node.module}.{name.name}" for name in node.names]
            found += inside if node.module == "bigbatch" else [node.module]
    return found


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_imports_follow_the_data(file):
    folder = folder_of(module_of(file))
    if folder == "":
        return  # the package itself imports everything below
    for imported in imports_of(file):
        if imported.split(".")[0] == "bigbatch" and imported != "bigbatch.__version__":
            other = folder_of(imported)
            assert other in LEVELS, f"{file} imports {imported}, which has no level in LEVELS"
            same_or_lower = other == folder or LEVELS[other] < LEVELS[folder]
            assert same_or_lower, f"{file}: {folder} may not import {imported}"


def test_the_library_imports_no_recipe_and_a_recipe_no_study():
    for package, files in TREES.items():
        assert files
        for file in files:
            imported = {name.split(".")[0] for name in imports_of(file)} & PACKAGES.keys()
            above = [name for name in imported if PACKAGES[name] > PACKAGES[package]]
            assert not above, f"{file} imports {above}"


def test_tests_import_helpers_without_a_package_that_another_one_may_hide():
    """A package `tests` in site-packages comes before a folder without __init__.py."""
    sources = {file: file.read_text() for file in (ROOT / "tests").rglob("*.py")}
    assert [] == [file for file, text in sources.items() if re.search(r"(?m)^from tests\b", text)]


def test_the_library_has_no_word_of_recipes():
    for file in SOURCE.rglob("*"):
        if file.suffix in (".py", ".css", ".js"):
            assert not re.search(r"(?i)bigbatch.recipes|\brecipes?\b", file.read_text()), file


def test_every_folder_has_a_level():
    folders = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert folders - {"__init__", "__pycache__"} == set(LEVELS)


def test_policies_import_no_tensors_clock_or_files():
    forbidden = {"torch", "numpy", "time", "datetime", "os", "pathlib", "io", "random"}
    for file in (SOURCE / "policies").glob("*.py"):
        assert not forbidden & {name.split(".")[0] for name in imports_of(file)}, file


TRAINERS = {  # what the integrations may import
    "accelerate": {"accelerate"},
    "deepspeed": {"deepspeed"},
    "lightning": {"lightning"},
    "transformers": {"accelerate", "transformers"},
}


def test_the_library_imports_torch_and_numpy_alone():
    allowed = {"torch", "numpy", "bigbatch"} | sys.stdlib_module_names
    for file in FILES:
        _, folder, trainer, *_ = [*module_of(file).split("."), "", ""]
        more = TRAINERS.get(trainer, set()) if folder == "integrations" else set()
        assert {name.split(".")[0] for name in imports_of(file)} <= allowed | more, file


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


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_no_module_of_the_library_keeps_state(file):
    assert [] == module_state_of(file)


def test_the_state_of_a_module_is_found(tmp_path):
    file = tmp_path / "stateful.py"
    lines = ["A = {}", "B: set = set()", "C = WeakKeyDictionary()", "E = {1: 2}", "def f():"]
    file.write_text("\n".join([*lines, "    global D", "    D = 1"]))
    assert ["global D", *lines[:3]] == module_state_of(file)


@pytest.mark.parametrize("package", TREES)
def test_no_two_modules_have_the_same_name(package):
    files = TREES[package]
    names = Counter(file.stem for file in files if not file.stem.startswith("__"))
    names.update(file.parent.name for file in files if file.stem == "__init__")
    assert not {name for name, count in names.items() if count > 1}


def test_contributing_lists_the_files_of_the_library():
    page = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()
    listed, folder = [], ""
    for line in page.split("**The library's files**")[1].split("**Numbers.**")[0].splitlines():
        if match := re.match(r"    (\w+/\w+/)", line):
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
        "integrations",
        "log",
        "cli",
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
        "BranchTestResult",
        "Composite",
        "Controller",
        "Decision",
        "DistributedState",
        "ElasticDistributedSampler",
        "Fixed",
        "Goodput",
        "GradientMeter",
        "GradientStatistics",
        "LateSwitch",
        "Needs",
        "NestedNoise",
        "Network",
        "NoiseAverage",
        "NoiseScale",
        "Policy",
        "RunLog",
        "Schedule",
        "Seesaw",
        "Shadow",
        "SimiGrad",
        "Step",
        "StepRecord",
        "TrainingState",
        "advise",
        "advised_batch_size",
        "advised_lr",
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
