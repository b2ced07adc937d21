"""Broken model folders end in an error that says what is wrong, never in an exception that nobody expects."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.support.broken_folders import DOCUMENTED, load_everything
from tests.support.process import tiny_model

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
TOKENIZER_CONFIG, GENERATION, INDEX = "tokenizer_config.json", "generation_config.json", "model.safetensors.index.json"
Breaker = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=1)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Iterator[Path]:
    copy = tmp_path / "model"
    shutil.copytree(whole, copy)
    yield copy
    for path in (copy, *copy.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o700)


def write(name: str, content: str | bytes) -> Breaker:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: void((folder / name).write_bytes(data))


def void(_: object) -> None: ...


def remove(name: str) -> Breaker:
    return lambda folder: (folder / name).unlink()


def truncate(name: str, size: int) -> Breaker:
    return lambda folder: void((folder / name).write_bytes((folder / name).read_bytes()[:size]))


def as_folder(name: str) -> Breaker:
    def breaker(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return breaker


def link_to_nothing(name: str) -> Breaker:
    def breaker(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder / "nothing")

    return breaker


def config(**changes: Any) -> Breaker:
    """Change fields of config.json."""

    def breaker(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**content, **changes}))

    return breaker


def without(*fields: str) -> Breaker:
    def breaker(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({k: v for k, v in content.items() if k not in fields}))

    return breaker


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Breaker:
    def breaker(folder: Path) -> None:
        tensors = safetensors.torch.load_file(folder / WEIGHTS)
        change(tensors)
        safetensors.torch.save_file(tensors, folder / WEIGHTS)

    return breaker


def header(change: Callable[[dict[str, Any]], object]) -> Breaker:
    """Change the header of the weights, whose data stays."""

    def breaker(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        entries = json.loads(data[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return breaker


def reshaped(shape: tuple[int, ...]) -> Breaker:
    return weights(lambda tensors: tensors.update({QUERY: torch.ones(shape)}))


def any_of(*values: Any) -> tuple[Any, ...]:
    """Values of different types."""
    return values


def entry_with(field: str, value: Any) -> Breaker:
    return header(lambda entries: first(entries).update({field: value}))


def more_entries(value: Any) -> Breaker:
    return header(lambda entries: entries.update(more=value))


def first(entries: dict[str, Any]) -> dict[str, Any]:
    first_entry: dict[str, Any] = next(entry for name, entry in entries.items() if name != "__metadata__")
    return first_entry


QUERY = "model.layers.0.self_attn.q_proj.weight"
DEEP = "[" * 100_000
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
GARBAGE = bytes(range(256)) * 8

BROKEN: dict[str, Breaker] = {
    **{f"{name} is missing": remove(name) for name in (CONFIG, WEIGHTS, TOKENIZER)},
    **{
        f"{name} is {what}": breaker
        for name in (CONFIG, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG, GENERATION, INDEX)
        for what, breaker in {
            "empty": write(name, b""),
            "garbage": write(name, GARBAGE),
            "not UTF-8": write(name, b'{"a": "\xff"}'),
            "deeply nested": write(name, DEEP),
            "null": write(name, "null"),
            "a list": write(name, "[1, 2]"),
            "a number": write(name, "7"),
            "a folder": as_folder(name),
        }.items()
    },
    **{f"{name} is truncated": truncate(name, 50) for name in (CONFIG, TOKENIZER, TOKENIZER_CONFIG)},
    **{f"the weights are cut to {size} bytes": truncate(WEIGHTS, size) for size in (1, 7, 8, 9, 100, 3000)},
    "the weights are a link to nothing": link_to_nothing(WEIGHTS),
    "the config is a link to nothing": link_to_nothing(CONFIG),
    # config.json
    "an empty config": write(CONFIG, "{}"),
    "no model type": without("model_type"),
    "an unknown model type": config(model_type="never_heard_of"),
    **{f"model_type {value!r}": config(model_type=value) for value in any_of(5, None, [], "", {"a": 1}, "../llama")},
    **{
        f"architectures {value!r}": config(architectures=value)
        for value in any_of("Llama", 5, [5], [None], ["BertModel"])
    },
    **{
        f"{name} {value!r}": config(**{name: value})
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
        for value in any_of(0, -1, 10**9, 10**30, 1.5, "64", True, [64], {})
        if (name, value) != ("max_position_embeddings", 10**9)  # a model may say so; the KV cache bounds it
    },
    **{f"num_key_value_heads {value!r}": config(num_key_value_heads=value) for value in (0, -2, 3, 10**9, "2")},
    **{f"head_dim {value!r}": config(head_dim=value) for value in (-16, 15, 1 << 20, "16", 0.5)},
    **{f"intermediate_size {value!r}": config(intermediate_size=value) for value in (0, -1, 10**9, "96", None)},
    **{
        f"rms_norm_eps {value!r}": config(rms_norm_eps=value)
        for value in any_of("1e-5", None, float("nan"), float("inf"), [1e-5])
    },
    **{f"hidden_act {value!r}": config(hidden_act=value) for value in ("swoosh", None, 5, "")},
    **{f"rope_parameters {value!r}": config(rope_parameters=value) for value in (5, "x", [1], {"rope_type": "x"})},
    "a rope without a base": config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": None}),
    "a rope whose base is 0": config(rope_parameters={"rope_type": "default", "rope_theta": 0.0}),
    "a rope whose base is not a number": config(rope_parameters={"rope_type": "default", "rope_theta": float("nan")}),
    "a rope without a factor": config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
    "a rope with a factor of 0": config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 0}),
    "a rope larger than a head": config(
        model_type="phi3", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 4.0}
    ),
    **{
        f"quantization_config {value!r}": config(quantization_config=value) for value in (5, "fp8", {"quant_method": 5})
    },
    "an unsupported quantization": config(quantization_config={"quant_method": "vptq", "bits": 4}),
    "more layers than weights": config(num_hidden_layers=9999),
    "another size": config(hidden_size=128),
    "another vocabulary": config(vocab_size=1 << 30),
    "a bias that the weights lack": config(attention_bias=True),
    # weights
    "a weight is missing": weights(lambda tensors: tensors.pop(QUERY)),
    "an unexpected weight": weights(lambda tensors: tensors.update({"model.layers.0.more": torch.ones(2)})),
    "a weight of a layer beyond the last": weights(
        lambda tensors: tensors.update({"model.layers.7.self_attn.q_proj.weight": torch.ones(2)})
    ),
    **{
        f"a weight of shape {shape}": reshaped(shape)
        for shape in ((), (0,), (5,), (64,), (3, 64), (64, 64, 1), (64, 63))
    },
    "weights of NaN": weights(lambda tensors: tensors.update({QUERY: torch.full((64, 64), float("nan"))})),
    "integers without a quantization": weights(lambda tensors: tensors.update({QUERY: tensors[QUERY].char()})),
    "weights that are a Git LFS pointer": write(WEIGHTS, LFS_POINTER),
    "a tokenizer that is a Git LFS pointer": write(TOKENIZER, LFS_POINTER),
    "a quantization without a block size": config(quantization_config={"quant_method": "fp8", "weight_block_size": 5}),
    "scales of a weight that is not packed": weights(
        lambda tensors: tensors.update({f"{QUERY}_scale_inv": torch.ones(3, 3, 3)})
    ),
    "the header is a list": write(WEIGHTS, struct.pack("<Q", 2) + b"[]"),
    "the header has no end": write(WEIGHTS, struct.pack("<Q", 1 << 60) + b"{}"),
    "the header has the largest length": write(WEIGHTS, b"\xff" * 8 + b"{}"),
    "the header is deeply nested": write(WEIGHTS, struct.pack("<Q", len(DEEP)) + DEEP.encode()),
    "no tensors": write(WEIGHTS, struct.pack("<Q", 2) + b"{}"),
    **{
        f"an entry with {field} {value!r}": entry_with(field, value)
        for field, values in (
            ("dtype", any_of("F4", 5, None, "", ["F32"])),
            ("shape", any_of(5, None, [-1, 64], ["64"], [1.5], [10**30], [1 << 40, 1 << 40], {})),
            ("data_offsets", any_of([0], [5, 0], [-8, 0], [0, 10**30], ["0", "8"], None, [0, 1, 2], [0.0, 8.0], "ab")),
        )
        for value in values
    },
    **{f"an entry that is {value!r}": more_entries(value) for value in any_of(5, None, [], {}, "x")},
    # index
    **{
        f"the index {value}": write(INDEX, value)
        for value in (
            *("{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 5}}', '{"weight_map": null}'),
            *('{"weight_map": {"a": null, "b": "x"}}', '{"weight_map": {"a": ["x"]}}', '{"weight_map": {"a": "x"}}'),
            *('{"weight_map": {"a": ""}}', '{"weight_map": {"a": "../.."}}', '{"weight_map": {"a": "config.json"}}'),
        )
    },
    # tokenizer
    "a tokenizer without a model": write(TOKENIZER, "{}"),
    "a tokenizer of an unknown kind": write(TOKENIZER, '{"version": "1.0", "model": {"type": "Magic"}}'),
    "a tokenizer with a huge id": write(
        TOKENIZER, '{"version": "1.0", "model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 99999999999}}}'
    ),
    "a negative id": write(
        TOKENIZER, '{"version": "1.0", "model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": -1}}}'
    ),
    # chat templates
    **{
        f"chat_template {value!r}": write(TOKENIZER_CONFIG, json.dumps({"chat_template": value}))
        for value in any_of(5, {"a": 1}, ["x"], [{}], [{"name": "default"}], [{"name": 5, "template": "x"}], [[]])
    },
    "a template that is not UTF-8": write("chat_template.jinja", b"\xff"),
    "a template that is a folder": as_folder("chat_template.jinja"),
    **{
        f"the template {source[:20]!r}": write("chat_template.jinja", source)
        for source in ("{% for %}", "{{", "{% if x %}", "{% unknown %}", "{{ 1 | no_such_filter }}", "{{ " + "(" * 5000)
    },
}
# What looks odd and is served all the same: wrong values of fields that are not used, or that are checked when used.
ODD: dict[str, Breaker] = {
    "nothing is wrong": lambda _: None,
    "no tokenizer_config.json": remove(TOKENIZER_CONFIG),
    "no generation_config.json": lambda folder: (folder / GENERATION).unlink(missing_ok=True),
    "sampling defaults out of range": write(
        GENERATION,
        '{"temperature": -1, "top_p": NaN, "top_k": "x", "max_new_tokens": 1e999, "eos_token_id": [-1, 1e9, "x"]}',
    ),
    "special tokens of wrong types": write(
        TOKENIZER_CONFIG, '{"eos_token": 5, "bos_token": [], "pad_token": {"a": 1}}'
    ),
    "an id beyond the vocabulary": config(eos_token_id=10**30),
}


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_a_broken_folder_is_refused_in_words(case: str, folder: Path) -> None:
    BROKEN[case](folder)
    with pytest.raises(DOCUMENTED) as refused:
        load_everything(folder)
    assert 10 < len(str(refused.value)) < 2000


@pytest.mark.parametrize("case", ODD, ids=str)
def test_an_odd_folder_is_loaded(case: str, folder: Path) -> None:
    ODD[case](folder)
    load_everything(folder)


@pytest.mark.parametrize(
    "case",
    [
        *("a weight is missing", "a weight of shape (3, 64)", "another size", "num_hidden_layers 1000000000"),
        *("head_dim 15", "the header is a list", "hidden_act 'swoosh'", "no tensors", "rope_parameters 5"),
    ],
)
def test_models_that_run_in_transformers_are_refused_alike(case: str, folder: Path) -> None:
    BROKEN[case](folder)
    with pytest.raises(DOCUMENTED):
        load_everything(folder, "--model-impl", "transformers")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", [".", CONFIG, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG, "chat_template.jinja"])
def test_files_without_permission_are_refused(name: str, folder: Path) -> None:
    (folder / name).chmod(0)
    with pytest.raises(DOCUMENTED):
        load_everything(folder)
