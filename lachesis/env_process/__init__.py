"""What runs inside the process of an environment."""
