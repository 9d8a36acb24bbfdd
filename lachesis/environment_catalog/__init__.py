"""Find environments and read what they are, without running them here."""
