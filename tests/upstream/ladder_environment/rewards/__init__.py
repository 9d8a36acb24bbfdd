from .slope import steepness

__all__ = ["steepness"]
