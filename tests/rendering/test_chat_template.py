"""Templates: the helpers that real ones use, and a sandbox around hostile ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quire.multimodal.errors import PromptError
from quire.rendering.chat_template import ChatTemplate, load_templates
from tests.support.server import running_server


def test_helpers_of_hugging_face_templates() -> None:
    source = (
        "{%- for m in messages %}\n    {%- if loop.index0 == 2 %}{% break %}{% endif %}\n"
        "    {%- generation %}{{ m.content | tojson }}{% endgeneration %}\n{%- endfor %}"
        "{{ {'a': '<\u20ac>'} | tojson(indent=1) }}{{ strftime_now('%Y') }}"
    )
    text = ChatTemplate(source).render({"messages": [{"content": c} for c in "abc"]})
    assert re.fullmatch(r'"a""b"\{\n "a": "<\u20ac>"\n\}\d{4}', text)


def test_whether_a_template_goes_through_content_parts() -> None:
    parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    indirect = "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}"
    plain = "{% for m in messages %}{{ m['content'] }}{% for t in m.tool_calls %}{% endfor %}{% endfor %}"
    assert ChatTemplate(parts).wants_parts
    assert ChatTemplate(indirect).wants_parts
    assert not ChatTemplate(plain).wants_parts


def test_variables_that_a_template_reads() -> None:
    template = ChatTemplate("{% set x = 1 %}{% if enable_thinking is defined %}{{ x }}{% endif %}{{ messages }}")
    assert template.variables == {"enable_thinking", "messages"}


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('because') }}",
        "{{ messages.nothing.at.all }}",
        "{{ messages | tojson | int / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ missing_function() }}",
    ],
)
def test_templates_that_fail_or_attack_are_refused(source: str) -> None:
    with pytest.raises(PromptError):
        ChatTemplate(source).render({"messages": [1]})


def test_a_template_that_is_none_is_refused() -> None:
    with pytest.raises(PromptError, match="not valid"):
        ChatTemplate("{% for %}")


def test_where_templates_are_kept(tmp_path: Path) -> None:
    assert load_templates(tmp_path, {}) == {}
    assert load_templates(tmp_path, {"chat_template": "a"}) == {"default": "a"}
    several = {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}
    assert load_templates(tmp_path, several) == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of the processor"}')
    assert load_templates(tmp_path, several) == {"default": "of the processor", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("c")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("d")
    assert load_templates(tmp_path, several) == {"default": "c", "tool_use": "b", "rag": "d"}
    assert json.loads(ChatTemplate("{{ 'x' | tojson }}").render({})) == "x"


CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "template",
    [
        "{{" + "(" * 5000,
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{{ " + "+".join(["a"] * 20_000) + " }}",
        r"{{ '\ud800' }}",
        r"{{ raise_exception('\ud800') }}",
        "{{ 'x' * 10 ** 15 }}",
        "{{ 'x'.encode('none') }}",
    ],
)
async def test_hostile_templates_are_refused(tmp_path: Path, template: str) -> None:
    async with running_server(tmp_path, trust_request_chat_template=True) as server:
        answer = await server.post(CHAT, {"messages": HI, "chat_template": template})
        assert answer.status_code == 400, answer.text


def test_colqwen_has_the_prompts_that_it_was_trained_with(tmp_path: Path) -> None:
    """Its folder has the template of the model that it was made of."""
    (tmp_path / "chat_template.jinja").write_text("other")
    (tmp_path / "config.json").write_text('{"model_type": "colqwen2"}')
    (tmp_path / "processor_config.json").write_text('{"query_prefix": "Ask \\"it\\": "}')
    template = ChatTemplate(load_templates(tmp_path, {})["default"])

    def rendered(role: str, *content: dict[str, str]) -> str:
        return template.render({"messages": [{"role": role, "content": list(content)}], "pad_token": "."})

    text, picture, video = {"type": "text", "text": "a"}, {"type": "image"}, {"type": "video"}
    assert rendered("query", text) == rendered("user", text) == 'Ask "it": a..........\n'
    assert rendered("document", text) == "a"
    assert (
        rendered("document", picture)
        == rendered("user", picture)
        == ("<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>")
    )
    assert rendered("document", video) == rendered("document", picture).replace("image_pad", "video_pad")
    for wrong in ((text, picture), (picture, picture), (video, picture)):
        with pytest.raises(PromptError, match="a text, one picture or one video"):
            rendered("user", *wrong)
    with pytest.raises(PromptError, match="role system"):
        rendered("system", text)
