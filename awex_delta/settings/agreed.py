"""What both sides of one pairing agree on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSettings:
    """What both sides of one pairing must agree on, and the timeouts. Made by `config`.

    enabled: False means every sync is a full one and no optimizer hook is installed.
    anchor_interval: committed deltas between two full syncs; 0 means never.
    encoding: name of the delta encoding (`wire.registry`), or "auto".
    verify: what a delta compares by digests before it commits: "off", "touched" or "full".
    verify_interval: versions that this divides compare everything; 0 means none does for that reason.
    bucket_bytes: the most bytes of a frame; longer ones are cut. Two of them are what packing, travelling
        and unpacking take together.
    allow_any_world_size: pad the schedule instead of refusing a world that is no power of two.
    method: how a trainer rank finds changes: "adamw" inverts optimizer steps, "snapshot" compares with a
        bf16 copy of the owned elements.
    accumulate: follow every optimizer step, so that a delta covers any number of them, for one byte an
        owned element.
    release_grad_buffers: free Megatron's gradient buffers for the transfer (restored whatever happens).
    timeout_seconds: longest wait for a peer inside an update.
    connect_timeout_seconds: longest wait for all ranks to meet in `connect`.
    transport: "p2p" between the ranks, or "disk" through a folder.
    disk_url: that folder, as an fsspec URL; empty with "p2p".
    disk_kind: "delta", or "full" for a whole checkpoint at every version.
    keep_anchors: full versions that stay in the folder, with every delta since the oldest of them.
    read_workers: files and parts of files that one engine rank reads at once.
    """

    enabled: bool = True
    anchor_interval: int = 20
    encoding: str = "indices"
    verify: str = "touched"
    verify_interval: int = 0
    bucket_bytes: int = 64 << 20
    allow_any_world_size: bool = False
    method: str = "adamw"
    accumulate: bool = False
    release_grad_buffers: bool = False
    timeout_seconds: float = 300.0
    connect_timeout_seconds: float = 300.0
    transport: str = "p2p"
    disk_url: str = ""
    disk_kind: str = "delta"
    keep_anchors: int = 2
    read_workers: int = 4
