"""Every metric of the proxy: its name, unit and labels. Nothing else names one.

They are Prometheus' own instruments, a microsecond or two each per request; what is true of the scheduler at the time
is read when somebody asks. Per token an instrument would cost a fifth of relaying it, so gaps between tokens are
counted in plain lists (``pooled``). All of it is exposed at ``/metrics`` (``exposition``) and sent by OTLP
(``telemetry.otlp``) from the same registry.
"""

from proxy.telemetry.metrics.exposition import Snapshot, exposed
from proxy.telemetry.metrics.fleet import FleetCounts
from proxy.telemetry.metrics.names import OTHER
from proxy.telemetry.metrics.pooled import TbtHistogram
from proxy.telemetry.metrics.recorder import Metrics

__all__ = ["OTHER", "FleetCounts", "Metrics", "Snapshot", "TbtHistogram", "exposed"]
