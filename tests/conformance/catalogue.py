"""All cases, in the order of the tables."""

from __future__ import annotations

from conformance import cases_bodies, cases_clients, cases_faults, cases_http, cases_queue, cases_slai, cases_sse
from conformance.suite import CASES, Case

_MODULES = (cases_sse, cases_http, cases_bodies, cases_clients, cases_faults, cases_queue, cases_slai)
_AREAS = [module.AREA for module in _MODULES]


def all_cases() -> list[Case]:
    return sorted(CASES, key=lambda case: _AREAS.index(case.area))
