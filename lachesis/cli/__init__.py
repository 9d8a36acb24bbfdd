"""Read commands and print answers for a terminal."""
