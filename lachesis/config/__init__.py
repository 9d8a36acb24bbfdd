"""Define the configuration of a run: its fields, profiles, edits and prices."""
