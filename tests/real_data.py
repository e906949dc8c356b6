"""Real data sets beside the repository, for the tests that read them where they are there."""

from pathlib import Path

import pytest

DATA = Path(__file__).parents[1].parent / "shared" / "data"


def needs(*names):
    """Marks a test that reads these folders."""
    missing = [str(DATA / name) for name in names if not (DATA / name).is_dir()]
    return pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not there")
