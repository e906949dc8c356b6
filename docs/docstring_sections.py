"""Extension of griffe for our docstrings: sections follow each other without blank lines."""

import re
from typing import Any

from griffe import Extension, Object

_SECTION = re.compile(r"(?<!\n)\n(?=(?:Args|Attributes|Returns|Yields|Raises|Source|Example):\n)")


class DocstringSections(Extension):
    """Writes the sections as griffe's parser of Google style reads them."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Adds a blank line before each section, and makes doctests a section of examples."""
        if obj.docstring is not None:
            text = _SECTION.sub("\n\n", obj.docstring.value)
            obj.docstring.value = text.replace("\nExample:\n", "\nExamples:\n")
