"""What `model.external_lib` names on a CPU: our engines, for that platform too."""

from __future__ import annotations

from awex_delta.integrations.verl.engines import register

register(device="cpu", vendor=None)
