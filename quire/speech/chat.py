"""Transcribes windows with language models that read audio: their prompts, and the parsers of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.client.audio import AudioInfo
from quire.engine.client.detokenizer import Detokenizer, TextParams
from quire.engine.client.protocol import AudioItem, TokenArray, only_audio
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.stream import GenerateRequest
from quire.multimodal.audio.cuts import Window
from quire.multimodal.audio.features import SAMPLE_RATE
from quire.multimodal.audio.items import audio_items, audio_placeholders, token_count
from quire.multimodal.placement import place_items
from quire.protocol.errors import InvalidRequest
from quire.rendering.messages import AUDIO_PART
from quire.rendering.picture_texts import PictureTexts
from quire.rendering.prompts import Conversation, Prompt
from quire.serving.models import AudioInput, GeneratingModel, ServedModel
from quire.speech.attempt import TEMPERATURES, DecodingAttempt, WindowResult, deltas_of, sampling_params, token_logprobs
from quire.speech.capabilities import Capabilities
from quire.speech.segments import SegmentSpan
from quire.speech.types import TranscriptionOptions
from quire.speech.windows import TextStream

# Languages by ISO code, with the names by which they are called in prompts and answers.
_QWEN3_ASR = {
    "ar": "Arabic",
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "fa": "Persian",
    "fi": "Finnish",
    "fil": "Filipino",
    "fr": "French",
    "hi": "Hindi",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "mk": "Macedonian",
    "ms": "Malay",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sv": "Swedish",
    "th": "Thai",
    "tr": "Turkish",
    "vi": "Vietnamese",
    "yue": "Cantonese",
    "zh": "Chinese",
}
_QWEN2_AUDIO = {
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "it": "Italian",
    "ja": "Japanese",
    "yue": "Cantonese",
    "zh": "Chinese",
}
_GRANITE_SPEECH = {
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "ja": "Japanese",
    "pt": "Portuguese",
}
_GEMMA = {"en": "English", "es": "Spanish", "fr": "French", "it": "Italian", "pt": "Portuguese"}
_PHI4_MULTIMODAL = _GRANITE_SPEECH | {"it": "Italian", "zh": "Chinese"}
_VOXTRAL = dict.fromkeys(("ar", "de", "en", "es", "fr", "hi", "it", "nl", "pt"), "")
_LANGUAGES: Mapping[str, Mapping[str, str]] = {
    "gemma3n": _GEMMA,
    "gemma4": _GEMMA,
    "granite_speech": _GRANITE_SPEECH,
    "phi4_multimodal": _PHI4_MULTIMODAL,
    "qwen2_5_omni": _QWEN2_AUDIO,
    "qwen2_audio": _QWEN2_AUDIO,
    "qwen3_asr": _QWEN3_ASR,
    "voxtral": _VOXTRAL,
}
# What models that are asked in words have been trained with, as far as their authors say.
_INSTRUCTIONS: Mapping[str, str] = {
    "gemma3n": "Transcribe the speech word for word, without comments.",
    "gemma4": "Transcribe the speech word for word, without comments.",
    "granite_speech": "can you transcribe the speech into a written format?",
    "phi4_multimodal": "Transcribe the audio clip into text.",
    "qwen2_5_omni": "Transcribe the speech word for word, without comments.",
    "qwen2_audio": "Transcribe the speech word for word, without comments.",
}
Samples = NDArray[np.float32]
# Fast speech has six tokens a second, and several times as many in scripts of which the vocabulary has only bytes.
_TOKENS_PER_SECOND, _MORE_TOKENS = 25, 64
_LONGEST = 180.0  # seconds of a window: longer audio is transcribed in several, which run side by side
_MARK = "<asr_text>"  # Qwen 3 ASR: "language NAME<asr_text>TEXT"
_HEADER_TOKENS = 16  # of which the text before the mark has fewer


def capabilities_of(info: AudioInfo, max_model_len: int) -> Capabilities:
    """Capabilities of a language model. A window fills at most half of the context."""
    item_seconds = info.item_columns * info.column_samples / SAMPLE_RATE
    per_token = item_seconds / info.lengths.tokens(info.item_columns)
    longest = _LONGEST if info.max_items is None else min(_LONGEST, info.max_items * item_seconds)
    return Capabilities(
        window_seconds=min(longest, max_model_len // 2 * per_token),
        languages=tuple(sorted(_LANGUAGES[info.kind])),
        takes_prompt=info.kind != "voxtral",
    )


async def transcription_prompt(
    served: ServedModel, info: AudioInfo, options: TranscriptionOptions, tenant: str
) -> Prompt:
    """The prompt of every window, with one placeholder for its audio.

    Raises:
        InvalidRequest: the model's tokenizer lacks a token of the prompt.
        PromptError: the chat template refuses it, or it is too long.
        QueueFull: too many jobs wait.
    """
    renderer = served.renderer
    if info.kind == "voxtral":
        special = renderer.tokenizer.special
        told = f"lang:{options.language}" if options.language else ""
        text = f"{special.get('bos_token', '<s>')}[INST]{info.placeholder_text}[/INST]{told}[TRANSCRIBE]"
        _require(served, "[TRANSCRIBE]")
        return await renderer.text(text, add_special_tokens=False, tenant=tenant)
    conversation = _qwen3_asr(options) if info.kind == "qwen3_asr" else _instruction(info, options)
    if info.kind == "qwen3_asr":
        _require(served, _MARK)
    around = PictureTexts([(info.placeholder_text, info.chat_text)])
    rendered = await renderer.chat(
        Conversation(
            **conversation,
            media={"audio": info.placeholder_text},
            pictures=around if info.chat_text != info.placeholder_text else None,
        ),
        max_tokens=served.info.max_model_len,
        tenant=tenant,
    )
    return rendered.prompt


def _require(served: ServedModel, token: str) -> None:
    if served.renderer.tokenizer.token_id(token) is None:
        raise InvalidRequest(
            f"The model `{served.names[0]}` cannot transcribe: its tokenizer has no token {token}.", "model"
        )


def _qwen3_asr(options: TranscriptionOptions) -> dict[str, Any]:
    """Hotwords and prompt are the system message; a language is set by prefilling the answer."""
    context = _context(options)
    messages: list[dict[str, Any]] = [{"role": "system", "content": context}] if context else []
    messages.append({"role": "user", "content": [dict(AUDIO_PART)]})
    if options.language is None:
        return {"messages": messages}
    begun = f"language {_QWEN3_ASR[options.language]}{_MARK}"
    messages.append({"role": "assistant", "content": begun})
    return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def _instruction(info: AudioInfo, options: TranscriptionOptions) -> dict[str, Any]:
    """The instruction follows the audio."""
    asked = _INSTRUCTIONS[info.kind]
    if options.language is not None:
        asked += f" It is in {_LANGUAGES[info.kind][options.language]}."
    if context := _context(options):
        asked += f" Words that may occur: {context}"
    content: Any = [dict(AUDIO_PART), {"type": "text", "text": asked}]
    # Nothing stands between the two, as in training.
    return {"messages": [{"role": "user", "content": content}], "separator": ""}


def _context(options: TranscriptionOptions) -> str:
    return " ".join(text for part in (options.hotwords, options.prompt) if (text := part.strip()))


class AnswerReader:
    """Find the transcript in the tokens of an answer while they are generated.

    Attributes:
        language: ISO code of the language that the answer names; None if it names none.
    """

    def __init__(self, served: ServedModel, *, has_header: bool) -> None:
        """`has_header`: the answer begins with the language."""
        self._tokenizer = served.renderer.tokenizer
        self._mark = self._tokenizer.token_id(_MARK) if has_header else None
        self._special = frozenset(self._tokenizer.special_tokens.values()) | set(served.eos_token_ids)
        self.language: str | None = None

    def push(self, tokens: Sequence[int], *, last: bool) -> list[int]:
        """Indices of the tokens that belong to the text, counted from the first of the header that was held back."""
        shown = []
        for index, token in enumerate(tokens):
            if self._mark is None:
                if token not in self._special:
                    shown.append(index)
            elif token == self._mark:
                self._read_header(tokens[:index])
                self._mark, shown = None, []
            else:
                shown.append(index)
        if self._mark is None:
            return shown
        if last or len(tokens) > _HEADER_TOKENS:  # there is no header
            self._mark = None
            return [index for index in shown if tokens[index] not in self._special]
        return []

    @property
    def waits(self) -> bool:
        """Whether the tokens so far may all belong to the header: they are to be pushed again, with those to come."""
        return self._mark is not None

    def _read_header(self, tokens: Sequence[int]) -> None:
        name = self._tokenizer.decode(list(tokens), skip_special_tokens=True).strip().removeprefix("language").strip()
        codes = {spoken.lower(): code for code, spoken in _QWEN3_ASR.items()}
        self.language = codes.get(name.lower())


def reader_of(served: ServedModel, info: AudioInfo, options: TranscriptionOptions) -> AnswerReader:
    """The parser of answers to `transcription_prompt`."""
    return AnswerReader(served, has_header=info.kind == "qwen3_asr" and options.language is None)


class ChatWindowTranscriber:
    """Transcribe windows with a language model that reads audio; implements `WindowTranscriber`."""

    def __init__(self, served: GeneratingModel, audio: AudioInput, options: TranscriptionOptions, tenant: str) -> None:
        self._served = served
        self._info = audio.info
        self._reader = audio.reader
        self._options = options
        self._tenant = tenant
        self._prompt: Prompt | None = None
        self.language = options.language

    async def prepare(self, audio: Samples, windows: Sequence[Window]) -> None:
        """Render the prompt, which all windows share."""
        if windows:
            self._prompt = await transcription_prompt(self._served, self._info, self._options, self._tenant)

    async def transcribe(self, audio: Samples, window: Window, text_stream: TextStream) -> None:
        """Transcribe a window by one request, repeated at higher temperatures where the text is poor."""
        samples = audio[window.start : window.end]
        if not token_count(len(samples), self._info):
            return
        items = await self._reader.run(partial(audio_items, samples, self._info), tenant=self._tenant)
        assert self._prompt is not None
        prompt, placed = place_items(self._prompt.token_ids, [audio_placeholders([items], self._info)])
        attempt, text = await self._best_attempt(prompt, only_audio(placed), window.seconds, text_stream)
        spans = [SegmentSpan(0.0, window.seconds, 0, len(text), tuple(text))] if text else []
        text_stream.finish_part(
            WindowResult(
                window=window,
                attempt=attempt,
                quality=attempt.quality,
                spans=spans,
                words=(),
                text_tokens=text,
            )
        )

    async def _best_attempt(
        self, prompt: TokenArray, items: tuple[AudioItem, ...], seconds: float, text_stream: TextStream
    ) -> tuple[DecodingAttempt, list[int]]:
        """The first attempt that can be trusted, or the last one. Text that was sent is not replaced."""
        requested = self._options.numbers.temperature
        for temperature in (requested,) if requested or self._options.beams else TEMPERATURES:
            params = self._params(len(prompt), seconds, temperature)
            request = GenerateRequest(prompt=prompt, params=params, items=items, deadline=self._options.deadline)
            attempt, text, answer = await self._attempt(request, text_stream)
            if text_stream.sent or not (attempt.limited or attempt.quality.failed):
                break
        self.language = self.language or answer.language
        return attempt, text

    async def _attempt(
        self, request: GenerateRequest, text_stream: TextStream
    ) -> tuple[DecodingAttempt, list[int], AnswerReader]:
        """The output of a request, and those of its tokens that are text."""
        audio_tokens, text = sum(item.length for item in request.items), list[int]()
        attempt = DecodingAttempt(request.params.temperature, len(request.prompt) - audio_tokens, audio_tokens)
        answer = reader_of(self._served, self._info, self._options)
        tokenizer = self._served.renderer.tokenizer
        detokenizer = Detokenizer(tokenizer.backend, (), TextParams())
        held_tokens, held_logprobs = list[int](), list[float]()
        async with aclosing(deltas_of(self._served.client, request, self._options, tokenizer)) as deltas:
            async for delta in deltas:
                logprobs = [entry.logprobs[0] for entry in delta.logprobs]
                attempt.output += delta.token_ids
                attempt.logprobs += logprobs
                attempt.end(delta.finish_reason, self._options)
                held_tokens += delta.token_ids
                held_logprobs += logprobs
                last = delta.finish_reason is not None
                shown = answer.push(held_tokens, last=last)
                if answer.waits:
                    continue
                tokens, probs = [held_tokens[index] for index in shown], [held_logprobs[index] for index in shown]
                text += tokens
                piece = detokenizer.push(tokens, last=last)
                attempt.add_piece(piece, token_logprobs(tokenizer, tokens, probs) if self._options.logprobs else ())
                held_tokens, held_logprobs = [], []
                if text_stream.live:
                    text_stream.send(attempt.pieces)
        return attempt, text, answer

    def _params(self, prompt_len: int, seconds: float, temperature: float) -> SamplingParams:
        options = self._options
        most = int(seconds * _TOKENS_PER_SECOND) + _MORE_TOKENS if options.max_tokens is None else options.max_tokens
        max_tokens = max(1, min(most, self._served.info.max_model_len - prompt_len))
        return sampling_params(options, temperature, max_tokens=max_tokens, eos_token_ids=self._served.eos_token_ids)
