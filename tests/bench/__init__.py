"""What the proxy costs: ``make bench``, or ``python -m bench overhead|memory|queue`` (docs/performance.md)."""
