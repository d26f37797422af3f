"""Connect each rank to rank 0, in addition to the process group, to report how a rank ends.

        rank 1 ---+
        rank 2 ---+--- rank 0       rank 0 forwards the messages of one rank to the others
        rank 3 ---+

If a process ends, the system closes its connection, so rank 0 detects a killed rank. If a machine goes down, its system
stops answering keep-alive packets. torch's store does not report a client that ended. See Note [How ranks wait] in
`failure`.
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
"""Longest time, in seconds, for a rank to connect to rank 0."""

_TRY_S = 3.0
"""Longest time, in seconds, for a rank to connect to one of rank 0's addresses."""

_SILENT_AFTER_S, _SIGN_EVERY_S, _SIGNS = 6, 3, 3
"""A machine counts as down if its system has not answered for 6 + 3 * 3 = 15 s."""

_CAUSE_LENGTH = 1000
_PIECE_BYTES = 65536
_RANK_BYTES = 4

_GREETING_S = 1.0
"""Longest time, in seconds, for a new connection to send the token. Rank 0 reads no messages meanwhile."""


@dataclass(frozen=True)
class Word:
    """A message from another rank.

    Attributes:
        kind: A rank sends "failed", "interrupted" (Ctrl-C) or "left" before it ends, "missing" if it does not join a
            collective, and "sign" to show that it is alive. Rank 0 creates "joined" for a new rank and "lost" if a
            connection ended without a message. "over" ends the rank's own thread.
        cause: The cause of a failure, or of leaving, on one line. For "missing", the collective's number.
    """

    kind: Literal["joined", "failed", "interrupted", "left", "lost", "missing", "sign", "over"]
    rank: int
    cause: str = ""


@dataclass(frozen=True)
class Address:
    """The address at which rank 0 listens.

    Attributes:
        token: Proves that both ends belong to one job.
    """

    hosts: tuple[str, ...]
    port: int
    token: str


class Line:
    """One rank's end of the connections.

    One thread listens (`words`, `send`, `close`). Other threads pass messages to that thread with `say`.
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
        """Listen for the other ranks, on rank 0. Return the address."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
        token = secrets.token_hex(16)
        self._token = token.encode()
        return Address(_hosts_here(), self._listener.getsockname()[1], token)

    def join(self, address: Address) -> None:
        """Connect another rank to rank 0, whose thread must be listening."""
        self._token = address.token.encode()
        until = time.monotonic() + JOIN_S
        reasons = []
        for host in address.hosts:
            if (left_s := until - time.monotonic()) <= 0:
                break
            try:
                self._peers[0] = _Peer(0, self._greeted(host, address.port, min(_TRY_S, left_s)))
            except (OSError, ValueError) as error:
                reasons.append(f"{host}: {error}")
            else:
                return
        raise OSError(f"rank 0 listens on port {address.port}, but the connection failed; {'; '.join(reasons)}")

    def _greeted(self, host: str, port: int, limit_s: float) -> socket.socket:
        """Connect, and check the token. The port may belong to another program on this machine."""
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
        """Send a message to the listening thread of this rank."""
        with contextlib.suppress(OSError):  # closed
            self._mouth.sendall(_line_of(word))

    def words(self, wait_s: float) -> list[Word]:
        """Wait up to `wait_s` seconds for messages, including this rank's own. Return [] if none arrives."""
        until = time.monotonic() + wait_s
        found: list[Word] = []
        while not found and (left_s := until - time.monotonic()) >= 0:
            by_end = {peer.socket: peer for peer in (self._own, *self._peers.values())}
            listeners = [] if self._listener is None else [self._listener]
            ready = wait([*by_end, *listeners], left_s)
            # Return a new rank first. The caller sends the failures so far to it, before the messages that follow.
            if any(one not in by_end for one in ready) and (joined := self._introduced()):
                return joined
            found += [word for one in ready if one in by_end for word in self._heard_from(by_end[one])]
        return found

    def silent_since(self) -> dict[int, float]:
        """Return the `time.monotonic()` of the last message of each connected rank."""
        return {peer.rank: peer.heard_s for peer in self._peers.values() if not peer.parted}

    def send(self, word: Word, *, only: int | None = None, but: Collection[int] = ()) -> None:
        """Send a message to one rank (`only`), or to all connected ranks except its sender and `but`."""
        for peer in list(self._peers.values()):
            if only in (None, peer.rank) and peer.rank not in (word.rank, *but):
                with contextlib.suppress(OSError):  # `words` reports a closed connection
                    peer.socket.sendall(_line_of(word))

    def close(self) -> None:
        """Close all connections."""
        _OPEN.discard(self)
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_WR)  # let the other end read the messages that were sent
        self.drop()

    def drop(self) -> None:
        """Close the sockets in this process only. The parent of a forked process keeps the connections."""
        for end in (self._own.socket, self._mouth, self._listener, *(peer.socket for peer in self._peers.values())):
            if end is not None:
                end.close()
        self._peers = {}

    def _introduced(self) -> list[Word]:
        assert self._listener is not None, "its socket was ready"
        try:
            made, _ = self._listener.accept()
        except OSError:  # for example too many open files. The listener stays ready, so do not retry at once
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
        except OSError:  # the other end sent nothing, or closed the connection
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
        self.parted = False  # whether it sent the reason before it left
        self._arrived = b""

    def read(self) -> tuple[list[Word], str | None]:
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
_UNREACHED = "its machine does not answer (the machine or the network may be down)"


def _line_of(word: Word) -> bytes:
    if len(word.cause) > _CAUSE_LENGTH:
        word = replace(word, cause=word.cause[:_CAUSE_LENGTH] + "...")
    return msgspec.json.encode(word) + b"\n"


def _received(end: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count and (piece := end.recv(count - len(found))):
        found += piece
    return found


def _keep_alive(end: socket.socket) -> None:
    """Let the system detect a machine that went down. Such a machine closes no connection."""
    end.settimeout(1.0)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _SILENT_AFTER_S),
        ("TCP_KEEPINTVL", _SIGN_EVERY_S),
        ("TCP_KEEPCNT", _SIGNS),
        ("TCP_USER_TIMEOUT", 1000 * (_SILENT_AFTER_S + _SIGN_EVERY_S * _SIGNS)),
    ):
        if hasattr(socket, name):  # not every system has all of them
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _hosts_here() -> tuple[str, ...]:
    """Return the addresses of this machine. Ranks on the same machine use the first."""
    found = ("127.0.0.1", os.environ.get("MASTER_ADDR", ""), socket.gethostname())
    return tuple(dict.fromkeys(filter(None, found)))


_OPEN: weakref.WeakSet[Line] = weakref.WeakSet()


def _drop_in_child() -> None:
    """Close the connections in forked DataLoader workers. Otherwise they would stay open if the rank is killed."""
    for line in list(_OPEN):
        line.drop()
    _OPEN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
