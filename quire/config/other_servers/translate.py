"""From a command line that was written for another server to Quire's own flags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from quire.config.command import ConfigError
from quire.config.other_servers import values
from quire.config.other_servers.table import OtherServerFlag, Server, flags_of

# Values that need more than another name; each gives all flags that replace the flag.
_CONVERTERS: Mapping[str, Callable[[str], list[str]]] = {
    "--max-model-len": values.context_length,
    "--max-num-batched-tokens": lambda value: ["--max-num-batched-tokens", values.count(value)],
    "--kv-cache-dtype": values.cache_dtype,
    "--kv-cache-memory-bytes": lambda value: ["--kv-cache-memory-bytes", values.count(value)],
    "--h11-max-incomplete-event-size": lambda value: ["--max-header-size", value],
    "--allowed-origins": lambda value: values.repeated("--allowed-origins", value),
    "--limit-mm-per-prompt": values.media_limits,
    "--attention-config": values.attention_config,
    "--speculative-config": values.speculative_config,
    "--structured-outputs-config": values.structured_outputs,
    "--model": lambda value: [value],
    "--hf-repo": lambda value: [value],
    "--model-url": lambda value: [value],
    "--runner": values.runner,
    "--convert": lambda value: [] if value == "auto" else ["--convert", value],
}


_SERVERS: tuple[Server, ...] = ("llama_server", "vllm")  # vLLM's meaning of a name comes first
_HF_FLAGS = {"--hf-repo": ("--hf-repo", "-hf", "-hfr"), "--hf-file": ("--hf-file", "-hff")}
# Flags whose values are JSON objects.
_OBJECTS = (
    "--attention-config",
    "--custom-histogram-buckets",
    "--default-chat-template-kwargs",
    "--hf-overrides",
    "--kv-events-config",
    "--kv-transfer-config",
    "--limit-mm-per-prompt",
    "--media-io-kwargs",
    "--mm-processor-kwargs",
    "--override-generation-config",
    "--pooler-config",
    "--profiler-config",
    "--speculative-config",
    "--structured-outputs-config",
)


def translate_flags(arguments: Sequence[str], our_flags: frozenset[str]) -> tuple[list[str], list[str]]:
    """Quire's flags for those of a command line, and a note for each flag that was replaced or has no effect.

    `our_flags`: Quire's flags. What is in no table stays as it is.

    Raises:
        ConfigError: a flag of another server has no counterpart, or not with this value.
    """
    remaining = _with_hf_file(merge_dotted_keys(arguments, _object_flag))
    models = list[str]()
    result = list[str]()
    notes = list[str]()
    names = _by_name()
    model_given = not arguments[0].startswith("-") if arguments else False
    model_given = model_given or any(argument.partition("=")[0] == "--model" for argument in arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = _parts(argument)
        entry = _find(name, our_flags)
        if entry is None:
            result.append(name + equals + value if name in our_flags else argument)
            if model_given and not equals and name in names and names[name].several:
                result += (values_given := _repeated(name, remaining))
                if len(values_given) > 1:
                    count = 1 + values_given.count(name)
                    notes.append(
                        f"{name} takes the {count} values that follow it, as in vLLM; put MODEL before all flags, "
                        "otherwise only the first value belongs to it"
                    )
            continue
        if entry.kind == "refused":
            raise ConfigError(_refusal(name, entry))
        if not entry.switch and not equals:
            value = _next_value(name, remaining)
            while entry.kind == "ignored" and remaining and remaining[0].isdecimal():  # vLLM's lists of numbers
                remaining.pop(0)
        replaced, note = _replaced(name, entry, value)
        if name == "--runner":
            result[:0] = replaced  # --convert, if it is given, comes later and counts
        else:
            (models if entry.ours == "MODEL" else result).extend(replaced)
        notes += note
    return [*models, *result], notes


def _with_hf_file(arguments: Sequence[str]) -> list[str]:
    """The arguments with the file of llama-server's --hf-file in the name of the repository in --hf-repo.

    Raises:
        ConfigError: one of these flags is there without the other, or has no value.
    """
    values_by_flag: dict[str, str] = {}
    result = list[str]()
    left = list(arguments)
    while left:
        name, equals, value = _parts(left[0])
        flag = next((flag for flag, names in _HF_FLAGS.items() if name in names), None)
        if flag is None:
            result.append(left.pop(0))
            continue
        left.pop(0)
        values_by_flag[flag] = value if equals else _next_value(name, left)
    if "--hf-file" not in values_by_flag:
        return list(arguments)
    if "--hf-repo" not in values_by_flag:
        raise ConfigError("--hf-file of llama-server needs --hf-repo")
    repository = values_by_flag["--hf-repo"].partition(":")[0]
    return ["--hf-repo", f"{repository}/{values_by_flag['--hf-file']}", *result]


def _parts(argument: str) -> tuple[str, str, str]:
    """Name, equals sign and value of an argument; -O3 is short for -O=3."""
    if re.fullmatch(r"-O\d", argument):
        return "-O", "=", argument[2:]
    name, equals, value = argument.partition("=")
    return _normal(name) if name.startswith("--") else name, equals, value


def _normal(name: str) -> str:
    """vLLM takes underscores and dashes alike, but not in keys behind a dot."""
    flag, dot, keys = name[2:].partition(".")
    return "--" + flag.replace("_", "-") + dot + keys


def _object_flag(name: str) -> str | None:
    """The flag of this name, short or long, if its value is a JSON object whose keys may be given one by one."""
    name = _normal(name) if name.startswith("--") else name
    entry = _by_name().get(name)
    flag = name if entry is None else entry.names[0]
    return flag if flag in _OBJECTS else None


def _find(name: str, our_flags: frozenset[str]) -> OtherServerFlag | None:
    """The entry of a flag; None if it is Quire's own and needs no change, or is in no table."""
    entries = _by_name()
    entry = entries.get(name)
    if entry is None and name.startswith("--no-"):
        entry = entries.get("--" + name.removeprefix("--no-"))
        entry = entry if entry is not None and entry.switch else None
    if entry is None and "." in name:
        entry = entries.get(name.partition(".")[0])
    if entry is None or entry.kind == "same":
        return None
    return None if name in our_flags and not (entry.values or name in _CONVERTERS) else entry


def _next_value(name: str, arguments: list[str]) -> str:
    if not arguments or arguments[0].startswith("--"):
        raise ConfigError(f"{name} expects a value")
    return arguments.pop(0)


def _repeated(name: str, arguments: list[str]) -> list[str]:
    """The flag's further values, each behind the repeated flag; the first flag has been passed on."""
    if not arguments or arguments[0].startswith("-"):
        return []
    result = [arguments.pop(0)]
    while arguments and not arguments[0].startswith("-") and "=" not in result[0]:
        result += [name, arguments.pop(0)]
    return result


def _replaced(name: str, flag: OtherServerFlag, value: str) -> tuple[list[str], list[str]]:
    """Quire's flags that replace a flag, and a note for the log."""
    shown = name if flag.switch else f"{name} {value}"
    if flag.kind == "ignored":
        if flag.only and value not in flag.only:
            raise ConfigError(_refusal(shown, flag))
        return [], [f"{shown} has no effect: {flag.note}"]
    if flag.switch:
        negated = _negated(flag.ours) if name.startswith("--no-") else flag.ours
        return [negated], [f"{name} is translated to {negated}"]
    convert = _CONVERTERS.get(flag.names[0])
    try:
        new = convert(value) if convert is not None else [flag.ours, flag.values.get(value, value)]
    except ValueError as error:
        raise ConfigError(f"{shown} is not supported: {error}") from error
    if new in ([name, value], [value]):
        return new, []
    if not new:
        return new, [f"{shown} has no effect: it is the default, or sets nothing that Quire has"]
    remark = f" ({flag.note})" if convert is None and flag.note else ""
    return new, [f"{shown} is translated to {' '.join(new)}{remark}"]


def _negated(flag: str) -> str:
    return "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else "--no-" + flag.removeprefix("--")


def _refusal(shown: str, flag: OtherServerFlag) -> str:
    """Return an error that names Quire's flag, if there is one."""
    server = "llama-server" if flag in flags_of("llama_server") else "vLLM"
    equivalent = f"; Quire's is {flag.ours}" if flag.ours else ""
    return f"{shown} of {server} is not supported{equivalent}" + (f": {flag.note}" if flag.note else "")


@cache
def _by_name() -> Mapping[str, OtherServerFlag]:
    """Return the flags of both servers by all of their names."""
    return {
        _normal(name) if name.startswith("--") else name: flag
        for server in _SERVERS
        for flag in flags_of(server)
        for name in flag.names
    }


def merge_dotted_keys(arguments: Sequence[str], object_flag: Callable[[str], str | None]) -> list[str]:
    """Join the keys of JSON objects that are given one by one, as vLLM takes them, where the first one was.

    `--flag.a.b 1` sets the key b of the object a, and `--flag.list+ x,y` appends to a list. A value is JSON, else text.

    `object_flag`: from the name of a flag to the flag whose value is a JSON object; None for others.

    Raises:
        ConfigError: a key has no value, or is within something that is no object or list.
    """
    objects = {
        flag: dict[str, Any]()
        for argument in arguments
        if argument.startswith("-") and "." in _name(argument)
        if (flag := object_flag(_name(argument).partition(".")[0])) is not None
    }
    result: list[str | dict[str, Any]] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        name, equals, value = argument.partition("=")
        base, dot, keys = name.partition(".")
        flag = object_flag(base) if argument.startswith("-") else None
        if flag is None or flag not in objects:
            result.append(argument)
            continue
        if not equals:
            if not left or left[0].startswith("--"):
                raise ConfigError(f"{name} expects a value")
            value = left.pop(0)
        if dot:
            _set(objects[flag], keys, value, name)
        else:
            _merge(objects[flag], _object(value, name))
        if not any(part is objects[flag] for part in result):
            result += [flag, objects[flag]]
    return [part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in result]


def _name(argument: str) -> str:
    return argument.partition("=")[0]


def _set(target: dict[str, Any], keys: str, text: str, name: str) -> None:
    """Set the key that a path leads to, or append to the list there if the path ends with a plus sign."""
    *path, last = keys.removesuffix("+").split(".")
    if not all((*path, last)):
        raise ConfigError(f"{name} has an empty key")
    for key in path:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{name}: the value of {key!r} is not an object")
    if not keys.endswith("+"):
        target[last] = _value(text)
        return
    items = target.setdefault(last, [])
    if not isinstance(items, list):
        raise ConfigError(f"{name}: the value of {last!r} is not a list")
    items += [_value(part) for part in text.split(",")]


def _merge(target: dict[str, Any], source: dict[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def _object(text: str, name: str) -> dict[str, Any]:
    value = _value(text)
    if not isinstance(value, dict):
        raise ConfigError(f"{name} expects a JSON object, not {text[:200]!r}")
    return value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
