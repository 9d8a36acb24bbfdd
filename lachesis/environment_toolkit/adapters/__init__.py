"""Adapt environments of other libraries."""
