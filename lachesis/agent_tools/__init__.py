"""Offer the `rl_*` tools to agents by MCP, HTTP and Hermes."""
