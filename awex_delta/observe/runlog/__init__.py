"""RUN.jsonl: what every update of a training did, one line each."""
