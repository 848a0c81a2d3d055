"""Suites that tell whether an adapter of your own keeps to its interface, to be called from its tests."""


class ContractBroken(AssertionError):
    """A view broke its contract. Says which update, and what differs."""
