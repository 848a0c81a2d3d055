"""What travels over which process group while a real Megatron training updates its engines."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from awex_delta.engines.fused import FusedEngine, FusedRank
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Rendezvous, host_store
from awex_delta.protocol.sender import Sender
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec, build_trainer, hf_config
from awex_delta.trainers.megatron import MegatronTrainer
from benchmarks.collectives import CountTraffic

pytestmark = pytest.mark.timeout(120)

SPEC = TinySpec(model="qwen3-moe", lr=3e-6)
SETTINGS = DeltaSettings(anchor_interval=2, timeout_seconds=30, connect_timeout_seconds=60)
NUM_VERSIONS = 5
NUM_ENGINES = 2


def work(me: Rank) -> list[tuple[str, dict[str, int]]]:
    """By version, the kind of the update and the bytes that this rank handed to each group of the training.

    What is known comes first.
    """
    port = me.folder / "port"
    store = None
    if me.rank == NUM_ENGINES:
        store = host_store()
        (me.folder / "port.tmp").write_text(str(store.port))
        (me.folder / "port.tmp").rename(port)
    while not port.exists():
        time.sleep(0.05)
    rendezvous = Rendezvous(num_engine_ranks=NUM_ENGINES, num_trainer_ranks=2, port=int(port.read_text()))
    seen: list[tuple[str, dict[str, int]]] = []
    if me.rank < NUM_ENGINES:
        engine = FusedEngine(hf_config(SPEC), FusedRank(tp_rank=me.rank, tp_size=NUM_ENGINES))
        receiver = Receiver(engine, rendezvous, me.rank, "engine", SETTINGS)
        for version in range(NUM_VERSIONS):
            receiver.update_weights(version)
        return seen
    rank = me.rank - NUM_ENGINES
    me.init_gloo(rank=rank, world_size=2)
    tiny = build_trainer(SPEC)
    view = MegatronTrainer.attach(tiny.chunks, tiny.optimizer, tiny.hf_config, settings=SETTINGS)
    sender = Sender(view, rendezvous, rank, SETTINGS)
    sender.connect()
    with CountTraffic() as traffic:
        dist.all_reduce(torch.ones(4, dtype=torch.float32))
    seen.append(("all-reduce", dict(traffic.num_bytes)))
    for version in range(NUM_VERSIONS):
        tiny.train_step()
        with CountTraffic() as traffic:
            stats = sender.update_weights(version)
        seen.append((stats.verdict.kind.value, dict(traffic.num_bytes)))
    del store
    return seen


def test_a_delta_needs_no_collective_among_the_trainers() -> None:
    outcome = run_ranks(work, 4)
    for trainer in outcome[NUM_ENGINES:]:
        assert [kind for kind, _ in trainer] == ["all-reduce", "full", "delta", "delta", "full", "delta"]
        assert sum(trainer[0][1].values()) == 16, "nothing is counted"
        assert [num_bytes for kind, num_bytes in trainer if kind == "delta"] == [{}] * 3
