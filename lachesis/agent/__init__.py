"""The tools for agents, over MCP, HTTP and Hermes."""
