"""Give all packages what knows nothing of runs: errors, files, HTTP, processes, text."""
