"""The command `lachesis`."""
