"""A fleet of real replicas at a real Redis server, and what can go wrong with it: ``python -m fleet --help``."""
