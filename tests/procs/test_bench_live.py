"""The benchmark in a live vLLM, on a tiny model: what it writes, and what must hold at any size."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from benchmarks.live import KEYS, run

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
]


@pytest.mark.all
def test_our_writes_make_no_tensor_of_full_size_and_vllms_sparse_loader_does() -> None:
    model = {"layers": 1, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 1024}
    record = run(model=model, lr=1e-6, repeats=2, timeout_seconds=280)
    assert record["reason"] == ""
    assert all(record[key] > 0 for key in KEYS)
    assert 0.005 < record["changed_share"] < 0.03
    assert record["largest_tensor_bytes"] == 2 * 128 * 1024
    assert record["vllm_sparse_largest_new_bytes"] >= record["largest_tensor_bytes"]
    # The positions that changed, at most: 8 bytes each, where few of the tensor's elements are named.
    assert record["apply_largest_new_bytes"] < record["largest_tensor_bytes"] / 4
    assert record["apply_operations"] > 0
    # In the whole update the writes are the smallest part.
    samples = record["samples"]
    for apply, pause, update in zip(samples["apply"], samples["pause"], samples["update"], strict=True):
        assert apply < pause < update
