"""Public fakes and helpers for tests: thread ranks, fault injection, Megatron on a CPU."""
