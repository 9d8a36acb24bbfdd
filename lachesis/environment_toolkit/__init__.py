"""Give authors what they write environments with; they import it from `lachesis.environment`."""
