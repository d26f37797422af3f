"""A line between the ranks, beside their collectives, on which one can say how it ends: words, and who was cut off.

rank 1 ---+ rank 2 ---+--- rank 0    a star: what a rank says, rank 0 says on to the others rank 3 ---+

Where a process ends, its system closes the line, so that an end without a word is heard, too; where a machine ends, its
answers stay away. The rendezvous store would not do: nobody hears there of a process that is killed.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import socket
import time
import weakref
from collections.abc import Collection
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Literal

import msgspec

JOIN_S = 10.0
"""A rank looks for rank 0 for so long."""

_TRY_S = 3.0
"""Of that, one of its addresses may take so long."""

_SILENT_AFTER_S, _SIGN_EVERY_S, _SIGNS = 6, 3, 3
"""A machine is dead when it has not answered for 6 + 3 * 3 = 15 s. Its system answers, however busy a process is."""

_CAUSE_LENGTH = 1000
_PIECE_BYTES = 65536
_RANK_BYTES = 4

_GREETING_S = 1.0
"""Who connected has so long to show the token, which a rank sends at once: nobody is heard meanwhile."""


@dataclass(frozen=True)
class Word:
    """A message from another rank.

    Attributes:
        kind: "joined" (only rank 0 receives it); "failed", "interrupted" (Ctrl-C) and "left", which the rank sends;
            "lost", if its connection ended without one of these; "missing", if it does not come to a collective;
            "sign", that it is alive; "over", from this rank to its own thread.
        cause: The cause of a failure, or of leaving, on one line. For "missing", the collective's number.
    """

    kind: Literal["joined", "failed", "interrupted", "left", "lost", "missing", "sign", "over"]
    rank: int
    cause: str = ""


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens.

    Attributes:
        hosts: Its names and numbers, of which a machine may know some only.
        token: By which both sides know that they belong to one job.
    """

    hosts: tuple[str, ...]
    port: int
    token: str


class Line:
    """A rank's end of the line.

    One thread listens (`words`, `send`, `close`); any other may `say` something, which that thread gets to hear.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._token = b""
        self._listener: socket.socket | None = None
        self._peers: dict[int, _Peer] = {}
        heard, self._mouth = socket.socketpair()
        self._mouth.settimeout(1.0)
        self._own = _Peer(rank, heard)
        _OPEN.add(self)

    def listen(self) -> Address:
        """Open rank 0's end."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
        token = secrets.token_hex(16)
        self._token = token.encode()
        return Address(_hosts_here(), self._listener.getsockname()[1], token)

    def join(self, address: Address) -> None:
        """Connect another rank's end to rank 0's, whose thread has to be listening."""
        self._token = address.token.encode()
        until = time.monotonic() + JOIN_S
        reasons = []
        for host in address.hosts:
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            try:
                self._peers[0] = _Peer(0, self._greeted(host, address.port, min(_TRY_S, left_s)))
            except (OSError, ValueError) as error:
                reasons.append(f"{host}: {error}")
            else:
                return
        raise OSError(f"rank 0 listens on port {address.port} and was not reached; {'; '.join(reasons)}")

    def _greeted(self, host: str, port: int, limit_s: float) -> socket.socket:
        """Connect, and make sure that it is rank 0 who answers: on this machine the port may be anybody's."""
        made = socket.create_connection((host, port), timeout=limit_s)
        try:
            made.sendall(self._token + self.rank.to_bytes(_RANK_BYTES, "big"))
            if not hmac.compare_digest(_received(made, len(self._token)), self._token):
                raise ValueError("another program listens there")
            _keep_alive(made)
        except BaseException:
            made.close()
            raise
        return made

    def say(self, word: Word) -> None:
        """Let the listening thread hear this, from whichever thread."""
        with contextlib.suppress(OSError):  # closed: nobody hears
            self._mouth.sendall(_line_of(word))

    def words(self, wait_s: float) -> list[Word]:
        """Wait for words, this rank's own among them; return none after so many seconds without any."""
        until = time.monotonic() + wait_s
        found: list[Word] = []
        while not found and (left_s := until - time.monotonic()) >= 0:
            by_end = {peer.socket: peer for peer in (self._own, *self._peers.values())}
            listeners = [] if self._listener is None else [self._listener]
            ready = wait([*by_end, *listeners], left_s)
            # Who joins is told first of what was said before: of what is said now it hears as all others do, once.
            if any(one not in by_end for one in ready) and (joined := self._introduced()):
                return joined
            found += [word for one in ready if one in by_end for word in self._heard_from(by_end[one])]
        return found

    def silent_since(self) -> dict[int, float]:
        """Return when each rank at the other end was last heard, by `time.monotonic()`."""
        return {peer.rank: peer.heard_s for peer in self._peers.values() if not peer.parted}

    def forgive_silence(self) -> None:
        """Take all of them for heard now: this process could not have heard them."""
        for peer in self._peers.values():
            peer.heard_s = time.monotonic()

    def send(self, word: Word, *, only: int | None = None, but: Collection[int] = ()) -> None:
        """Send a word to everybody at the other end, or to one rank; who is gone does not hear it."""
        for peer in list(self._peers.values()):
            if only in (None, peer.rank) and peer.rank not in (word.rank, *but):
                with contextlib.suppress(OSError):  # its end shows when it is listened to
                    peer.socket.sendall(_line_of(word))

    def close(self) -> None:
        """Let go of all ends."""
        _OPEN.discard(self)
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_WR)  # what was sent arrives before the end
        self.drop()

    def drop(self) -> None:
        """Close the ends in this process, and leave them open in another that shares them."""
        for end in (self._own.socket, self._mouth, self._listener, *(peer.socket for peer in self._peers.values())):
            if end is not None:
                end.close()
        self._peers = {}

    def _introduced(self) -> list[Word]:
        """Accept a rank's connection; whoever does not show the token is no rank."""
        assert self._listener is not None, "its socket was ready"
        try:
            made, _ = self._listener.accept()
        except OSError:  # gone already, or this process may open no more: then it is ready again at once
            time.sleep(0.1)
            return []
        try:
            made.settimeout(_GREETING_S)
            greeting = _received(made, len(self._token) + _RANK_BYTES)
            token, rank = greeting[:-_RANK_BYTES], int.from_bytes(greeting[-_RANK_BYTES:], "big")
            if hmac.compare_digest(token, self._token):
                made.sendall(self._token)
                _keep_alive(made)
                self._peers[rank] = _Peer(rank, made)
                return [Word("joined", rank)]
        except OSError:  # it said nothing, or is gone
            pass
        made.close()
        return []

    def _heard_from(self, peer: _Peer) -> list[Word]:
        words, reason = peer.read()
        peer.parted |= any(word.rank == peer.rank and word.kind in ("left", "failed", "interrupted") for word in words)
        if reason is not None:
            self._peers.pop(peer.rank, None)
            peer.socket.close()
            if not peer.parted:
                words.append(Word("lost", peer.rank, reason))
        return words


class _Peer:
    """The other end of a connection, and the part of its next message that has arrived."""

    def __init__(self, rank: int, end: socket.socket) -> None:
        self.rank = rank
        self.socket = end
        self.heard_s = time.monotonic()
        self.parted = False  # it said why it would go
        self._arrived = b""

    def read(self) -> tuple[list[Word], str | None]:
        """Return the words that are whole, and how it ended, if it did."""
        try:
            piece = self.socket.recv(_PIECE_BYTES)
            reason = None if piece else _ENDED
        except OSError as error:
            piece = b""
            reason = _ENDED if error.errno == errno.ECONNRESET else f"{_UNREACHED} ({error.strerror})"
        self.heard_s = time.monotonic()
        *lines, self._arrived = (self._arrived + piece).split(b"\n")
        words: list[Word] = []
        try:
            words.extend(msgspec.json.decode(line, type=Word) for line in lines)
        except msgspec.MsgspecError:
            return words, "it sent a message that is not autosplit's (do all ranks run the same version of autosplit?)"
        return words, reason


_ENDED = "it ended without an error message (perhaps killed, or its machine ran out of memory)"
_UNREACHED = "its machine does not answer: did it, or the network, go down?"


def _line_of(word: Word) -> bytes:
    if len(word.cause) > _CAUSE_LENGTH:
        word = replace(word, cause=word.cause[:_CAUSE_LENGTH] + "...")
    return msgspec.json.encode(word) + b"\n"


def _received(end: socket.socket, count: int) -> bytes:
    """Receive so many bytes; fewer where the other end says no more."""
    found = b""
    while len(found) < count and (piece := end.recv(count - len(found))):
        found += piece
    return found


def _keep_alive(end: socket.socket) -> None:
    """Let the system find out where a machine at the other end is gone, which closes nothing."""
    end.settimeout(1.0)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _SILENT_AFTER_S),
        ("TCP_KEEPINTVL", _SIGN_EVERY_S),
        ("TCP_KEEPCNT", _SIGNS),
        ("TCP_USER_TIMEOUT", 1000 * (_SILENT_AFTER_S + _SIGN_EVERY_S * _SIGNS)),
    ):
        if hasattr(socket, name):  # not every system has each
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _hosts_here() -> tuple[str, ...]:
    """Return what this machine is called, the likeliest first; a rank beside this one finds it by the first."""
    found = ["127.0.0.1", os.environ.get("MASTER_ADDR", ""), socket.gethostname()]
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # documentation's: no host
        # Nothing is sent: the system tells by which of its addresses it would go out.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect((far, 9))
            found.append(str(asked.getsockname()[0]))
    return tuple(dict.fromkeys(host for host in found if host))


_OPEN: weakref.WeakSet[Line] = weakref.WeakSet()


def _drop_in_child() -> None:
    """Keep a loader's workers from holding the line of a rank that was killed."""
    for line in list(_OPEN):
        line.drop()
    _OPEN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
