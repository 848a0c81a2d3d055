"""Counts by layer and kind add up to what the update says it changed, over real ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from tests.pairing import Pairing
from tests.ranks.conftest import SHAPES, train, truth


def test_counts_add_up_to_the_update_and_bound_the_true_changes(make: Callable[..., Pairing]) -> None:
    pairing = make()
    pairing.commit(1)
    assert all(sender.changed_by == () for sender in pairing.senders)
    before = {name: weight.clone() for name, weight in truth(pairing).items()}
    train(pairing)
    stats = pairing.commit(2)[-1]
    changed: Counter[str] = Counter()
    owned: Counter[str] = Counter()
    for sender in pairing.senders:
        for part in sender.changed_by:
            changed[part.kind] += part.changed
            owned[part.kind] += part.owned
    assert (changed.total(), owned.total()) == (stats.total_changed, stats.total_owned)
    kinds = {
        "model.embed_tokens": 16 * 8,
        "self_attn.q_proj": 12 * 8,
        "mlp.down_proj": 8 * 24,
        "model.norm": 8,
    }
    assert owned == kinds
    for (name, weight), kind in zip(truth(pairing).items(), kinds, strict=True):
        true = int((weight.view(torch.int16) != before[name].view(torch.int16)).sum())
        assert true <= changed[kind] <= true + 3, name
    assert len(SHAPES) == len(kinds)
    assert {part.layer for part in pairing.senders[0].changed_by} == {None, 0}
