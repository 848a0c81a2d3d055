"""Do two sides hold the same bits? Checkpoints, and digests that engines write down, tensor by tensor."""
