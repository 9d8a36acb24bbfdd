"""Record spent and promised money, and decide who may spend."""
