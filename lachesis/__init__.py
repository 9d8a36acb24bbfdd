"""Lachesis: reinforcement-learning runs of language models, for people and agents."""

__version__ = "0.1.0"
