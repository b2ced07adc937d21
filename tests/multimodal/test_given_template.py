"""A chat template given by the operator is looked at before anybody is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.options import ChatOptions
from quire.multimodal.errors import PromptError
from quire.multimodal.renderer import Renderer
from quire.multimodal.tokenizer import Tokenizer
from tests.support.tokenizer import write_tokenizer


def test_a_broken_template_file_is_refused_at_the_start(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for message in messages %}")
    with pytest.raises(PromptError, match="chat template is not valid"):
        Renderer(tmp_path, Tokenizer.load(tmp_path), ChatOptions(chat_template=broken), 100)
