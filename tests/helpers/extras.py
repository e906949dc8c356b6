"""The extras that tests need; tests of missing packages are not collected."""

from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from bigbatch.optional_packages import requirements

ROOT = Path(__file__).parents[2]
RECIPES = "recipes"  # stands for the packages of bigbatch-recipes
NEEDED = {  # the extra that a folder, or the files with this beginning of their names, need
    "recipes/src/bigbatch_recipes/models/hf_bert": "transformers",
    "recipes": RECIPES,
    "studies": RECIPES,
    "src/bigbatch/integrations/accelerate": "accelerate",
    "src/bigbatch/integrations/deepspeed": "deepspeed",
    "src/bigbatch/integrations/lightning": "lightning",
    "src/bigbatch/integrations/transformers": "transformers",
    "tests/advisor/test_advised_trainers": "all",
    "tests/helpers/cifar_files": RECIPES,
    "tests/helpers/accelerate_process": "accelerate",
    "tests/helpers/lightning_training": "lightning",
    "tests/helpers/recipe_steps": RECIPES,
    "tests/helpers/tiny_": "transformers",
    "tests/integrations/test_accelerate": "transformers",  # and its ranks' schedules
    "tests/integrations/test_deepspeed": "deepspeed",
    "tests/integrations/test_lightning": "lightning",
    "tests/integrations/": "all",
    "tests/project/test_examples": "all",
    "tests/integrations/test_logs_of_trainers": "all",
    "tests/recipes": RECIPES,
    "tests/studies": RECIPES,
}


def pytest_ignore_collect(collection_path):
    """Ignores a file or a folder whose extra is not installed."""
    needed = _extra_of(collection_path)
    return True if needed and is_missing(needed) else None


def pytest_terminal_summary(terminalreporter):
    """Lists ignored files and folders by extra."""
    missing = sorted({extra for extra in NEEDED.values() if is_missing(extra)})
    if missing:
        terminalreporter.write_line("")
        terminalreporter.write_line("left out, as packages are not installed:")
    for extra in missing:
        places = " ".join(place for place, needed in NEEDED.items() if needed == extra)
        terminalreporter.write_line(f"{extra:12} {places}")


@cache
def is_missing(extra: str) -> bool:
    """Whether a package of an extra is not installed."""
    try:
        if extra == RECIPES:
            needed = [one for one in requires("bigbatch-recipes") or [] if "extra ==" not in one]
        else:
            needed = requirements(extra)
        for requirement in needed:
            version(Requirement(requirement).name)
    except PackageNotFoundError:
        return True
    return False


def _extra_of(path: Path) -> str | None:
    if not path.is_relative_to(ROOT):
        return None
    name = path.relative_to(ROOT).as_posix()
    return next((extra for place, extra in NEEDED.items() if name.startswith(place)), None)
