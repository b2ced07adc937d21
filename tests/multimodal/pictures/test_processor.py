"""Pictures that transformers' processor of a model prepares, in a worker process."""

from __future__ import annotations

import asyncio
import gc
import io
from pathlib import Path

import msgspec
import numpy as np
import pytest

from quire.config.options import PictureOptions
from quire.engine.client.picture_processor import PictureProcessor, ProcessorError, placeholder_runs
from quire.engine.client.pictures import PictureInfo, TransformersProcessor
from quire.multimodal.memory import MediaMemory
from quire.multimodal.picture_jobs import PictureFile
from quire.multimodal.picture_reader import PictureReader
from quire.multimodal.pictures.decode import PictureError
from quire.multimodal.pictures.processor import processed_layout
from tests.support.fallback_composites import FALLBACKS, PLACEHOLDER, processor_of
from tests.support.pictures import drawn, encoded, prepared

WIDE, TALL = drawn(40, 100), drawn(120, 60, seed=2)


def info_of(case: str, folder: Path) -> PictureInfo:
    """Save the processor of a case, and describe it."""
    processor_of(case).save_pretrained(folder)
    other = FALLBACKS[case]
    geometry = TransformersProcessor(folder=str(folder), input_bytes=1 << 20)
    return PictureInfo(
        placeholder=PLACEHOLDER, placeholder_text=other.marker, token_text=other.token, geometry=geometry
    )


def file(content: bytes, info: PictureInfo) -> PictureFile:
    return PictureFile(io.BytesIO(content), "messages[0].content[0]", info)


@pytest.mark.usefixtures("started_workers")
async def test_pictures_are_prepared_as_the_processor_does_it(tmp_path: Path) -> None:
    """They are cached, their memory is counted, and what cannot be prepared is refused."""
    info = info_of("lighton_ocr", tmp_path)
    memory, lookups = MediaMemory(1 << 30), list[bool]()
    reader = PictureReader(PictureOptions(), memory, max_size=1 << 20, on_lookup=lookups.append)
    try:
        files = [file(encoded(picture), info) for picture in (WIDE, TALL, WIDE)]
        pictures = await prepared(reader, files, max_tokens=1000, sequences=1)
        assert sorted(lookups) == [False, False, True]
        processor, size = PictureProcessor(str(tmp_path)), 0
        for picture, drawing in zip(pictures, (WIDE, TALL, WIDE), strict=True):
            expected = processor.prepare(drawing)
            assert picture.layout == processed_layout(info, expected)
            (item,) = picture.items
            assert {part.name for part in item.inputs} == set(expected.inputs)
            for part in item.inputs:
                np.testing.assert_array_equal(part.values, expected.inputs[part.name])
            size += 2 * expected.nbytes
        assert memory.held == size
        assert pictures[0].items[0].hash == pictures[2].items[0].hash != pictures[1].items[0].hash
        del pictures, picture, item, part
        gc.collect()
        await asyncio.sleep(0)
        assert memory.held == 0
        with pytest.raises(PictureError, match="broken or truncated"):
            await prepared(reader, [file(encoded(WIDE)[:-500], info)], max_tokens=1000, sequences=1)
        few = msgspec.structs.replace(info, item_tokens=2)
        with pytest.raises(PictureError, match=r"has \d+ tokens; this model accepts 2"):
            await prepared(reader, [file(encoded(drawn(119, 59)), few)], max_tokens=1000, sequences=1)
        with pytest.raises(PictureError, match="maximum context length is 3 tokens"):
            await prepared(reader, [file(encoded(WIDE), info)], max_tokens=3, sequences=1)
    finally:
        reader.cache.check()
        await reader.close()


def test_text_between_placeholders_belongs_to_the_item(tmp_path: Path) -> None:
    info = info_of("aya_vision", tmp_path)
    (item,) = processed_layout(info, PictureProcessor(str(tmp_path)).prepare(WIDE)).items
    offsets = item.text_offsets()
    assert offsets is not None
    assert len(item.repeats) > 1
    assert item.length == sum(item.repeats) + len(offsets)


def test_runs_of_placeholders() -> None:
    tokens = np.array([7, 1, 1, 8, 8, 1, 9], np.int32)
    assert placeholder_runs(tokens, 1) == ((0, 2), (4, 1))
    assert placeholder_runs(tokens, 5) == ()


def test_folders_without_a_processor_are_named(tmp_path: Path) -> None:
    with pytest.raises(ProcessorError, match="transformers has no processor for it"):
        PictureProcessor(str(tmp_path))
