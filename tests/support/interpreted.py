"""For tests that extend or replace parts of the core, which can be done to classes of Python alone."""

import pytest

from proxy.core import is_compiled

interpreted = pytest.mark.skipif(is_compiled(), reason="extends or replaces parts of the core, which is compiled")
