"""What is shown of a run: its status, its results and its report."""
