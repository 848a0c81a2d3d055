"""The bearer token: made, read from a file, compared."""

from __future__ import annotations

import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from awex_delta.errors import ConfigError
from awex_delta.settings.secret import check_text, read_file


def new_token() -> str:
    """A random token of 256 bits."""
    return secrets.token_urlsafe(32)


def check_token(token: str | None) -> None:
    """Refuse a token that is easily guessed, or that no header can carry; None asks for no token.

    Raises ConfigError, which does not show it, if it is short, or not printable ASCII without blanks.
    """
    if token is not None:
        check_text("token", token)


def read_token(path: str | Path, *, create: bool = False) -> str:
    """Read a token from a file that only its owner can read; blanks around it are ignored.

    With `create` a new random token is written if there is no file, with mode 0600; of several processes that
    do so at once, all read the same token. Raises ConfigError if the file is missing, can be read by others,
    or holds no good token.
    """
    path = Path(path)
    if create and not path.exists():
        try:
            _create(path)
        except OSError as error:
            raise ConfigError(
                f"token file {path}: {error.strerror}; give a path that can be written"
            ) from error
    return read_file("token", path)


def _create(path: Path) -> None:
    """Put a whole token at `path`, unless another process was faster: nobody ever reads half of one."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(new_token() + "\n")
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def matches(header: str | None, token: str) -> bool:
    """Whether an Authorization header carries the token. Takes as long for any wrong one."""
    scheme, _, given = (header or "").partition(" ")
    # As bytes: a text with characters beyond ASCII cannot be compared in constant time.
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
    return same and scheme.lower() == "bearer"
