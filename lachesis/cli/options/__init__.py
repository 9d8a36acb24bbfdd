"""Declare the arguments of every command; nothing here loads what a command does."""
