"""Provide the toolkit for authors of environments, who import it from `lachesis.environment`."""
