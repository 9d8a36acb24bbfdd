"""Run the commands, a module for each noun; `lachesis.cli.main` loads them by name."""
