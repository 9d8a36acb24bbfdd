"""Offer the `rl_*` tools to agents over MCP, HTTP and Hermes."""
