"""What an HTTP proxy in front of LLM engines has to get right on the wire, as cases that any proxy can be put through.

``python -m conformance --help`` tells how; README.md has the table of cases and of who passes them.
"""
