"""docs/api names all request fields, parsers and encoders, and its examples run against the bundled model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.engine.models.family import Composite, Family, TwoTowers
from quire.engine.models.registry import registry
from quire.parsing.reasoning_registry import PARSERS
from quire.parsing.tools.registry import FORMATS
from quire.protocol.chat import ChatRequest
from quire.protocol.completions import CompletionRequest
from quire.protocol.fields import HARMLESS, UNSUPPORTED
from quire.protocol.pooling.cohere import CohereEmbedRequest
from quire.protocol.pooling.requests import (
    ClassifyTextRequest,
    EmbeddingChatRequest,
    EmbeddingTextRequest,
    PoolingTextRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.protocol.pooling.tei import TeiEmbedRequest, TeiPredictRequest, TeiRerankRequest
from quire.protocol.speech_to_text import LanguageRequest, TranscriptionRequest, TranslationRequest
from tests.support.process import ServerProcess, serving

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving("--response-store", f"sqlite:///{tmp_path_factory.mktemp('store') / 'responses.db'}") as running:
        yield running


# Runs the code in each folder that it reads in a process of its own, in which the clients are imported already: their
# imports would take most of the time.
_RUN = """
import os, signal, sys, traceback
import anthropic.types, openai.types
for line in sys.stdin:
    folder = line.strip()
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)
        for number, name in enumerate(("stdout", "stderr"), start=1):
            os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
        status = 1
        try:
            with open(f"{folder}/code", encoding="utf-8") as file:
                exec(compile(file.read(), "example", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def interpreter() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _RUN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as running:
        yield running


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(server: ServerProcess, interpreter: subprocess.Popen[str], page: Path, tmp_path: Path) -> None:
    """What a line `print(...)  # prints TEXT` prints contains TEXT."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks, "every page has an example"
    code = "\n".join(blocks).replace("http://127.0.0.1:8000", server.url)
    (tmp_path / "code").write_text(code, encoding="utf-8")
    print(tmp_path, file=interpreter.stdin, flush=True)
    assert interpreter.stdout is not None
    status = interpreter.stdout.readline().strip()
    printed, errors = ((tmp_path / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    assert status == "0", errors
    unread = printed
    for text in re.findall(r"\)  # prints (.*)$", code, re.MULTILINE):
        assert text in unread, (text, printed)
        unread = unread.partition(text)[2]


def test_every_field_is_documented() -> None:
    named = set(re.findall(r"`([a-z_.]+)`", TEXT))
    declared = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert declared - named == set()
    assert HARMLESS - named == set()
    assert set(UNSUPPORTED) - named == set()


def test_every_field_of_pooling_is_documented() -> None:
    named = set(re.findall(r"`([a-z0-9_]+)`", TEXT))
    for kind in (
        *(EmbeddingTextRequest, EmbeddingChatRequest, ClassifyTextRequest, PoolingTextRequest, ScoreRequest),
        *(RerankRequest, CohereEmbedRequest, TeiEmbedRequest, TeiPredictRequest, TeiRerankRequest),
    ):
        assert kind.model_fields.keys() - named == set(), kind.__name__


def test_every_field_of_speech_is_documented() -> None:
    named = set(re.findall(r"`([a-z0-9_]+)`", TEXT))
    for kind in (TranscriptionRequest, TranslationRequest, LanguageRequest):
        assert kind.model_fields.keys() - named == set(), kind.__name__


def test_every_parser_is_documented() -> None:
    named = set(re.findall(r"`([a-z0-9_-]+)`", TEXT))
    assert {*PARSERS, *FORMATS} - named == set()


def test_every_encoder_is_documented() -> None:
    named = set(re.findall(r"`([a-z0-9_-]+)`", TEXT))
    families = registry().types.items()
    assert {
        kind
        for kind, family in families
        if isinstance(family, TwoTowers) or (isinstance(family, Family) and family.kind == "encoder")
    } <= named


def test_every_language_model_is_documented() -> None:
    """Types of configs inside of other models (`qwen2_vl_text`) are not served by themselves."""
    named = set(re.findall(r"`([a-z0-9_]+)`", (ROOT / "docs" / "models.md").read_text(encoding="utf-8")))
    types = {
        kind
        for kind, family in registry().types.items()
        if isinstance(family, Composite | Family)
        and family.facts is None
        and (isinstance(family, Composite) or family.kind == "decoder")
    }
    assert {kind for kind in types if not kind.endswith(("_vl_text", "_omni_text"))} - named == set()


def test_links_of_the_pages_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page.name, target)


def test_no_field_is_both_supported_and_not() -> None:
    declared = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    # Supported where pictures are, and where prefill and decode can be in two servers.
    assert declared & set(UNSUPPORTED) == {"media_io_kwargs", "mm_processor_kwargs", "kv_transfer_params"}
    assert not declared & HARMLESS
    assert not HARMLESS & set(UNSUPPORTED)
