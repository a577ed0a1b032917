"""The pure core, which takes every decision.

A map:

``scheduler``, ``ledger``, ``config``, ``events``, ``actions``, ``request``
    What happens and what is done about it: one synchronous function over one state.
``queue``, ``lane``, ``ordering``, ``fairness``, ``occupancy``
    Who is next: between tenants and classes, and inside a share.
``entrance``, ``overload``, ``outflow``, ``holdings``, ``backoff``
    Who may wait at all, and when to come back.
``membership``
    Which engines there are.
``admission``, ``placement``, ``release``, ``tbt``, ``rad``, ``policies``
    When an engine gets a whole prompt, and which.
``slicing``, ``tiles``, ``hitrate``
    When it gets a piece of one.
``engine``, ``stepclock``, ``limits``, ``steplog``, ``feedback``, ``forecast``, ``stepmodel``
    What is believed of an engine: its clock, its steps, how far away it is.
``growth``, ``selfreport``, ``prefix``, ``promptsize``
    What is believed of its memory, and of prompts.
``stepplan``
    What a step is to hold, for a scheduler inside an engine.
``leaving``, ``fleet``
    How requests go, also into another replica's hands; one scheduler for several replicas.
``snapshot``, ``reasons``, ``codec``, ``recording``
    To look at all that, and to write it down.
"""

from importlib.util import find_spec


def is_compiled() -> bool:
    """Whether it is machine code that runs, as ``hatch_build`` makes it, and not what these files say as they are."""
    spec = find_spec("proxy.core.scheduler")
    return spec is not None and not str(spec.origin).endswith(".py")
