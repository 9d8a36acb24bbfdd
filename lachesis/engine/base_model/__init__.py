"""Load the frozen model, put adapters on it, and plan its memory."""
