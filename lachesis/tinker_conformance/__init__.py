"""Find out by named probes what a Tinker server means."""
