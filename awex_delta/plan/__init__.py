"""Who sends what to whom, and in which order: pure functions and records, no communication."""
