"""What holds for all tests."""

import pytest

from proxy.core import is_compiled


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With the core compiled (make test-compiled), pass over what takes classes of Python."""
    reason = "extends or replaces parts of the core, as can be done to classes of Python alone"
    for item in items:
        if is_compiled() and item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.skip(reason))
