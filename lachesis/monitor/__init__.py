"""Judge runs from outside: does it move, does it learn, what helps."""
