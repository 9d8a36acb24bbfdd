"""Find environments and read their descriptions, without running them here."""
