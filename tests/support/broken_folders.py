"""All that a server reads of a model's folder."""

from __future__ import annotations

from pathlib import Path

from quire.config.commands import Serve
from quire.config.options import ChatOptions, EngineOptions, ModelOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.engine import build_core
from quire.engine.client.protocol import ClientMessage, CoreMessage
from quire.engine.execution.cache import OutOfCacheMemory
from quire.engine.models.errors import ModelError
from quire.engine.models.model_config import read_model_config
from quire.multimodal.errors import ModelFileError, PromptError
from quire.parsing.parsers import parser_tokens, reasoning_tags, tool_format
from quire.rendering.chat_template import ChatTemplate
from quire.rendering.prompts import PromptBuilder
from quire.rendering.tokenizer import Tokenizer
from quire.serving.defaults import read_defaults

DOCUMENTED = (ModelError, ModelFileError, OutOfCacheMemory, PromptError)  # what `quire serve` turns into one line


class SilentChannel:
    """A front end that says nothing."""

    inbox = None

    def send(self, message: CoreMessage) -> None: ...

    def receive(self, timeout: float | None) -> ClientMessage | None:
        return None

    def receive_arrived(self, *kinds: type[ClientMessage]) -> ClientMessage | None:
        return None


def load_everything(folder: Path, *flags: str) -> None:
    """All that a server reads of a model's folder, in its order."""
    settings = Serve.parse(
        [str(folder), "--kv-cache-memory-bytes", "4MiB", "--max-num-seqs", "2", "--num-threads", "1", *flags]
    )
    tokenizer = Tokenizer.load(folder)
    config = CoreConfig(
        folder=folder,
        model_config=read_model_config(folder, settings.model_impl),
        model=ModelOptions.of(settings),
        engine=EngineOptions.of(settings),
    )
    core, info = build_core(config, SilentChannel())  # type: ignore[arg-type]
    core.close()
    builder = PromptBuilder(folder, tokenizer, ChatOptions.of(settings), info.max_model_len)
    read_defaults(folder, tokenizer, settings.generation_config)
    templates = "\n".join(builder.sources.values())
    tags, tools = reasoning_tags("auto", templates), tool_format("auto", templates)
    parser_tokens(tags, tools, tokenizer.special_tokens)
    for source in builder.sources.values():
        ChatTemplate(source)
