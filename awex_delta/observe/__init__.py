"""What updates did: the log of a run, its report, and comparisons of weights."""
