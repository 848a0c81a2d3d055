"""The benchmark of relocation proofs, on a small model."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import prove


def test_the_record_counts_the_parameters_of_the_rank() -> None:
    threads = torch.get_num_threads()
    record = json.loads(json.dumps(prove.run(layers=2, experts=3, hidden=64, vocab_size=320)))
    per_layer = 64 * 4096 + 64 + 5120 * 64 + 128 + 128 + 64 + 24 * 64 + 3 * (1536 * 64 + 64 * 768)
    assert record["elements"] == 2 * 320 * 64 + 64 + 2 * per_layer
    assert record["parameters"] == 3 + 2 * (7 + 2 * 3)
    assert record["kinds"] == 3 + 7 + 2
    assert record["seconds"] > 0
    assert record["peak_bytes"] < 64 << 20
    assert record["threads"] == 1
    assert torch.get_num_threads() == threads


def test_a_parameter_that_is_not_proved_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = prove.Rank.convert

    def scaled(self: prove.Rank, key: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [(name, out * 2 if "layers.1." in name else out) for name, out in plain(self, key, tensor)]

    monkeypatch.setattr(prove.Rank, "convert", scaled)
    with pytest.raises(RuntimeError, match=r"13 parameters were not proved, such as decoder\.layers\.1\."):
        prove.run(layers=2, experts=3, hidden=64, vocab_size=320)
