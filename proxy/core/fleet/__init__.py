"""One scheduler for a fleet of replicas: one of them leads and decides for all, the others pass on what happens.

``register``
    Who lives and who leads: what a store has to keep, and what it tells.
``letters``
    What replicas tell each other.
``member``, ``config``
    One replica: a ``Scheduler`` to its shell, whoever decides.
``following``, ``leading``, ``line``, ``roll``
    What it does while another one decides, and while it decides for all.
``claiming``, ``judging``
    The same of the quotas of API keys.
"""

from proxy.core.fleet.config import FleetConfig, Role
from proxy.core.fleet.letters import Letter
from proxy.core.fleet.member import Member
from proxy.core.fleet.register import Register, Standing

__all__ = ["FleetConfig", "Letter", "Member", "Register", "Role", "Standing"]
