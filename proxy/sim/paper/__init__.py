"""The SLAI paper's evaluation anew: its set-up simulated, its definitions beside correct ones, figures and a page."""
