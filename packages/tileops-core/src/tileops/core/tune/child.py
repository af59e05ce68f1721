"""A process that does what may hang or crash: it is asked over a socket, and dies with whoever asks.

It is started as a module, not through multiprocessing, which would run the caller's own script again. It leads a
process group, so that whatever it starts is ended with it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from tileops.core.errors import BackendError, TileOpsError

START_SECONDS = 300.0  # torch, TileLang and a driver on a busy machine


class Rejected(Exception):
    """What was asked of a child can't be had, for a reason that lies in the question. Its state may be ``spoilt``."""

    def __init__(self, reason: str, spoilt: bool = False) -> None:
        super().__init__(reason)
        self.spoilt = spoilt


class Stopped(Exception):
    """The child was ended by ``stop`` while it was asked."""


class Child:
    """A process that calls ``function``, ``module:name``, which gives an iterable of answers.

    It is started when it is first asked, and again after it was lost. To be used by one thread, but for ``stop``.
    """

    def __init__(self, function: str) -> None:
        self.function = function
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection
        self._said: Any
        self._stopped = False
        self._lock = threading.Lock()

    def ask(self, *arguments: Any, deadline: float | None = None) -> Iterator[Any]:
        """The answers, each within ``deadline`` seconds.

        Raises Rejected where the function does, and where the process crashed or was killed for its silence;
        TileOpsError where the function raised anything else, BackendError where it can't be started, Stopped after
        ``stop``.
        """
        self._start()
        whole = False
        try:
            with contextlib.suppress(OSError):  # it is gone: how it ended tells why
                self._pipe.send(arguments)
            while True:
                kind, value = self._receive(deadline)
                whole = kind in ("end", "rejected", "failed")
                if kind == "end":
                    return
                if kind in ("rejected", "spoilt"):
                    raise Rejected(value)
                if kind == "failed":
                    raise TileOpsError(value)
                yield value
        finally:
            if not whole:  # it would go on with an answer that nobody takes
                self.close()

    def stop(self) -> None:
        """End the process for good; another thread that waits for it gets Stopped."""
        self._stopped = True
        with self._lock:
            self._kill()

    def check(self) -> None:
        """Raise Stopped after ``stop``."""
        if self._stopped:
            raise Stopped

    def close(self, grace: float = 0) -> str:
        """Kill the process and all that it started; gives how it ended and what it said last.

        One that is about to end by itself has ``grace`` seconds for it.
        """
        if self._process is None:
            return "it was ended"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        self._kill()
        code = self._process.wait()
        self._process = None
        self._pipe.close()
        with self._said as said:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"{how}, {lines[-1][:300]}" if lines else how

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _receive(self, deadline: float | None) -> tuple[str, Any]:
        try:
            if not self._pipe.poll(deadline):
                self.close()
                raise Rejected(f"no answer within {deadline:g} s: its process was killed")
            answer: tuple[str, Any] = self._pipe.recv()
        except (EOFError, OSError):
            how = self.close(grace=5)
            if self._stopped:
                raise Stopped from None
            raise Rejected(f"its process died: {how}") from None
        return answer

    def _start(self) -> None:
        with self._lock:
            self.check()
            if self._process is not None:
                return
            ours, theirs = socket.socketpair()
            self._pipe = Connection(ours.detach())
            self._said = tempfile.TemporaryFile()  # noqa: SIM115 - until the process has ended
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno()), self.function],
                    stdin=subprocess.DEVNULL,
                    stdout=self._said,
                    stderr=self._said,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
                )
        try:
            self._receive(START_SECONDS)
        except Rejected as e:
            raise BackendError(f"{self.function} can't be started: {e}") from None


def _die_with_the_caller(fd: int) -> None:
    hung_up = select.poll()
    hung_up.register(fd, 0)  # only that the other end is gone
    hung_up.poll()
    os.killpg(0, signal.SIGKILL)


def _serve(pipe: Connection, function: Callable[..., Iterable[Any]]) -> None:
    pipe.send(("ready", None))
    while True:
        asked = pipe.recv_bytes()
        try:
            for answer in function(*pickle.loads(asked)):
                pipe.send(("answer", answer))
            pipe.send(("end", None))
        except Rejected as e:
            pipe.send(("spoilt" if e.spoilt else "rejected", str(e)))
        except Exception as e:
            pipe.send(("failed", str(e) if isinstance(e, TileOpsError) else f"{type(e).__name__}: {e}"))


def main(fd: str, function: str) -> None:
    """Answer whoever holds the other end of a socket, until it is closed."""
    os.set_inheritable(int(fd), False)
    threading.Thread(target=_die_with_the_caller, args=(int(fd),), daemon=True).start()
    module, _, name = function.partition(":")
    pipe = Connection(int(fd))  # in this frame, so that it isn't closed before an error has been told
    _serve(pipe, getattr(importlib.import_module(module), name))


if __name__ == "__main__":
    from tileops.core.tune import child  # so that Rejected is the class that others import

    child.main(*sys.argv[1:])
