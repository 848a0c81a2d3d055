"""Pure tensor mathematics: tensors and records in, tensors and records out."""
