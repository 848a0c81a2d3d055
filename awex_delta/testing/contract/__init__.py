"""Suites that tell whether an adapter of your own keeps to its interface, to be called from its tests."""
