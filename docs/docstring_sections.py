"""Extension of griffe for our docstrings: sections follow each other without blank lines."""

import re
from typing import Any

from griffe import Extension, Object

_SECTION = re.compile(r"(?<!\n)\n(?=(?:Args|Attributes|Returns|Yields|Raises|Source|Example):\n)")

_OPTIONS = re.compile(r"\n +options: .* above, as declared by `\w+`\.")

_PAGE = re.compile(r"docs/([\w/-]+)\.md")


class DocstringSections(Extension):
    """Writes the sections as griffe's parser of Google style reads them."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Adds blank lines before sections, names doctests as griffe does, and links pages.

        A signature has the options one by one, so the line that only names their type is left out.
        """
        if obj.docstring is not None:
            text = _SECTION.sub("\n\n", _OPTIONS.sub("", obj.docstring.value))
            text = text.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = _PAGE.sub(r"[\1](../\1.md)", text)
