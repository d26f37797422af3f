"""A line between the ranks, beside their collectives, on which one can say how it ends: words, and who was cut off.

rank 1 ---+
rank 2 ---+--- rank 0    a star: what a rank says, rank 0 says on to the others
rank 3 ---+

Where a process ends, its system closes the line, so that an end without a word is heard, too. Where a machine ends, the
answers stay away that its system gives.

The rendezvous store would not do: nobody hears of a process that is killed there, and by hand it dies with rank 0.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import queue
import secrets
import selectors
import socket
import time
import weakref
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

__all__ = ["Address", "Line", "Word"]

JOIN_S = 10.0
"""A rank looks for rank 0 for so long."""

_TRY_S = 3.0
"""Of that, one of its addresses may take so long."""

_SILENT_AFTER_S, _SIGN_EVERY_S, _SIGNS = 6, 3, 3
"""A machine is dead when it has not answered for 6 + 3 * 3 = 15 s. Its system answers, however busy a process is."""

_CAUSE_LENGTH = 1000
_PIECE_BYTES = 65536

_GREETING_BYTES = 4096
"""Whoever says more before it has shown the token is no rank."""

_WORD_BYTES = 16384
"""No word is longer: JSON has up to 12 bytes for a character of the cause."""

_STRANGER_S = 5.0
"""Who connected has so long to show the token; a rank gives up before that."""

_STRANGERS = 64
"""At least so many may be about to show it at once."""

_BACK_OFF_S = 0.2
"""After a connection that could not be accepted, which the system goes on to offer."""


@dataclass(frozen=True)
class Word:
    """A message from another rank.

    Attributes:
        kind: "joined", which only rank 0 hears; "failed" and "left", as the rank said; "lost", where it said nothing;
            "missing", that it does not come to collectives in which the others wait; "sign", that it is alive; "over",
            from this rank to its own thread.
        rank: Of whom.
        cause: Of a failure or of leaving, on one line; of what is missed, its number.
    """

    kind: Literal["joined", "failed", "left", "lost", "missing", "sign", "over"]
    rank: int
    cause: str = ""


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens.

    Attributes:
        hosts: Its names and numbers, of which a machine may know some only.
        port: The same for all of them.
        token: By which both sides know that they belong to one job.
    """

    hosts: tuple[str, ...]
    port: int
    token: str


class Line:
    """A rank's end of the line.

    One thread listens (`words`, `send`, `close`); any other may `say` something, which that thread gets to hear.

    Args:
        rank: Of this process.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._token = ""
        self._listener: socket.socket | None = None
        self._peers: dict[int, _Peer] = {}
        self._strangers: list[_Peer] = []  # the oldest first
        self._strangers_at_once = _STRANGERS
        self._accepts_from = 0.0
        self._said: queue.SimpleQueue[Word] = queue.SimpleQueue()
        self._bell, self._rings = socket.socketpair()
        self._rings.setblocking(False)
        self._bell.setblocking(False)
        _OPEN.add(self)

    def listen(self, world_size: int = 1) -> Address:
        """Open rank 0's end.

        Args:
            world_size: How many ranks may come at once.

        Raises:
            OSError: No port can be had.
        """
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
        self._listener.setblocking(False)
        self._strangers_at_once = max(_STRANGERS, 2 * world_size)
        self._token = secrets.token_hex(16)
        return Address(_hosts_here(), self._listener.getsockname()[1], self._token)

    def join(self, address: Address) -> None:
        """Connect another rank's end to rank 0's, whose thread has to be listening.

        Raises:
            OSError: It was not found at any of its addresses.
        """
        self._token = address.token
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
        until = time.monotonic() + limit_s
        try:
            made.sendall(_line_of(token=self._token, rank=self.rank))
            answer = bytearray()
            while not answer.endswith(b"\n") and len(answer) < _GREETING_BYTES:
                made.settimeout(max(until - time.monotonic(), 0.001))  # for all of it, and not for each piece
                piece = made.recv(1)  # no more than the answer: what follows is for `words`
                if not piece:
                    break
                answer += piece
            if not _is_token(_parsed(bytes(answer)), self._token):
                raise ValueError("another program listens there")
        except BaseException:
            made.close()
            raise
        _keep_alive(made)
        return made

    def say(self, word: Word) -> None:
        """Let the listening thread hear this, from whichever thread."""
        self._said.put(word)
        with contextlib.suppress(OSError):  # full of rings, or closed: it hears, or nobody does
            self._rings.send(b"!")

    def words(self, wait_s: float) -> list[Word]:
        """Wait for words, this rank's own among them; return none after so many seconds without any."""
        until = time.monotonic() + wait_s
        while True:
            found: list[Word] = []
            self._let_go_of_strangers()
            for ready in self._ready(until):
                if ready is self._bell:
                    found += self._own_words()
                elif ready is self._listener:
                    self._accept()
                elif (stranger := _of_socket(self._strangers, ready)) is not None:
                    found += self._introduced(stranger)
                elif (peer := _of_socket(self._peers.values(), ready)) is not None:
                    found += self._heard_from(peer)
            if found or time.monotonic() >= until:
                return found

    def silent_since(self) -> dict[int, float]:
        """Return when each rank at the other end was last heard, by `time.monotonic()`."""
        return {peer.rank: peer.heard_s for peer in self._peers.values() if not peer.parted}

    def forgive_silence(self) -> None:
        """Take all of them for heard now: this process could not have heard them."""
        for peer in self._peers.values():
            peer.heard_s = time.monotonic()

    def _ready(self, until: float) -> list[object]:
        # Made anew each time, which is seldom: nothing that a forked process could share and change is kept.
        with getattr(selectors, "PollSelector", selectors.DefaultSelector)() as selector:
            ends = [peer.socket for peer in (*self._peers.values(), *self._strangers)]
            now = time.monotonic()
            wait_s = [until - now, *(stranger.since_s + _STRANGER_S - now for stranger in self._strangers[:1])]
            backs_off_s = self._accepts_from - now
            if self._listener is not None and backs_off_s > 0:
                wait_s.append(backs_off_s)
            elif self._listener is not None:
                ends.append(self._listener)  # last: who can be introduced need not make room
            for end in (self._bell, *ends):
                selector.register(end, selectors.EVENT_READ)
            return [key.fileobj for key, _ in selector.select(max(min(wait_s), 0))]

    def send(self, word: Word, *, only: int | None = None, but: Collection[int] = ()) -> None:
        """Send a word to everybody at the other end, or to one rank; who is gone does not hear it."""
        for peer in list(self._peers.values()):
            if only in (None, peer.rank) and peer.rank not in (word.rank, *but):
                with contextlib.suppress(OSError):  # its end shows when it is listened to
                    peer.socket.sendall(_line_of(**asdict(word)))

    def close(self) -> None:
        """Let go of all ends."""
        _OPEN.discard(self)
        for peer in (*self._peers.values(), *self._strangers):
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_WR)  # what was sent arrives before the end
        self.drop()

    def drop(self) -> None:
        """Close the ends in this process, and leave them open in another that shares them."""
        for peer in (*self._peers.values(), *self._strangers):
            peer.socket.close()
        for own in (self._bell, self._rings, self._listener):
            if own is not None:
                own.close()
        self._peers, self._strangers = {}, []

    def _own_words(self) -> list[Word]:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(_PIECE_BYTES)
        found = []
        while not self._said.empty():
            found.append(self._said.get())
        return found

    def _accept(self) -> None:
        assert self._listener is not None, "its socket was ready"
        try:
            made, _ = self._listener.accept()
        except OSError:  # gone already, or this process may open no more: then it is ready again at once
            self._accepts_from = time.monotonic() + _BACK_OFF_S
            return
        try:
            _keep_alive(made)
        except OSError:  # gone already
            made.close()
            return
        if len(self._strangers) >= self._strangers_at_once:
            self._strangers.pop(0).socket.close()
        self._strangers.append(_Peer(-1, made))

    def _let_go_of_strangers(self) -> None:
        now = time.monotonic()
        while self._strangers and now >= self._strangers[0].since_s + _STRANGER_S:
            self._strangers.pop(0).socket.close()

    def _introduced(self, stranger: _Peer) -> list[Word]:
        lines, reason = stranger.read(_GREETING_BYTES)
        if not lines and reason is None:
            return []
        self._strangers.remove(stranger)
        told = _parsed(lines[0]) if lines else None
        if isinstance(told, dict) and _is_token(told, self._token) and isinstance(told.get("rank"), int):
            with contextlib.suppress(OSError):  # gone
                stranger.socket.sendall(_line_of(token=self._token))
                stranger.rank = told["rank"]
                self._peers[stranger.rank] = stranger
                return [Word("joined", stranger.rank)]
        stranger.socket.close()
        return []

    def _heard_from(self, peer: _Peer) -> list[Word]:
        lines, reason = peer.read(_WORD_BYTES)
        words = []
        for line in lines:
            word = _word_of(line)
            if word is None:
                reason = _GARBLED
                break
            words.append(word)
        peer.parted |= any(word.rank == peer.rank and word.kind in ("left", "failed") for word in words)
        if reason is not None:
            self._peers.pop(peer.rank)
            peer.socket.close()
            if not peer.parted:
                words.append(Word("lost", peer.rank, reason))
        return words


class _Peer:
    """The other end of a connection, and the part of its next message that has arrived."""

    def __init__(self, rank: int, end: socket.socket) -> None:
        self.rank = rank
        self.socket = end
        self.since_s = self.heard_s = time.monotonic()
        self.parted = False  # it said why it would go
        self._arrived = b""

    def read(self, limit_bytes: int) -> tuple[list[bytes], str | None]:
        """Return the lines that are whole, and how it ended, if it did: a line over the limit is an end, too."""
        try:
            piece = self.socket.recv(_PIECE_BYTES)
            self.heard_s = time.monotonic()
            reason = None if piece else _ENDED
        except OSError as error:
            piece = b""
            reason = _ENDED if error.errno == errno.ECONNRESET else f"{_UNREACHED} ({error.strerror})"
        *lines, self._arrived = (self._arrived + piece).split(b"\n")
        for number, line in enumerate((*lines, self._arrived)):
            if len(line) > limit_bytes:
                self._arrived = b""
                return lines[:number], _GARBLED
        return lines, reason


_ENDED = "it ended without a word (killed, or out of its machine's memory, perhaps)"
_UNREACHED = "its machine does not answer: did it, or the network, go down?"
_GARBLED = "what it said is no word of a rank (do all ranks run the same version of autosplit?)"


def _of_socket(peers: Iterable[_Peer], end: object) -> _Peer | None:
    return next((peer for peer in peers if peer.socket is end), None)


def _line_of(**parts: object) -> bytes:
    cause = parts.get("cause")
    if isinstance(cause, str) and len(cause) > _CAUSE_LENGTH:
        parts["cause"] = cause[:_CAUSE_LENGTH] + "..."
    return json.dumps(parts).encode() + b"\n"


def _parsed(line: bytes) -> object:
    """Return what a line says, whoever wrote it; None where it is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # the latter for too many brackets
        return None


def _word_of(line: bytes) -> Word | None:
    told = _parsed(line)
    if not isinstance(told, dict) or set(told) != {"kind", "rank", "cause"}:
        return None
    # No other kind comes from outside; "over" would end the thread.
    known = told["kind"] in ("failed", "left", "lost", "missing", "sign")
    whole = known and isinstance(told["rank"], int) and isinstance(told["cause"], str)
    return Word(told["kind"], told["rank"], told["cause"]) if whole else None


def _is_token(told: object, token: str) -> bool:
    given = told.get("token") if isinstance(told, dict) else None
    # JSON can have half a surrogate pair, which has no bytes otherwise.
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="surrogatepass"), token.encode())


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
