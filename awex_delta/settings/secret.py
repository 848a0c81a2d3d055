"""Secrets: read from a file that only its owner can read, or from the environment, and never shown.

Tokens of the gateway keep to the same rules.
"""

from __future__ import annotations

from pathlib import Path

from awex_delta.errors import ConfigError
from awex_delta.settings.environment import variable

MIN_CHARS = 16
_MAX_FILE_CHARS = 4096


def check_text(kind: str, text: str) -> None:
    """Refuse a secret that is easily guessed, or that is no plain text. `kind` says what it is, in errors.

    Raises ConfigError, which does not show it, if it is short, or not printable ASCII without blanks.
    """
    plain = text.isascii() and text.isprintable() and " " not in text
    if len(text) < MIN_CHARS or not plain:
        raise ConfigError(
            f"{kind} of {len(text)} characters: give at least {MIN_CHARS}, printable ASCII without blanks"
        )


def read_file(kind: str, path: Path) -> str:
    """Read a secret from a file that only its owner can read; blanks around it are ignored.

    Raises ConfigError if the file is missing, can be read by others, or holds no good secret.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{kind} file {path} can be read by others. Remedy: chmod 600 {path}")
        with path.open(encoding="utf-8") as file:  # some files, such as devices, never end
            text = file.read(_MAX_FILE_CHARS).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{kind} file {path} cannot be read: {type(error).__name__}. Remedy: name a file of text that "
            "only its owner can read"
        ) from error
    check_text(kind, text)
    return text


def read_secret(source: str) -> bytes | None:
    """The secret of a `weight_update_secret_source`: `file:PATH`, or `env:NAME`; None without a source.

    Raises ConfigError, which does not show the secret, if there is none, or a bad one.
    """
    if not source:
        return None
    form, _, where = source.partition(":")
    if form == "file":
        return read_file("secret", Path(where)).encode()
    text = variable(where)
    if text is None:
        raise ConfigError(
            f"weight_update_secret_source = {source!r}: this process has no variable {where}. Remedy: set it "
            "for every rank, or write file:PATH"
        )
    check_text(f"secret in the variable {where}", text.strip())
    return text.strip().encode()
