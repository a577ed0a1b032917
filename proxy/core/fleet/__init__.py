"""One scheduler for a fleet of replicas: one of them leads and decides for all, the others pass on what happens.

``register``
    Who lives and who leads: what a store has to keep, and what it tells.
``letters``
    What replicas tell each other.
``member``
    One replica: a ``Scheduler`` to its shell, whoever decides.
"""

from proxy.core.fleet.letters import Letter
from proxy.core.fleet.member import FleetConfig, Member, Role
from proxy.core.fleet.register import Register, Standing

__all__ = ["FleetConfig", "Letter", "Member", "Register", "Role", "Standing"]
