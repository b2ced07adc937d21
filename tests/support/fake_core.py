"""A core without a model: it speaks the real protocol over the real transport and answers what it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.errors import FrontEndClosed
from quire.engine.client.launch import CoreEntry, CoreHandle, ThreadCore
from quire.engine.client.model_info import ModelInfo, Pools
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import (
    Abort,
    AddRequest,
    ClientMessage,
    Command,
    CommandDone,
    CoreDied,
    ErrorOutput,
    Pause,
    Ping,
    Pong,
    PooledOutput,
    Ready,
    RequestOutput,
    Resume,
    RunCommand,
    Shutdown,
    Sleep,
    SleepState,
    StepOutput,
    StepStats,
    TokenLogprobs,
    TokensOutput,
    Wake,
)
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.slots import Slots
from quire.engine.client.transport import ClientChannel, CoreChannel
from tests.support.patience import PATIENCE
from tests.support.pooling import pooled
from tests.support.tokenizer import EOS, VOCAB_SIZE, byte_tokenizer

CONTEXT = 512
INFO = ModelInfo(
    architecture="fake",
    implementation="quire",
    device="cpu",
    dtype="float32",
    vocab_size=VOCAB_SIZE,
    max_model_len=CONTEXT,
    num_blocks=1024,
    block_size=16,
    weight_bytes=0,
    cache_bytes=0,
)


def upper_case(message: AddRequest) -> list[int]:
    """The prompt's text in upper case, then the end of the sequence."""
    text = byte_tokenizer().decode(message.prompt.tolist(), skip_special_tokens=True)
    return [*byte_tokenizer().encode(text.upper()).ids, EOS]


def says(text: str) -> Callable[[AddRequest], list[int]]:
    """Always the same answer."""
    ids = [*byte_tokenizer().encode(text).ids, EOS]
    return lambda _: ids


def says_in_turn(*texts: str) -> Callable[[AddRequest], list[int]]:
    """One answer after the other, to requests as they come."""
    left = iter(texts)

    def answer(message: AddRequest) -> list[int]:
        return says(next(left))(message)

    return answer


@dataclass
class FakeCore:
    """Generate one token a step for each request, as `answer` says.

    Attributes:
        info: what is said about the model.
        logprob: of the token at an index of an answer.
        prompt_logprob: of the token at an index of a prompt.
        probs: of the tokens that `SamplingParams.token_probs` asks for.
        alignment: the result of the task "align".
        refuses: pooling requests that are refused as invalid.
        wake_error: why it cannot wake up; None: it can.
        command_error: why it does not do what an operator asks for, and whether that is invalid; None: it does.
        hold: while set, only those steps are made that `allow` lets through.
        received: all messages, in order.
        active: ids of requests that are being answered.
    """

    answer: Callable[[AddRequest], list[int]] = upper_case
    info: ModelInfo = INFO
    logprob: Callable[[AddRequest, int], float] = lambda _, index: -0.5
    prompt_logprob: Callable[[AddRequest, int], float] = lambda _, index: -0.5
    probs: Callable[[AddRequest], list[float]] = lambda _: []
    alignment: Callable[[AddRequest], np.ndarray] | None = None
    refuses: Callable[[AddRequest], bool] = lambda _: False
    wake_error: str | None = None
    command_error: tuple[str, bool] | None = None
    hold: threading.Event = field(default_factory=threading.Event)
    deaf: threading.Event = field(default_factory=threading.Event)
    die_at_step: int | None = None
    received: list[ClientMessage] = field(default_factory=list)
    active: dict[str, tuple[AddRequest, list[int], int]] = field(default_factory=dict)
    steps: int = 0
    paused: bool = False
    _pausing: list[int] = field(default_factory=list)  # serials of commands that wait for the end of all requests
    _done: list[int] = field(default_factory=list)
    _refused: list[int] = field(default_factory=list)  # those whose wait another command has ended
    _allowed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    @property
    def pools(self) -> Pools:
        assert isinstance(self.info.kind, Pools)
        return self.info.kind

    def allow(self, steps: int) -> None:
        """Let so many steps be made while the core is on hold."""
        self._allowed.release(steps)

    def __call__(self, address: str) -> None:
        """Body of the core's thread."""
        with CoreChannel(address) as channel, suppress(FrontEndClosed):
            channel.send(Ready(self.info))
            while self._listen(channel):
                if (
                    self.active
                    and not self.paused
                    and (not self.hold.is_set() or self._allowed.acquire(blocking=False))
                ):
                    self.steps += 1
                    if self.steps == self.die_at_step:
                        channel.send(CoreDied("told to die"))
                        return
                    channel.send(self._step())

    def _listen(self, channel: CoreChannel) -> bool:
        busy = bool(self.active) and not self.hold.is_set() and not self.paused
        message = channel.receive(0.0 if busy else 0.005)
        while self.deaf.is_set():  # after the wait, during which it may have become so
            time.sleep(0.01)
        while message is not None:
            self.received.append(message)
            match message:
                case AddRequest():
                    answer = self.answer(message) if isinstance(message.params, SamplingParams) else []
                    self.active[message.request_id] = (message, answer, 0)
                case Abort(request_ids=ids):
                    for request_id in ids:
                        self.active.pop(request_id, None)
                case Sleep():
                    channel.send(SleepState(frozenset(("weights", "kv_cache"))))
                case Wake() if self.wake_error is not None:
                    channel.send(SleepState(message.tags, self.wake_error))
                case Wake():
                    channel.send(SleepState(frozenset()))
                case RunCommand(serial=serial, command=command):
                    self._run(serial, command)
                case Ping(serial=serial):
                    channel.send(Pong(serial))
                case Shutdown():
                    return False
            message = channel.receive(0.0)
        if self._pausing and not self.active:
            self._done += self._pausing
            self.paused, self._pausing = self.paused or bool(self._pausing), []
        for serial in self._done:
            channel.send(CommandDone(serial, *(self.command_error or ())))
        for serial in self._refused:
            channel.send(CommandDone(serial, "another command has ended the wait"))
        self._done.clear()
        self._refused.clear()
        return True

    def _run(self, serial: int, command: Command) -> None:
        """Do what an operator asks for; the answer is sent later."""
        match command:
            case Pause(drain=True):
                self._pausing.append(serial)
                return
            case Pause() | Resume():
                self.paused = isinstance(command, Pause)
                self._refused += self._pausing
                self._pausing = []
        self._done.append(serial)

    def _pooled(self, message: AddRequest) -> RequestOutput:
        if self.refuses(message):
            return ErrorOutput(message.request_id, "this one is refused", invalid=True)
        cached = len(message.prompt) // 16 * 16
        if self.alignment is not None:
            return PooledOutput(message.request_id, self.alignment(message), 0, time.monotonic())
        # Without facts about pooling: the prompt itself, by which tests of the client know their requests.
        data = (
            message.prompt.astype(np.float32)
            if not isinstance(self.info.kind, Pools)
            else pooled(self.info.kind, message)
        )
        return PooledOutput(message.request_id, data, cached, time.monotonic())

    def _step(self) -> StepOutput:
        outputs: list[RequestOutput] = []
        for request_id, (message, answer, sent) in list(self.active.items()):
            if isinstance(message.params, PoolingParams):
                outputs.append(self._pooled(message))
                del self.active[request_id]
                continue
            token, made, params = answer[sent], sent + 1, message.sampling_params
            ends = token in params.eos_token_ids
            reason = "stop" if ends else "length" if made >= params.max_tokens or made == len(answer) else None
            logprobs = prompt_logprobs = None
            if params.logprobs is not None:
                logprobs = [_logprobs(token, params.logprobs, self.logprob(message, sent))]
                if listed := params.logprob_token_ids:
                    logprobs = [
                        TokenLogprobs(
                            [token, *listed], [-0.5 - i for i in range(1 + len(listed))], [1, *(0 for _ in listed)]
                        )
                    ]
            if params.prompt_logprobs is not None and made == 1:
                prompt_logprobs = [
                    None,
                    *(
                        _logprobs(int(t), params.prompt_logprobs, self.prompt_logprob(message, i))
                        for i, t in enumerate(message.prompt[1:], 1)
                    ),
                ]
                if (asked := params.prompt_token_ids) is not None:
                    rows = [asked.row(position) for position in range(1, len(message.prompt))]
                    prompt_logprobs = [
                        None, *(TokenLogprobs([0, *row], [-1.0, *(-t / 8 for t in row)], [1, *row]) for row in rows)
                    ]  # fmt: skip
            outputs.append(
                TokensOutput(
                    request_id,
                    [token],
                    reason,  # type: ignore[arg-type]
                    logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs,
                    cached_tokens=len(message.prompt) // 16 * 16,
                    scheduled_at=time.monotonic(),
                    token_probs=self.probs(message) if params.token_probs is not None and made == 1 else None,
                )
            )
            self.active[request_id] = (message, answer, made)
            if reason is not None:
                del self.active[request_id]
        return StepOutput(outputs, StepStats(len(outputs), 0, len(outputs), 1024, len(outputs)))


def _logprobs(token: int, alternatives: int, logprob: float = -0.5) -> TokenLogprobs:
    others = [(token + 1 + i) % 256 for i in range(alternatives - 1)] if alternatives else []
    ids = [token, *([token, *others] if alternatives else [])]
    values = [logprob, *(logprob - i for i in range(len(ids) - 1))]
    return TokenLogprobs(ids, values, [1, *range(1, len(ids))])


@asynccontextmanager
async def running_client(
    core: CoreEntry, *, capacity: int = 64, share: float = 1.0, handle: CoreHandle | None = None
) -> AsyncIterator[EngineClient]:
    """A client connected to a core in a thread, or wherever `handle` runs it."""
    handle = handle or ThreadCore()
    client = EngineClient(ClientChannel(handle.address), byte_tokenizer(), Slots(capacity, share))
    handle.start(core, client.fail)
    await client.ready()
    try:
        yield client
    finally:
        if isinstance(core, FakeCore):
            core.hold.clear()
            core.deaf.clear()
        await client.close()
        await handle.join(PATIENCE)  # a busy machine takes seconds to end a Python process


def prompt_of(text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Token ids of a text."""
    return np.array(byte_tokenizer().encode(text).ids, np.int32)
