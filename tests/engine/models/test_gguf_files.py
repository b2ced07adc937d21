"""GGUF files: what they say is read, and what is broken is refused by name, whatever numbers are in them."""

from __future__ import annotations

import math
import os
import random
import re
import time
import tracemalloc
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quire.engine.models.checkpoint.gguf.blocks import PLAIN, stored_blocks
from quire.engine.models.checkpoint.gguf.container import GgufFile, open_parts
from quire.engine.models.errors import BrokenFolder, ModelError, UnsupportedModel
from tests.support.changed_files import changed_bytes
from tests.support.gguf_broken import KINDS, broken, parts, whole
from tests.support.gguf_bytes import Container, Place, number
from tests.support.real import real_files

MOST_MEMORY = 8 << 20
MOST_CHARACTERS = 800  # of an error


def numbers_of(file: GgufFile, name: str, step: int = 1) -> Tensor:
    """The numbers of a tensor. `step`: between the rows that are read."""
    info = file.tensors[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        data = torch.frombuffer(file.map, dtype=torch.uint8, count=info.end - info.begin, offset=info.begin).clone()
    if info.kind.name in PLAIN:
        return data.view(PLAIN[info.kind.name]).view(info.shape)[::step]
    blocks = data.view(math.prod(info.shape[:-1]), info.shape[-1] // info.kind.values, info.kind.nbytes)
    numbers = stored_blocks(blocks[::step], info.kind).dequantize(torch.float32)
    return numbers.view(info.shape) if step == 1 else numbers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.mark.parametrize("kind", KINDS)
def test_broken_files_are_refused_by_name(kind: str, folder: Path) -> None:
    tracemalloc.start()
    try:
        for case in broken(kind):
            path = case.written(folder)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with pytest.raises((BrokenFolder, UnsupportedModel)) as caught:
                open_parts(path)
            error = str(caught.value)
            assert any(error.startswith(name) for name in case.files), (case.label, error)
            assert re.search(case.subject, error), (case.label, error)
            assert len(error) < MOST_CHARACTERS, case.label
            assert tracemalloc.get_traced_memory()[1] - before < MOST_MEMORY, case.label
    finally:
        tracemalloc.stop()


def test_there_are_hundreds_of_broken_files() -> None:
    assert sum(len(broken(kind)) for kind in KINDS) >= 300


def check_any(path: Path) -> None:
    """Check that a file is read as a whole, or refused."""
    try:
        files = open_parts(path)
    except ModelError as error:
        refused = str(error)
    else:
        refused = ""
        check_readable(files)
    assert len(refused) < MOST_CHARACTERS


def check_readable(files: list[GgufFile]) -> None:
    for file in files:
        for value in file.metadata.values():
            repr(value)
        for name in file.tensors:
            numbers_of(file, name)


def fuzz(folder: Path, seeds: range | None, seconds: float) -> int:
    """Read changed files, for all seeds or for some seconds. Returns how many there were."""
    bases = [whole().encoded(), *parts().values()]
    end = time.monotonic() + seconds
    count = 0
    for seed in seeds or range(1 << 62):
        if seeds is None and time.monotonic() > end:
            break
        source = random.Random(seed)
        path = folder / "fuzzed.gguf"
        path.write_bytes(changed_bytes(source.choice(bases), source))
        try:
            check_any(path)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        count += 1
    return count


def test_changed_files_are_read_or_refused(tmp_path: Path) -> None:
    assert fuzz(tmp_path, range(200), 0) == 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_changed_files_for_a_while(tmp_path: Path) -> None:
    assert fuzz(tmp_path, None, float(os.environ.get("FUZZ_SECONDS", "60"))) > 100


def written(path: Path, split_max_tensors: int = 0) -> Path:
    """A file of the package with values of all kinds."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split_max_tensors)
    writer.add_uint8("some.uint8", 200)
    writer.add_int8("some.int8", -100)
    writer.add_uint16("some.uint16", 60_000)
    writer.add_int16("some.int16", -30_000)
    writer.add_uint32("some.uint32", 1 << 31)
    writer.add_int32("some.int32", -(1 << 31))
    writer.add_uint64("some.uint64", 1 << 63)
    writer.add_int64("some.int64", -(1 << 63))
    writer.add_float32("some.float32", 0.25)
    writer.add_float64("some.float64", 1e300)
    writer.add_bool("some.bool", True)
    writer.add_string("some.text", "\N{SNOWMAN} and\nlines")
    writer.add_array("some.texts", ["a", "", "\N{SNOWMAN}", "a" * 300])
    writer.add_array("some.integers", [1, -2, 3])
    writer.add_array("some.numbers", [0.5, -1.0])
    writer.add_array("some.flags", [True, False])
    for index in range(4):
        writer.add_tensor(f"blk.{index}.attn_q.weight", np.full((2, 3), index, np.float32))
    writer.add_tensor("output.weight", gguf.quantize(np.full((4, 64), 127, np.float32), Q8_0), raw_dtype=Q8_0)
    writer.add_tensor("half", np.arange(6, dtype=np.float16).reshape(1, 2, 3))
    writer.add_tensor("exact", np.arange(3, dtype=np.float64))
    writer.add_tensor("integers", np.arange(3, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Q8_0 = gguf.GGMLQuantizationType.Q8_0


def test_values_and_tensors_of_the_packages_files(tmp_path: Path) -> None:
    file = GgufFile(written(tmp_path / "model.gguf"))
    values = {
        key.removeprefix("some."): value if isinstance(value, str | int | float) else list(value)
        for key, value in file.metadata.items()
        if key.startswith("some.")
    }
    assert values == {
        "uint8": 200,
        "int8": -100,
        "uint16": 60_000,
        "int16": -30_000,
        "uint32": 1 << 31,
        "int32": -(1 << 31),
        "uint64": 1 << 63,
        "int64": -(1 << 63),
        "float32": 0.25,
        "float64": 1e300,
        "bool": True,
        "text": "\N{SNOWMAN} and\nlines",
        "texts": ["a", "", "\N{SNOWMAN}", "a" * 300],
        "integers": [1, -2, 3],
        "numbers": [0.5, -1.0],
        "flags": [True, False],
    }
    texts = file.metadata["some.texts"]
    assert not isinstance(texts, int | float)
    assert (texts[2], texts[-1], list(texts[1:3]), len(texts)) == ("\N{SNOWMAN}", "a" * 300, ["", "\N{SNOWMAN}"], 4)
    assert torch.equal(numbers_of(file, "blk.2.attn_q.weight"), torch.full((2, 3), 2.0))
    assert torch.equal(numbers_of(file, "output.weight"), torch.full((4, 64), 127.0))
    assert torch.equal(numbers_of(file, "half"), torch.arange(6).view(1, 2, 3).half())
    assert torch.equal(numbers_of(file, "exact"), torch.arange(3).double())
    assert torch.equal(numbers_of(file, "integers"), torch.arange(3).int())


def test_split_files_are_one_model(tmp_path: Path) -> None:
    written(tmp_path / "model.gguf", split_max_tensors=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"model-0000{index}-of-00003.gguf" for index in (1, 2, 3)]
    files = open_parts(tmp_path / names[0])
    assert [file.path.name for file in files] == names
    assert files[0].metadata["general.architecture"] == "llama"
    tensors = {name: numbers_of(file, name) for file in files for name in file.tensors}
    assert len(tensors) == 8
    assert torch.equal(tensors["blk.3.attn_q.weight"], torch.full((2, 3), 3.0))


def test_older_versions_other_alignments_and_gaps(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    container = whole()
    container.version = 2
    path.write_bytes(container.encoded())
    assert list(GgufFile(path).tensors) == ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_down.weight"]
    for alignment in (1, 8, 4096):
        container = whole()
        container.entries.append(number("general.alignment", alignment))
        container.alignment = alignment
        path.write_bytes(container.encoded())
        check_any(path)
        assert GgufFile(path).tensors["token_embd.weight"].begin % alignment == 0
    data = np.arange(8, dtype=np.float32).tobytes()
    first, second = Place(b"b", (8,), data=data, offset=64), Place(b"a", (8,), data=bytes(64), offset=0)
    path.write_bytes(Container(places=[first, second]).encoded() + data)
    assert list(GgufFile(path).tensors) == ["a", "b"]


def test_texts_that_are_no_utf_8_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    container = whole()
    data = container.encoded().replace("\N{SNOWMAN}".encode(), b"\xff\xfe\xfd")
    path.write_bytes(data)
    tokens = GgufFile(path).metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, str) is False
    assert list(tokens) == ["a", "bc", "\ufffd" * 3]  # type: ignore[arg-type]


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_files(name: str) -> None:
    files = open_parts(real_files(f"{name}.gguf"))
    reader = gguf.GGUFReader(real_files(f"{name}.gguf"))
    assert len(files) == 1
    for key, value in files[0].metadata.items():
        field = reader.fields[key]
        if isinstance(value, str | int | float):
            assert value == field.contents(), key
        else:
            assert len(value) == len(field.data)
            for part in (slice(300), slice(-300, None)):  # all of them would take the package a minute
                assert list(value[part]) == field.contents(part), key
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors.keys() == files[0].tensors.keys()
    for tensor in tensors.values():
        step = -(-len(tensor.data) // 256)  # all rows would take the package minutes
        expected = torch.from_numpy(np.array(gguf.dequantize(tensor.data[::step], tensor.tensor_type)))
        assert torch.equal(numbers_of(files[0], tensor.name, step), expected), tensor.name


@pytest.mark.real
def test_a_real_file_has_the_weights_of_its_folder() -> None:
    (file,) = open_parts(real_files("smollm2.gguf"))
    weights = load_file(real_files("smollm2") / "model.safetensors")
    heads = {
        "q_proj": file.metadata["llama.attention.head_count"],
        "k_proj": file.metadata["llama.attention.head_count_kv"],
    }
    names = {
        **{f"attn_{side}": f"self_attn.{side}_proj" for side in "qkv"},
        "attn_output": "self_attn.o_proj",
        **{f"ffn_{side}": f"mlp.{side}_proj" for side in ("gate", "up", "down")},
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    whole_model = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    seen = set()
    for name in file.tensors:
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        target = whole_model[name] if match is None else f"model.layers.{match[1]}.{names[match[2]]}.weight"
        numbers = numbers_of(file, name)
        for side, count in heads.items():
            if side in target:  # pairs that are rotated together lie beside each other in the file
                numbers = numbers.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
        assert torch.equal(numbers.to(weights[target].dtype), weights[target]), name
        seen.add(target)
    assert seen == weights.keys() - {"lm_head.weight"}
