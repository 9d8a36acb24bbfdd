"""A rehearsal of the Tinker cloud on this machine: real models' names, prices and misfortunes."""
