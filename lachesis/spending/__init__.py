"""Know what was spent and promised, and who may spend."""
