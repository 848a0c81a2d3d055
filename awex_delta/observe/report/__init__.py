"""One self-contained page about a training's weight updates, made of its RUN.jsonl."""
