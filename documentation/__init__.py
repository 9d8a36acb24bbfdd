"""Write the pages of the documentation that are made from the code; see `__main__`."""
