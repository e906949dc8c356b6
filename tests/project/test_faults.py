"""Every test that docs/faults.md names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`(test_\w+)`", (ROOT / "docs/faults.md").read_text())


def test_every_named_test_exists():
    defined = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert len(NAMED) > 50
    assert [] == [name for name in NAMED if name not in defined]
