"""The HTTP control plane: connect, update and disconnect pairs of one trainer and its engines.

`trainer_router` and `engine_router` give routers that a trainer's and an engine's process mount in an app of
their own; `create_app` gives the gateway, which drives them (`awex-delta gateway`). Names are loaded when
they are first used, so that the gateway itself loads no training framework.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from awex_delta.gateway.app import create_app
    from awex_delta.gateway.router import engine_router, trainer_router
    from awex_delta.gateway.token import read_token

for _package in ("fastapi", "httpx", "prometheus_client", "uvicorn"):
    if find_spec(_package) is None:
        raise ModuleNotFoundError(
            f"awex_delta.gateway needs the package {_package!r}: pip install 'awex-delta[gateway]'",
            name=_package,
        )

_HOME_OF = {"create_app": "app", "engine_router": "router", "read_token": "token", "trainer_router": "router"}

__all__ = ["create_app", "engine_router", "read_token", "trainer_router"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
