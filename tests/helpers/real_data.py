"""Real data sets for tests, where they are: ../shared/data, next to the repository."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data"


def needs(name):
    """Skips a test where the data set of this folder is not there."""
    exists = (FOLDER / name).is_dir()
    return pytest.mark.skipif(not exists, reason=f"there is no {FOLDER / name}")
