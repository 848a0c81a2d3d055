"""Numbering of elements: spaces, maps between them, and the memory behind them. Pure."""
