"""Judge runs from outside: whether they move and learn; act by their limits."""
