"""The reference pages are the ones that the code makes, and tell of everything."""

import re

import pytest

from proxy.config import Settings
from proxy.configload import ENTRIES
from reference.pages import DOCS, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_the_one_that_the_code_makes(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run make reference"


def test_every_setting_is_told_with_what_it_is() -> None:
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    told = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    for name in [*Settings.model_fields, *(key for entry in ENTRIES.values() for key in entry.model_fields)]:
        assert re.search(r"\w{3,}[^|]*\|$", told[name]), f"{name} has no docstring"
