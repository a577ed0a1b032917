"""The simulated engine on the event loop's clock."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from itertools import count
from typing import TYPE_CHECKING, Protocol

from proxy.sim.http.bodies import ApiError, Limits

if TYPE_CHECKING:
    from proxy.sim.engine import SimulatedEngine

_logger = logging.getLogger(__name__)


class TokenSink(Protocol):
    """Where the tokens of one sequence go; called by the step loop, so it must not block or raise."""

    def on_start(self, cached_tokens: int) -> None:
        """Take note that the prompt's first tokens were found in the prefix cache; before any token."""

    def on_token(self, *, finished: bool) -> None:
        """Take the next token."""


class _Sequence:
    __slots__ = ("begun", "done", "prompt_tokens", "sink", "started")

    def __init__(self, prompt_tokens: int, sink: TokenSink, done: asyncio.Future[None]) -> None:
        self.prompt_tokens = prompt_tokens
        self.sink = sink
        self.done = done
        self.started = False  # the engine has taken it in
        self.begun = False  # its first token is out


class SimulatedServer:
    """One engine that runs ``speed`` times as fast as its profile says: a task in ``run``, callers in ``generate``."""

    def __init__(self, engine: SimulatedEngine, *, model: str, speed: float = 1.0, max_model_len: int = 32_768) -> None:
        if not speed > 0 or max_model_len < 2:
            raise ValueError("the speed is positive, and a prompt and its answer need two tokens of context")
        config = engine.config
        self.engine = engine
        # vLLM does not start when one sequence of full length exceeds the KV cache; a simulation need not be so strict.
        self.limits = Limits(model, min(max_model_len, config.blocks * config.block_size), config.block_size)
        self.prompt_tokens = 0
        """Tokens of all prompts whose prefill is done, each counted once however often it was preempted."""
        self.finished = 0
        """Sequences that ran to their end."""
        self.lost_seconds = 0.0
        """Time by which steps ended late for good, because this process could not keep up with its own model."""
        self.failed = False
        self.idle = asyncio.Event()
        """Set while the engine has nothing to do."""
        self._speed = speed
        self._sequences: dict[str, _Sequence] = {}
        self._ids = map(str, count())
        self._work = asyncio.Event()

    def check_alive(self) -> None:
        """Refuse the request at hand when the engine has failed.

        Raises:
            ApiError: it has.
        """
        if self.failed:
            message, status = "EngineCore encountered an issue.", HTTPStatus.INTERNAL_SERVER_ERROR
            raise ApiError(message, error_type="InternalServerError", status=status)

    async def generate(
        self, prompt_tokens: int, output_tokens: int, sink: TokenSink, hashes: tuple[bytes, ...] = ()
    ) -> None:
        """Run one sequence, its tokens going to ``sink``; return after the last. Cancel to abort it at once.

        ``hashes`` are those of the prompt's full blocks, by which the prefix cache finds them.

        Raises:
            ConnectionResetError: the engine has failed.
        """
        if self.failed:
            raise ConnectionResetError("the simulated engine has failed")
        sequence_id = next(self._ids)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.engine.add(sequence_id, prompt_tokens, output_tokens, hashes=hashes)
        self._sequences[sequence_id] = _Sequence(prompt_tokens, sink, done)
        self._wake()
        try:
            await done
        finally:
            if self._sequences.pop(sequence_id, None) is not None:
                self.engine.abort(sequence_id)
                self._wake()  # the room that it leaves may be what the head of the queue waits for

    def cut(self) -> None:
        """Cancel every sequence; their connections close without an end of stream, as when an engine dies."""
        for sequence in self._sequences.values():
            sequence.done.cancel()

    async def run(self) -> None:
        """Take the engine's steps until cancelled."""
        loop = asyncio.get_running_loop()
        engine = self.engine
        step_end = loop.time()
        try:
            while True:
                duration = engine.start_step()
                if duration is None:
                    self._work.clear()
                    self.idle.set()
                    await self._work.wait()
                    step_end = loop.time()
                    continue
                self._note_started()
                step_end = self._end_of_step(step_end, duration / self._speed, loop.time())
                await asyncio.sleep(max(0.0, step_end - loop.time()))
                self._finish_step()
        except Exception:
            _logger.exception("the simulated engine failed")
        finally:
            self.failed = True
            self.cut()

    def _end_of_step(self, last_end: float, duration: float, now: float) -> float:
        # Counted from the ideal end of the last step and not from now, so that small delays do not add up.
        end = last_end + duration
        if end >= now:
            return end
        # More than a whole step late. Catching up would be a burst that no GPU makes, so the time is lost.
        self.lost_seconds += now - last_end
        return now + duration

    def _note_started(self) -> None:
        for sequence_id in self.engine.step_admitted:
            sequence = self._sequences[sequence_id]
            if not sequence.started:  # one that was preempted finds its own blocks again: that does not count
                sequence.started = True
                sequence.sink.on_start(self.engine.cached_tokens(sequence_id))

    def _finish_step(self) -> None:
        for sequence_id, finished in self.engine.finish_step():
            sequence = self._sequences[sequence_id]
            if not sequence.begun:
                sequence.begun = True
                self.prompt_tokens += sequence.prompt_tokens
            sequence.sink.on_token(finished=finished)
            if finished:
                self.finished += 1
                del self._sequences[sequence_id]
                if not sequence.done.done():
                    sequence.done.set_result(None)

    def _wake(self) -> None:
        self.idle.clear()
        self._work.set()
