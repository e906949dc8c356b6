"""The extras that tests need; tests of missing packages are not collected."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

from bigbatch.optional_packages import requirements

ROOT = Path(__file__).parents[2]
NEEDED = {  # the extra that a folder, or the files with this beginning of their names, need
    "src/bigbatch/cli": "cli",
    "recipes/src/bigbatch_recipes/models/hf_bert": "transformers",
    "recipes/src/bigbatch_recipes": "experiments",
    "src/bigbatch/integrations/accelerate": "accelerate",
    "src/bigbatch/integrations/deepspeed": "deepspeed",
    "src/bigbatch/integrations/lightning": "lightning",
    "src/bigbatch/integrations/transformers": "transformers",
    "src/bigbatch/log": "cli",
    "tests/advisor/test_advised_trainers": "all",
    "tests/advisor/test_advise": "experiments",
    "tests/advisor/test_refused": "cli",
    "tests/studies": "all",
    "tests/cli": "experiments",
    "recipes/tests": "all",
    "tests/helpers/cifar_files": "experiments",
    "tests/helpers/accelerate_process": "accelerate",
    "tests/helpers/lightning_training": "lightning",
    "tests/helpers/dropout_digits": "experiments",
    "tests/helpers/recipe_steps": "experiments",
    "tests/helpers/tiny_": "transformers",
    "tests/integrations/test_accelerate": "transformers",  # and its ranks' schedules
    "tests/integrations/test_deepspeed": "deepspeed",
    "tests/integrations/test_lightning": "lightning",
    "tests/integrations/": "all",
    "tests/project/test_examples": "all",
    "tests/log": "experiments",
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
        for requirement in requirements(extra):
            version(Requirement(requirement).name)
    except PackageNotFoundError:
        return True
    return False


def _extra_of(path: Path) -> str | None:
    if not path.is_relative_to(ROOT):
        return None
    name = path.relative_to(ROOT).as_posix()
    return next((extra for place, extra in NEEDED.items() if name.startswith(place)), None)
