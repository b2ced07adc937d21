"""RequestLog: prompts, parameters and answers of an engine in the log, for operators who ask for them."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from tokenizers import Tokenizer

from quire.engine.client.records import RequestRecord
from quire.engine.client.stream import EngineRequest, GenerateRequest, OutputStream, PoolRequest, SequenceStream

logger = logging.getLogger("quire.requests")


class RequestLog:
    """Log what an engine is asked and what it answers. Of each text only the beginning is kept and logged.

    Tokens of a beam search are not logged, each of which is a request to the engine.
    """

    def __init__(self, tokenizer: Tokenizer, max_len: int, *, has_outputs: bool) -> None:
        """Make a log.

        Args:
            tokenizer: of the model.
            max_len: most characters of a prompt, of parameters and of an answer.
            has_outputs: answers are logged as well.
        """
        self._tokenizer = tokenizer
        self._max_len = max_len
        self._has_outputs = has_outputs

    def begin(self, request_id: str, request: GenerateRequest | PoolRequest, stream: OutputStream) -> None:
        """Log a request that is sent to the engine."""
        if isinstance(request, GenerateRequest) and request.is_search_step:
            return
        beginning = request.prompt[: self._max_len].tolist()
        fields = {
            "engine_request_id": request_id,
            "prompt": self._tokenizer.decode(beginning, skip_special_tokens=False)[: self._max_len],
            "prompt_tokens": len(request.prompt),
            "params": _changed(request.params)[: self._max_len],
        }
        text = f"received {request_id}: prompt {fields['prompt']!r}, {len(request.prompt)} tokens, {fields['params']}"
        _log(text, fields, request)
        if self._has_outputs and isinstance(stream, SequenceStream):
            stream.keep_beginning(self._max_len)

    def end(self, record: RequestRecord, stream: OutputStream) -> None:
        """Log the answer to a request that has ended."""
        if not isinstance(stream, SequenceStream) or (output := stream.beginning) is None:
            return
        fields = {
            "engine_request_id": record.request_id,
            "output": output,
            "output_tokens": record.output_tokens,
            "finish_reason": record.finish_reason,
        }
        text = f"generated for {record.request_id}: {output!r}, {record.output_tokens} tokens, {record.finish_reason}"
        _log(text, fields, stream.request)


def _log(text: str, fields: dict[str, Any], request: EngineRequest) -> None:
    logger.info("%s", text, extra={"fields": fields, "request_id": request.origin.request_id})


def _changed(params: msgspec.Struct) -> str:
    """The parameters that are not the default."""
    changed = []
    for field in msgspec.structs.fields(params):
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        value = repr(getattr(params, field.name))
        if value != repr(default):
            changed.append(f"{field.name}={value}")
    return ", ".join(changed) or "default parameters"
