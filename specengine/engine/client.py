"""The client's side of an engine process: starts it, sends requests, hands each its deltas, notices its death.

Owns the socket, the process and the requests in flight. Knows nothing about text or HTTP.

    info = await (client := EngineClient(EngineProcess(options))).start()
    with client.submit(AddRequest("r1", [1, 2, 3], params)) as stream:
        async for delta in stream: ...
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from specengine.config import EngineOptions, SpeculativeConfig
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
    decode_for_client,
    encode,
)
from specengine.errors import ConfigError, EngineError, LoadError, RequestError
from specengine.log import get_logger

logger = get_logger(__name__)

ERRORS: dict[str, type[Exception]] = {"config": ConfigError, "load": LoadError, "engine": EngineError}
LAST_WORDS_SECONDS = 0.3  # what a dying engine sent may still be on its way when its process is gone
KILL_AFTER_SECONDS = 2.0  # beyond the grace time of a shutdown


class EngineRunner(Protocol):
    """Whatever runs an `EngineLoop` that connects to an endpoint."""

    def start(self, endpoint: str, on_exit: Callable[[], None]) -> None:
        """Begins to load. `on_exit` is called in the event loop, once, when it has ended for whatever reason."""

    def kill(self) -> None:
        """Ends it now, if it still runs."""

    def epitaph(self) -> str:
        """How it ended, to stand after "the engine process"."""


class EngineProcess:
    """`python -m specengine.engine.process` as a child of this process, in a process group of its own."""

    def __init__(self, options: EngineOptions, log_level: str = "warning"):
        self.options = options
        self.log_level = log_level
        self.process: subprocess.Popen[bytes] | None = None
        self._stop_reading: Callable[[], object] = lambda: None

    def start(self, endpoint: str, on_exit: Callable[[], None]) -> None:
        command = [sys.executable, "-m", "specengine.engine.process", "--endpoint", endpoint]
        pipe = subprocess.PIPE
        # A group of its own: a terminal's Ctrl-C reaches this process only, which then decides, and one signal ends all of it.
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, process_group=0)
        self.process = process
        if process.stdin is None or process.stdout is None:
            raise EngineError("the engine process has no pipes")
        settings = {"options": option_values(self.options), "log_level": self.log_level}
        with contextlib.suppress(BrokenPipeError):  # it died at once; its standard output tells
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            process.stdin.flush()
        loop, output = asyncio.get_running_loop(), process.stdout.fileno()

        def read() -> None:
            if not os.read(output, 65536):
                self._stop_reading()
                on_exit()

        self._stop_reading = lambda: loop.remove_reader(output)
        loop.add_reader(output, read)

    def kill(self) -> None:
        process = self.process
        if process is None:
            return
        if process.poll() is None:
            # Before its first instruction the child may not be in its group yet.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        process.wait()
        self._stop_reading()
        self._stop_reading = lambda: None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was written and not read
                    pipe.close()

    def epitaph(self) -> str:
        code = None if self.process is None else self.process.poll()
        if code is None:
            return "closed its pipe"
        if code >= 0:
            return f"ended with exit code {code}"
        hint = "; the machine may be out of memory" if -code == signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"


def option_values(options: EngineOptions) -> dict[str, Any]:
    """The options as JSON values that `EngineOptions.create` takes."""
    values = asdict(options)
    if isinstance(options.speculation, SpeculativeConfig):
        values["speculation"] = {key: value for key, value in asdict(options.speculation).items() if value is not None}
    return values


class RequestStream:
    """The deltas of one request, in order; ends after the one with `finished`.

    A context manager: leaving it, or `close`, aborts the request where it still runs. Raises RequestError where the engine
    refused the request, EngineError where the engine failed.
    """

    def __init__(self, request_id: str, internal_id: str, num_choices: int, abort: Callable[[RequestStream], None]):
        self.request_id = request_id
        self.internal_id = internal_id
        self.num_choices = num_choices
        self.finished = False
        self._abort = abort
        self._deltas: deque[RequestDelta] = deque()
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestDelta:
        while True:
            self._wake.clear()
            delta = self.poll()
            if delta is not None:
                return delta
            if self.exhausted:
                raise StopAsyncIteration
            await self._wake.wait()

    def poll(self) -> RequestDelta | None:
        """The next delta if it is there. Raises what ended the request otherwise."""
        if self._deltas:
            return self._deltas.popleft()
        if self._error is not None:
            raise self._error
        return None

    @property
    def exhausted(self) -> bool:
        """Whether the last delta was taken."""
        return self.finished and not self._deltas

    def share(self, wake: asyncio.Event) -> None:
        """Has `wake` set when something comes, for a reader of several streams."""
        self._wake = wake

    def close(self) -> None:
        if not self.finished:
            self._abort(self)
            self.fail(EngineError("the request was aborted"))

    def feed(self, delta: RequestDelta) -> None:
        delta.request_id = self.request_id
        if delta.finish_reason is not None:
            self.num_choices -= 1
        self.finished = self.finished or delta.finished
        self._deltas.append(delta)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        self.finished = True
        self._error = error
        self._wake.set()


class EngineClient:
    """One engine, for the tasks of one event loop. `error` is set once it is dead; every later call raises it."""

    def __init__(self, runner: EngineRunner):
        self.stats = EngineStats()
        self.error: EngineError | None = None
        self._runner = runner
        self._ids = itertools.count(1)
        self._streams: dict[str, RequestStream] = {}
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._resets: deque[asyncio.Future[bool]] = deque()
        self._exited = asyncio.Event()
        self._stopping = False
        self._folder: Path | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._mourner: asyncio.Task[None] | None = None

    def launch(self) -> None:
        """Starts the engine's process; it loads while the caller does other things."""
        self._folder = Path(tempfile.mkdtemp(prefix="specengine-"))  # for this user alone
        endpoint = f"ipc://{self._folder}/engine.sock"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._ready = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(self._socket))
        self._runner.start(endpoint, self._on_exit)

    async def ready(self) -> EngineInfo:
        """Waits until the engine can serve. Raises what ended its start: ConfigError, LoadError or EngineError."""
        if self._ready is None:
            raise EngineError("the engine was not started")
        return await asyncio.shield(self._ready)

    def submit(self, message: AddRequest) -> RequestStream:
        """Sends a request. Ids need not be unique: the engine sees one of ours. Raises EngineError if the engine is gone."""
        self.check()
        internal_id = str(next(self._ids))
        stream = RequestStream(message.request_id, internal_id, message.params.n, self._abort)
        try:
            frame = encode(AddRequest(internal_id, message.prompt_token_ids, message.params, None, message.arrival_time))
        except (OverflowError, UnicodeError, TypeError) as error:  # a number beyond 64 bits, half of a surrogate pair
            raise RequestError(f"the request can't be sent to the engine: {error}") from None
        self._streams[internal_id] = stream
        self._send(frame)
        return stream

    def abort(self, request_id: str) -> None:
        """Ends every request of that id; each stream gets its last deltas, with finish_reason "abort"."""
        self.check()
        found = [stream.internal_id for stream in self._streams.values() if stream.request_id == request_id]
        if found:
            self._send(encode(AbortRequests(found)))

    async def reset_prefix_cache(self) -> bool:
        self.check()
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resets.append(answer)
        self._send(encode(ResetPrefixCache()))
        return await asyncio.shield(answer)

    @property
    def num_choices(self) -> int:
        """Choices of all requests in flight."""
        return sum(stream.num_choices for stream in self._streams.values())

    def check(self) -> None:
        """Raises EngineError if the engine is not there to serve."""
        if self.error is not None:
            raise self.error
        if self._ready is None or not self._ready.done():
            raise EngineError("the engine is not ready")
        if self._stopping:
            raise EngineError("the engine is shutting down")

    def begin_shutdown(self, grace: float) -> None:
        """Takes no more requests; those in flight may go on for `grace` seconds."""
        if not self._stopping and self.error is None and self._socket is not None:
            self._send(encode(Shutdown(grace)))
        self._stopping = True

    async def shutdown(self, grace: float) -> None:
        """Ends the engine and everything that belongs to it; safe to call at any time and twice."""
        if self._socket is None:
            return
        if self._ready is not None and self._ready.done():
            self.begin_shutdown(grace)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), grace + KILL_AFTER_SECONDS)
                await asyncio.wait_for(self._drained(), KILL_AFTER_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Ends the engine's process now. Requests in flight fail with EngineError."""
        self._stopping = True
        self._runner.kill()
        self._fail(EngineError("the engine was shut down"))
        for task in (self._reader, self._mourner):
            if task is not None:
                task.cancel()
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _send(self, frame: bytes) -> None:
        if self._socket is not None:
            self._socket.send(frame)  # sent at once: the queue is not bounded, and the engine has connected

    def _abort(self, stream: RequestStream) -> None:
        if self._streams.pop(stream.internal_id, None) is not None and self.error is None:
            self._send(encode(AbortRequests([stream.internal_id])))

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        try:
            while True:
                self._handle(decode_for_client(await socket.recv()))
        except (msgspec.MsgspecError, zmq.ZMQError, LookupError) as error:
            logger.exception("the engine's messages can't be read")
            self._fail(EngineError(f"the engine's messages can't be read: {error}"))

    def _handle(self, message: ToClient) -> None:
        match message:
            case StepOutputs():
                self.stats = message.stats
                for delta in message.deltas:
                    self._feed(delta)
            case RequestRefused():
                stream = self._streams.pop(message.request_id, None)
                if stream is not None:
                    stream.fail(RequestError(message.message, message.param, message.code))
            case EngineInfo():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)
            case PrefixCacheReset():
                answer = self._resets.popleft()
                if not answer.done():
                    answer.set_result(message.done)
            case EngineFailed():
                self._fail(ERRORS[message.kind](message.message))

    def _feed(self, delta: RequestDelta) -> None:
        internal_id = delta.request_id
        stream = self._streams.get(internal_id)
        if stream is not None:
            stream.feed(delta)
            if stream.finished:
                del self._streams[internal_id]

    def _fail(self, error: Exception) -> None:
        """The engine is gone: everyone who waits hears of it, and every later call."""
        if self.error is None:
            self.error = error if isinstance(error, EngineError) else EngineError(str(error))
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # marks it as seen: nobody may be waiting
        for stream in self._streams.values():
            stream.fail(self.error)
        self._streams.clear()
        while self._resets:
            answer = self._resets.popleft()
            if not answer.done():
                answer.set_exception(self.error)
        self.stats.num_running = self.stats.num_waiting = 0

    def _on_exit(self) -> None:
        self._exited.set()
        if not self._stopping and self.error is None:
            self._mourner = asyncio.create_task(self._mourn())

    async def _mourn(self) -> None:
        await asyncio.sleep(LAST_WORDS_SECONDS)
        if self.error is None:
            error = EngineError(f"the engine process {self._runner.epitaph()}")
            logger.error("%s", error)
            self._fail(error)

    async def _drained(self) -> None:
        """Returns when the last deltas of a shutdown have arrived: it aborted what was left, so every request ends."""
        while self._streams:
            await asyncio.sleep(0.01)
