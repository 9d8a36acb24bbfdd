"""Hold what every other package may use: errors, files, processes, HTTP guards and numbers."""
