"""Look at environments from outside: which there are, what they require, and what fields they
have.
"""
