"""Other ways for an update to travel than between the ranks of one group."""
