"""Judge runs from outside: whether they move, whether they learn, and what helps."""
