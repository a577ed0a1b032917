"""A soak: many requests, a third of them broken off at any stage, while engines are killed and started again.

``python -m soak --help``; what must hold at the end is in ``check``.
"""
