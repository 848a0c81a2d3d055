"""Owned optimizer state to the elements that changed. Rank-local."""
