"""What the proxy costs: ``make bench``, or ``python -m bench --help`` (docs/performance.md)."""
