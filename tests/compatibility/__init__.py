"""Homes that earlier versions made, and how a test gets one."""
