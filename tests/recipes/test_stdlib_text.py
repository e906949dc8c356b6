"""The text that is on every machine: what Python says of its own library."""

import inspect
import subprocess
import sys
import textwrap

import pytest

from bigbatch_recipes.datasets.text import stdlib_text


@pytest.mark.thorough
def test_a_document_is_a_module_with_its_docstrings_in_the_order_of_the_source():
    own = (textwrap, textwrap.TextWrapper, textwrap.TextWrapper.fill, textwrap.wrap)
    said = [inspect.getdoc(one) for one in own]
    (document,) = (text for text in stdlib_text() if said[1] in text)
    assert said == sorted(said, key=document.index)


def test_the_chapters_of_help_are_documents():
    assert any(text.startswith("Truth Value Testing\n*****") for text in stdlib_text())
    assert 500 < len(stdlib_text())
    assert 1_500_000 < sum(map(len, stdlib_text()))


def test_no_document_is_empty_or_of_a_package_installed_later():
    assert all(text.strip() for text in stdlib_text())
    assert not any("pytest.fixture" in text for text in stdlib_text())


@pytest.mark.release
def test_another_process_reads_the_same_and_imports_none_of_it():
    code = (
        "import sys\n"
        "from bigbatch_recipes.datasets.text import stdlib_text\n"
        "before = set(sys.modules)\n"
        "texts = stdlib_text()\n"
        "assert before == set(sys.modules)\n"
        "sys.stdout.buffer.write(repr(texts).encode())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert printed == repr(stdlib_text()).encode()
