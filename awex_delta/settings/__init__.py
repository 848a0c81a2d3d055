"""What users write, and what both sides of a pairing mean by it."""
