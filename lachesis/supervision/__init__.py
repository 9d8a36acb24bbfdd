"""Start, watch and end the services of a run."""
