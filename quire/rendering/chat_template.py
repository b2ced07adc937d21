"""Chat templates: Jinja in a sandbox, with the helpers that Hugging Face templates rely on."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.engine.client.json_file import read_json
from quire.multimodal.errors import ModelFileError, PromptError

# Exceptions that a template may raise. Deeply nested or very long ones exceed limits of Python's compiler.
_FAILURES = (
    *(TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError),
    *(RuntimeError, SyntaxError, MemoryError),
)


class _GenerationTag(Extension):
    """`{% generation %}` marks text for training; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 the library's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


class ChatTemplate:
    """A compiled template.

    Attributes:
        variables: names that it reads; others have no effect.
        keys: keys of objects that it reads; None: it writes whole messages, so that all of their fields have an effect.
        wants_parts: it loops over the parts of a message's content; otherwise content is passed as text.
    """

    def __init__(self, source: str) -> None:
        """Compile a template.

        Raises:
            PromptError: the source is not a valid template.
        """
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, *_FAILURES) as error:
            raise PromptError(f"The chat template is not valid: {error}", "chat_template") from error
        self.source = source
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        self.keys = None if _writes_messages(tree) else _keys(tree)
        self.wants_parts = _loops_over_content(tree)

    def render(self, variables: dict[str, Any]) -> str:
        """Render with these variables.

        Raises:
            PromptError: the template refuses the messages or fails.
        """
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise PromptError(f"The chat template refused the messages: {error}", "messages") from error
        except _FAILURES as error:
            raise PromptError(
                f"The chat template failed on the messages: {str(error) or type(error).__name__}", "messages"
            ) from error


# Mistral's library renders chats for Voxtral, so that its folders have no template.
_VOXTRAL = """\
{%- macro text(content) %}{% for part in content %}{{ part.text }}{% endfor %}{% endmacro -%}
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == "system" %}[SYSTEM_PROMPT]{{ text(message.content) }}[/SYSTEM_PROMPT]
{%- elif message.role == "assistant" %}{{ text(message.content) }}{{ eos_token }}
{%- elif message.role == "user" %}[INST]
{%- for part in message.content %}
{%- if part.type == "audio" %}[BEGIN_AUDIO][AUDIO]{% else %}{{ part.text }}{% endif %}
{%- endfor %}[/INST]
{%- else %}{{ raise_exception("Messages of the role " ~ message.role ~ " are not supported by Voxtral.") }}
{%- endif %}
{%- endfor %}"""
# Models of late interaction, which compare texts with pictures, read either one picture or a text. `picture` and
# `video` are whole prompts, `start` and `end` are around texts, and `before` is in front of those of queries.
_LATE_INTERACTION = """\
{%- if messages | length != 1 %}
{{- raise_exception("This model reads one message, which is a text, a picture or a video.") }}
{%- endif %}
{%- for message in messages %}
{%- set media = message.content | rejectattr("type", "equalto", "text") | list %}
{%- if media and message.content | length > 1 %}
{{- raise_exception("This model reads a text, one picture or one video, not several of them.") }}
{%- elif media %}{{ video if media[0].type == "video" else picture }}
{%- elif message.role in ("query", "user") %}
{{- start ~ before }}{% for part in message.content %}{{ part.text }}{% endfor %}{{ pad_token * 10 ~ "\\n" }}
{%- elif message.role == "document" %}
{{- start }}{% for part in message.content %}{{ part.text }}{% endfor %}{{ end }}
{%- else %}{{ raise_exception("Messages of the role " ~ message.role ~ " are not supported by this model.") }}
{%- endif %}
{%- endfor %}"""
_COLQWEN_IMAGE, _COLQWEN_VIDEO = "<|image_pad|>", "<|video_pad|>"
_COLQWEN_PICTURE = (
    f"<|im_start|>user\n<|vision_start|>{_COLQWEN_IMAGE}<|vision_end|>Describe the image.<|im_end|><|endoftext|>"
)
# Its processor makes prompts without roles: all pictures, then one text that a line feed ends.
_PALIGEMMA = """\
{%- for message in messages %}
{%- if message.role not in ("system", "user") %}
{{- raise_exception("Messages of the role " ~ message.role ~ " are not supported by PaliGemma.") }}
{%- endif %}
{%- for part in message.content if part.type == "image" %}<image>{% endfor %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
{%- for part in message.content if part.type == "text" %}{{ part.text }}{% endfor %}
{{- "\\n" }}
{%- endfor %}"""
_TYPES_OF_LATE_INTERACTION = ("colpali", "colqwen2")
_BUILT_IN = {"paligemma": _PALIGEMMA, "voxtral": _VOXTRAL}  # by model type


def load_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Sources of a model's chat templates by name; the main one is `default`.

    Raises:
        ModelFileError: a template cannot be read.
    """
    templates: dict[str, str] = {}
    inline = config.get("chat_template")
    if not isinstance(inline, list):
        inline = [{"name": "default", "template": inline}] if inline else []
    for entry in inline:
        name, template = (entry.get(key) if isinstance(entry, dict) else None for key in ("name", "template"))
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelFileError(
                f"{folder / 'tokenizer_config.json'}: chat_template must be a string, or a list of objects with name "
                "and template"
            )
        templates[name] = template
    for path in (folder / "additional_chat_templates").glob("*.jinja"):
        templates[path.stem] = _read(path)
    # Of models that read pictures, older versions of transformers write the processor's template to a file of its own.
    if isinstance(processor := read_json(folder / "chat_template.json", ModelFileError).get("chat_template"), str):
        templates["default"] = processor
    main = folder / "chat_template.jinja"
    if main.exists():
        templates["default"] = _read(main)
    kind = read_json(folder / "config.json", ModelFileError).get("model_type")
    if "default" not in templates and kind in _BUILT_IN:
        templates["default"] = _BUILT_IN[kind]
    if kind in _TYPES_OF_LATE_INTERACTION:  # folders may have the template of the model that it was trained from
        templates["default"] = _late_interaction_template(kind, folder)
    return templates


def _late_interaction_template(kind: str, folder: Path) -> str:
    """The prompts that a model was trained with: of pictures, and of queries, which end with padding.

    A video has the prompt of a picture.

    Raises:
        ModelFileError: the processor's config cannot be read.
    """
    processor = read_json(folder / "processor_config.json", ModelFileError)

    def text(name: str, default: str) -> str:
        return json.dumps(processor.get(name) or default, ensure_ascii=False)

    if kind == "colpali":
        prompt = text("visual_prompt_prefix", "Describe the image.")
        picture, before = f'"<image>" ~ bos_token ~ {prompt} ~ "\\n"', text("query_prefix", "Question: ")
        start, end = "bos_token", '"\\n"'
    else:
        picture, before = text("visual_prompt_prefix", _COLQWEN_PICTURE), text("query_prefix", "Query: ")
        start = end = '""'
    video = picture.replace(_COLQWEN_IMAGE, _COLQWEN_VIDEO)
    values = {"picture": picture, "video": video, "before": before, "start": start, "end": end}
    return "".join(f"{{%- set {name} = {value} %}}" for name, value in values.items()) + _LATE_INTERACTION


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ModelFileError(f"the chat template {path} cannot be read: {error}") from error


def _keys(tree: nodes.Template) -> frozenset[str]:
    """Names of attributes, and texts that may be keys of objects."""
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(filter(str.isidentifier, texts)) | {node.attr for node in tree.find_all(nodes.Getattr)}


def _writes_messages(tree: nodes.Template) -> bool:
    """Return whether it writes whole messages as JSON."""

    def names_in(node: nodes.Node) -> set[str]:
        return {name.name for name in (node, *node.find_all(nodes.Name)) if isinstance(name, nodes.Name)}

    loops = [loop for loop in tree.find_all(nodes.For) if any("message" in name for name in names_in(loop.iter))]
    messages = set().union(*(names_in(loop.target) for loop in loops))
    written = (filtered.node for filtered in tree.find_all(nodes.Filter) if filtered.name == "tojson")
    names = {node.name for node in written if isinstance(node, nodes.Name)}
    return any(name in messages or "message" in name for name in names)


def _loops_over_content(tree: nodes.Template) -> bool:
    """Return whether a `for` loops over a message's content, directly or through a variable."""

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"

    content_variables = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and is_content(assign.node)
    }

    def loops_over_content(loop: nodes.For) -> bool:
        return is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in content_variables)

    return any(loops_over_content(loop) for loop in tree.find_all(nodes.For))
