"""Let today's Tinker SDK use an engine of others that speaks an older or a different protocol."""
