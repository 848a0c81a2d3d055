"""From Megatron parameters to HF tensors: proved once to move elements only."""
