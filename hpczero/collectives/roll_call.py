"""Who is missing, and in which call the others are: asked over messages when a wait gets long.

Every rank that waits answers, about ten times a second, whoever asks: "here, in such a call". A rank that does not answer
is computing, dead, or stopped outside of hpczero. The questions cost nothing while all is well: none are sent.
"""

from __future__ import annotations

import time
from typing import Any

from mpi4py import MPI

TAG = 0
ANSWER_S = 1.0
"""How long an asker listens; a waiting rank looks for questions ten times a second."""
_QUESTION, _ANSWER = b"?", b"!"
_LONGEST = 512


class RollCall:
    """Questions and answers over `world`, the private communicator of a topology; tag 0 belongs to them."""

    def __init__(self, world: MPI.Intracomm):
        self._world = world
        self._asked = 0
        self._here: dict[int, str] = {}
        self._sent: list[tuple[Any, bytes]] = []      # MPI reads the bytes until the request is complete

    def ask(self, what: str) -> dict[int, str]:
        """The ranks that wait, this one included, and the call each is in. `what` is this rank's own."""
        world = self._world
        self._asked += 1
        self._here = {world.rank: what}
        for other in range(world.size):
            if other != world.rank:
                self._send(other, _QUESTION, "")
        end = time.monotonic() + ANSWER_S
        while len(self._here) < world.size and time.monotonic() < end:
            self.attend(what)
            time.sleep(0.001)
        return dict(sorted(self._here.items()))

    def attend(self, what: str) -> None:
        """Answers those who ask, and takes in answers. Called while waiting in `what`."""
        status = MPI.Status()
        while self._world.Iprobe(MPI.ANY_SOURCE, TAG, status):
            message = bytearray(status.Get_count(MPI.BYTE))
            self._world.Recv([message, MPI.BYTE], status.source, TAG)
            number, text = message[1:].decode(errors="replace").split(" ", 1)
            if message[:1] == _QUESTION:
                self._send(status.source, _ANSWER, what, number)
            elif int(number) == self._asked:
                self._here[status.source] = text
        self._sent = [(request, data) for request, data in self._sent if not request.Test()]

    def _send(self, rank: int, kind: bytes, text: str, number: str | None = None) -> None:
        data = kind + f"{self._asked if number is None else number} {text}".encode()[:_LONGEST]
        self._sent.append((self._world.Isend([data, MPI.BYTE], rank, TAG), data))
