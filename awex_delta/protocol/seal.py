"""Who may take a seat: every rank proves to every other that it holds the secret of the pairing.

All ranks tell each other a fresh challenge. Then each tells HMAC-SHA256, under the secret, of all challenges,
its role, rank and seat, the number of ranks of either side, the epoch and the name of the pairing. All ranks
compute what the others have to say. So an answer that was recorded earlier, or is sent back, or belongs to
another seat, epoch or pairing, is a wrong one, and the secret itself is never told. From the same challenges
and the secret come the keys of the session, which seal all that ranks tell each other while the epoch lasts.
"""

from __future__ import annotations

import hmac
import secrets
import uuid
from collections.abc import Callable, Sequence

from awex_delta.errors import ConnectError
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.settings.secret import read_secret

Gather = Callable[..., list[bytes]]
"""`Comm.gather`."""

_PROOF_BYTES = 32  # of a challenge, and of a proof
_SEAL_BYTES = 16


class Seal:
    """What one rank proves, and seals, with the secret of its pairing. Without a secret it does neither.

    Attributes:
        frame_key: key of the checksums of frames; empty without a secret, or before all ranks have proved it.
    """

    def __init__(self, rendezvous: Rendezvous, seat: int, source: str) -> None:
        """Read the secret from `source`, a `weight_update_secret_source`. Raises ConfigError."""
        self._rendezvous = rendezvous
        self._seat = seat
        self._secret = read_secret(source)
        self._begin(-1)

    def meet(self, epoch: int, gather: Gather) -> None:
        """Wait for all ranks, and prove the secret to each other if they have one: it makes new keys.

        Args:
            epoch: the proofs count for no other one.
            gather: `Comm.gather`, in the new group.

        Raises:
            ConnectError: only some ranks have a secret, or some have another one; names their seats.
            PeerError: a rank did not arrive, or went away.

        Collective: yes, over all transfer ranks.
        """
        self._begin(epoch)
        if self._is_due(gather(self._word, width=8, phase="connect")):
            mine = self._challenge()
            challenges = gather(mine, width=_PROOF_BYTES + 4, phase="challenge")
            challenges[self._seat] = mine  # whatever came back: nothing is fresh but this
            self._accept(gather(self._proof(challenges), width=_PROOF_BYTES + 4, phase="prove"))

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._challenges: list[bytes] = []
        self._row_key = self.frame_key = b""
        self._count = 0

    @property
    def _word(self) -> bytes:
        """Whether this rank has a secret."""
        return b"" if self._secret is None else b"S"

    def _is_due(self, words: Sequence[bytes]) -> bool:
        """Whether all ranks have a secret, rather than none. Raises ConnectError, the same on all ranks."""
        without = [seat for seat, word in enumerate(words) if word != b"S"]
        if self._secret is None and len(without) == len(words):
            return False
        if without:
            raise ConnectError(
                f"without a secret: {self._rendezvous.name_seats(without)}; all other ranks have one. "
                "Remedy: give all ranks the same weight_update_secret_source, or none"
            )
        return True

    def ticket(self, seat: int, epoch: int, life: str) -> str:
        """What the store holds for a seat: a life of its rank, and a proof of it if there is a secret."""
        if self._secret is None:
            return life
        return f"{life} {_mac(self._secret, b'ticket', self._place(seat, epoch), life.encode()).hex()}"

    def new_ticket(self, epoch: int) -> str:
        """The ticket of a new life of this rank."""
        return self.ticket(self._seat, epoch, uuid.uuid4().hex)

    def is_ticket(self, seat: int, epoch: int, found: str | None) -> bool:
        """Whether what was found in the store at a seat's key was put there by a rank of this pairing."""
        if found is None:
            return False
        life = found.partition(" ")[0]
        return hmac.compare_digest(found.encode(), self.ticket(seat, epoch, life).encode())

    def _challenge(self) -> bytes:
        return secrets.token_bytes(_PROOF_BYTES)

    def _proof(self, challenges: Sequence[bytes]) -> bytes:
        self._challenges = list(challenges)
        return self._proof_of(self._seat)

    def _accept(self, proofs: Sequence[bytes]) -> None:
        """Take the proofs of all ranks, and make the keys of the session."""
        wrong = [s for s, proof in enumerate(proofs) if not hmac.compare_digest(proof, self._proof_of(s))]
        if wrong:
            me, others = self._rendezvous.place(self._seat), self._rendezvous.name_seats(wrong)
            alone = len(wrong) == len(proofs) - 1
            raise ConnectError(
                f"{me}: {others} did not prove the secret of weight_update_secret_source that this rank has; "
                "no layout was told, and no weight was touched"
                + (". No other rank proved it, so this rank's own may be the wrong one" if alone else "")
                + ". Remedy: give all ranks the same text"
            )
        session = self._of_all(b"session", 0)
        self._row_key, self.frame_key = _mac(session, b"rows"), _mac(session, b"frames")

    @property
    def num_bytes(self) -> int:
        """By how much `sealed` makes what ranks tell longer."""
        return _SEAL_BYTES if self._row_key else 0

    def sealed(self, row: bytes) -> bytes:
        """What this rank tells next, with its seal if there is a session. All ranks call it in step."""
        self._count += 1
        return row + self._seal_of(self._seat, row)

    def opened(self, seat: int, told: bytes) -> bytes | None:
        """What another rank told at the same step, without its seal; None if the seal is wrong."""
        row = told[: len(told) - self.num_bytes]
        right = hmac.compare_digest(told[len(row) :], self._seal_of(seat, row))
        return row if right else None

    def _seal_of(self, seat: int, row: bytes) -> bytes:
        if not self._row_key:
            return b""
        return _mac(self._row_key, b"%d, %d" % (seat, self._count), row)[:_SEAL_BYTES]

    def _proof_of(self, seat: int) -> bytes:
        return self._of_all(b"proof", seat)

    def _of_all(self, purpose: bytes, seat: int) -> bytes:
        """An HMAC of all challenges."""
        return _mac(self._secret or b"", purpose, self._place(seat, self._epoch), *self._challenges)

    def _place(self, seat: int, epoch: int) -> bytes:
        """Everything that says which seat this is, in what world."""
        world = self._rendezvous
        counts = f"{world.num_engine_ranks} engine ranks, {world.num_trainer_ranks} trainer ranks"
        return f"{world.place(seat)}, epoch {epoch}, {counts}, {world.name}".encode()


def _mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 of some parts, each behind its length, so that no two lists of parts are alike."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "little") + part for part in parts), "sha256")
