"""Lachesis: reinforcement-learning runs of language models, for people and agents."""

__version__ = "0.2.0.dev0"
