"""The engine in a process of its own: takes messages, steps while there is work, sends what each step gave.

Owns the order of messages and steps, and how the process ends. Knows nothing about HTTP or text. The parent starts it
(`engine/client.py`), writes the options as one line of JSON to its standard input and keeps that pipe open: when it
closes, the parent is gone, and so is the engine. The parent's end of standard output tells it the same about this process.

    python -m specengine.engine.process --endpoint ipc://FOLDER/engine.sock
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Protocol

import zmq

from specengine.config import EngineOptions
from specengine.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineInfo,
    EngineStats,
    PrefixCacheReset,
    RequestDelta,
    RequestRefused,
    ResetPrefixCache,
    Shutdown,
    StepOutputs,
    ToClient,
    ToEngine,
    decode_for_engine,
    encode,
)
from specengine.errors import ConfigError, LoadError, RequestError
from specengine.log import configure, get_logger

logger = get_logger(__name__)

LINGER_MS = 2000  # how long the last messages may take to reach the parent
PARENT_CHECK_SECONDS = 1.0


class SteppingEngine(Protocol):
    """What the loop needs of an `Engine`."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, message: AddRequest) -> None: ...
    def abort(self, request_ids: list[str]) -> list[RequestDelta]: ...
    def step(self) -> list[RequestDelta]: ...
    def stats(self) -> EngineStats: ...
    def reset_prefix_cache(self) -> bool: ...
    def close(self) -> None: ...


class EngineLoop:
    """Runs one engine for one client. `run` returns after a Shutdown, or when the engine failed (then False)."""

    def __init__(self, engine: SteppingEngine, socket: zmq.Socket[bytes]):
        self.engine = engine
        self._socket = socket
        self._running: set[str] = set()
        self._deadline: float | None = None  # of a shutdown, monotonic

    def run(self) -> bool:
        self.send(self.engine.info)
        try:
            while True:
                self._receive()
                if self._deadline is not None and (not self.engine.has_work or time.monotonic() >= self._deadline):
                    self._outputs(self.engine.abort(sorted(self._running)))
                    return True
                if self.engine.has_work:
                    self._outputs(self.engine.step())
        except Exception as error:  # whatever it is, the client must hear of it: every request waits for this engine
            logger.error("the engine failed\n%s", traceback.format_exc())
            self.send(EngineFailed(f"the engine failed: {type(error).__name__}: {error}"))
            return False

    def send(self, message: ToClient) -> None:
        self._socket.send(encode(message))

    def _receive(self) -> None:
        """Takes every message that is there; waits for one where there is nothing else to do."""
        idle = not self.engine.has_work and self._deadline is None
        while True:
            try:
                frame = self._socket.recv(0 if idle else zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(decode_for_engine(frame))
            idle = False

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self._add(message)
            case AbortRequests():
                self._outputs(self.engine.abort(message.request_ids))
            case ResetPrefixCache():
                self.send(PrefixCacheReset(self.engine.reset_prefix_cache()))
            case Shutdown():
                self._deadline = time.monotonic() + message.grace_seconds

    def _add(self, message: AddRequest) -> None:
        try:
            self.engine.add(message)
        except RequestError as error:
            self.send(RequestRefused(message.request_id, str(error), error.param, error.code))
            return
        self._running.add(message.request_id)

    def _outputs(self, deltas: list[RequestDelta]) -> None:
        self._running.difference_update(delta.request_id for delta in deltas if delta.finished)
        self.send(StepOutputs(deltas, self.engine.stats()))


def connect(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A socket to the parent's. Nothing is ever dropped: what a slow reader leaves waits in memory."""
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.connect(endpoint)
    return socket


def build(options: dict[str, Any]) -> SteppingEngine:
    """The engine itself; its modules take seconds to import, so the process is watched before."""
    from specengine.engine.engine import Engine

    return Engine(EngineOptions.create(**options))


def run(endpoint: str, options: dict[str, Any]) -> int:
    """Builds the engine and serves it. Returns the process's exit code."""
    with zmq.Context() as context, connect(context, endpoint) as socket:
        try:
            engine = build(options)
        except (ConfigError, LoadError) as error:
            socket.send(encode(EngineFailed(str(error), "config" if isinstance(error, ConfigError) else "load")))
            return 2
        except Exception as error:  # out of memory, a damaged installation: the parent reports it
            logger.error("the engine could not start\n%s", traceback.format_exc())
            socket.send(encode(EngineFailed(f"the engine could not start: {type(error).__name__}: {error}")))
            return 1
        with contextlib.closing(engine):
            return 0 if EngineLoop(engine, socket).run() else 1


def watch_parent(endpoint: str, parent: int) -> None:
    """Ends this process when standard input closes or the parent's id changes: nobody is left to serve."""
    while True:
        readable, _, _ = select.select([0], [], [], PARENT_CHECK_SECONDS)
        if (readable and not os.read(0, 4096)) or os.getppid() != parent:
            break
    file = Path(endpoint.removeprefix("ipc://"))
    with contextlib.suppress(OSError):  # the parent may have removed them itself
        file.unlink()
        file.parent.rmdir()
    if os.getpgrp() == os.getpid():  # the parent's doing: with us goes what we started, a download for instance
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def read_line() -> bytes:
    """One line of standard input, unbuffered: the rest of it is `watch_parent`'s."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk:
            break
        line += chunk
    return line


def main(argv: list[str] | None = None) -> int:
    parent = os.getppid()
    # The parent decides when this process ends: a terminal sends Ctrl-C, and a service manager SIGTERM, to both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.dup(1)  # stays open as long as this process lives; not inherited
    os.dup2(2, 1)
    parser = argparse.ArgumentParser(prog="python -m specengine.engine.process")
    parser.add_argument("--endpoint", required=True)
    endpoint: str = parser.parse_args(argv).endpoint
    settings = json.loads(read_line() or b"{}")
    threading.Thread(target=watch_parent, args=(endpoint, parent), daemon=True).start()
    configure(settings.get("log_level", "info"))
    return run(endpoint, settings.get("options", {}))


if __name__ == "__main__":
    sys.exit(main())
