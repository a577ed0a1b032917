"""The reference pages of docs/, made from the code that they are about.

make reference         # writes docs/configuration.md and docs/metrics.md; without changes here, without changes there
"""
