"""The agreements of an update, its two halves, and who holds which version."""
