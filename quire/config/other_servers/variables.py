"""Environment variables of vLLM: those that Quire has a setting for are obeyed, all others are named in a warning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from quire.config.command import Command, ConfigError
from quire.config.environment import is_service_link
from quire.config.value_help import describe

PREFIX = "VLLM_"
_LEVELS = {"trace": "debug", "critical": "error", "fatal": "error", "warn": "warning"}


@dataclass(frozen=True, slots=True)
class VllmVariable:
    """A variable of vLLM with the meaning of a setting.

    Attributes:
        field: the setting.
        convert: from the variable's text to a value of the setting; None: the default.
        is_secret: the value must not be logged.
        note: how the value is written, for the documentation.
    """

    field: str
    convert: Callable[[str], Any] = str
    is_secret: bool = False
    note: str = ""


def _gib(text: str) -> str | None:
    return None if text.strip() == "0" else f"{text}GiB"


def _redirects(text: str) -> str | None:
    return None if text.strip() == "1" else text


def _interval(text: str) -> str | None:
    return None if text.strip().startswith("-") or not text.strip("0. ") else text


def _hub(text: str) -> str | None:
    return "modelscope" if text.strip().lower() in ("1", "true") else None


def _level(text: str) -> str:
    return _LEVELS.get(text.lower(), text.lower())


VARIABLES: Mapping[str, VllmVariable] = {
    "VLLM_API_KEY": VllmVariable("api_key", lambda text: (text,), is_secret=True, note="one key"),
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": VllmVariable("timeout_keep_alive"),
    "VLLM_LOGGING_LEVEL": VllmVariable("log_level", _level),
    "VLLM_LOG_STATS_INTERVAL": VllmVariable("log_stats_interval", _interval, note="0 is the default"),
    "VLLM_USE_MODELSCOPE": VllmVariable("model_hub", _hub, note="True is modelscope"),
    "VLLM_ATTENTION_BACKEND": VllmVariable("attention_backend"),
    "VLLM_HOST_IP": VllmVariable("node_addr"),
    "VLLM_CPU_KVCACHE_SPACE": VllmVariable("kv_cache_memory_bytes", _gib, note="in GiB; 0 is the default"),
    "VLLM_AUDIO_FETCH_TIMEOUT": VllmVariable("media_fetch_timeout"),
    "VLLM_IMAGE_FETCH_TIMEOUT": VllmVariable("media_fetch_timeout"),
    "VLLM_VIDEO_FETCH_TIMEOUT": VllmVariable("media_fetch_timeout"),
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": VllmVariable("max_media_redirects", _redirects, note="1 is the default; 0: none"),
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": VllmVariable("max_audio_size", lambda text: f"{text}MiB", note="in MiB"),
    "VLLM_MAX_AUDIO_DECODE_DURATION_S": VllmVariable("max_audio_seconds"),
    "VLLM_MAX_AUDIO_DECODE_BYTES": VllmVariable("max_audio_decoded_size"),
    "VLLM_MAX_IMAGE_PIXELS": VllmVariable("max_image_pixels"),
    "VLLM_MAX_N_SEQUENCES": VllmVariable("max_n"),
    "VLLM_MAX_COMPLETION_PROMPTS": VllmVariable("max_prompts"),
    "VLLM_MAX_STOP_STRINGS": VllmVariable("max_stop"),
    "VLLM_MAX_NUM_BAD_WORDS": VllmVariable("max_bad_words"),
}
_ALWAYS = ("VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK")  # no statistics are ever sent


class VllmVariables(PydanticBaseSettingsSource):
    """The settings in vLLM's variables: a source of lower precedence than Quire's own variables, flags and file."""

    def __init__(self, settings_cls: type[BaseSettings], environment: Mapping[str, str]) -> None:
        super().__init__(settings_cls)
        self._environment = environment

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise KeyError(field_name)  # __call__ reads all variables at once

    def __call__(self) -> dict[str, Any]:
        command = cast("type[Command]", self.settings_cls)
        settings = {}
        for name, variable in VARIABLES.items():
            text = self._environment.get(name)
            if text is None or is_service_link(name, text) or variable.field in self.current_state:
                continue
            value = variable.convert(text)
            if value is not None:
                settings[variable.field] = _checked(command, name, text, value)
        return settings


def notes_on_variables(settings: Command, environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return what to say about the variables of vLLM: which are obeyed, and as warnings, which have no effect."""
    obeyed, ineffective, unknown = [], [], []
    for name in sorted(environment):
        text = environment[name]
        if not name.startswith(PREFIX) or name in _ALWAYS or is_service_link(name, text):
            continue
        variable = VARIABLES.get(name)
        if variable is None:
            unknown.append(name)
            continue
        flag = settings.flag(variable.field)
        value = variable.convert(text)
        if value is None:
            continue
        if _is_value(type(settings), variable.field, value, getattr(settings, variable.field)):
            obeyed.append(
                f"the variable {name} of vLLM is taken as {flag}" + ("" if variable.is_secret else f" {text}")
            )
        else:
            ineffective.append(f"the variable {name} of vLLM has no effect: {flag} is set")
    if unknown:
        ineffective.append(f"variables of vLLM that have no effect: {', '.join(unknown)}")
    return obeyed, ineffective


def _is_value(command: type[Command], field: str, value: Any, current: Any) -> bool:
    try:
        return bool(_validated(command, field, value) == current)
    except ValidationError:  # of a variable that is not read, as another source has the setting
        return False


def _validated(command: type[Command], field: str, value: Any) -> Any:
    info = command.model_fields[field]
    annotated: Any = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
    return TypeAdapter[Any](annotated).validate_python(value)


def _checked(command: type[Command], name: str, text: str, value: Any) -> Any:
    variable = VARIABLES[name]
    try:
        _validated(command, variable.field, value)
    except ValidationError as error:
        shown = "" if variable.is_secret else f", not {text[:200]!r}"
        raise ConfigError(
            f"quire {command.name}: the variable {name} becomes {command.flag(variable.field)}, which expects "
            f"{describe(command.model_fields[variable.field])}{shown}"
        ) from error
    return value
