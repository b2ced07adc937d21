"""Pictures are drawn as their questions say; a tiny model trains, resumes with the same losses and exports."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Idefics3ForConditionalGeneration, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from quire.rendering.chat_template import ChatTemplate
from training.books import SPLITS, phrase_book
from training.grammar import all_phrases, normalize
from training.see import evaluate, run
from training.see.batches import IGNORED, PADDING, Steps
from training.see.drawing import FONTS, HELDOUT_FONTS, WHAT, WHICH, draw, paint, resized
from training.see.evaluate import normalized
from training.see.export import TEMPLATE, export
from training.see.heldout import sights
from training.see.loop import Meter, Trainer
from training.see.model import See
from training.see.palette import COLOURS
from training.see.questions import NO_PICTURE, ask, ask_without_picture
from training.see.recipe import Recipe, Shape
from training.see.scenes import LABELS, MOST_COUNTED, is_held_out, make_scene
from training.see.tokens import Ids, build_tokenizer, padded_size

SHIPPED = Path(__file__).parents[2] / "quire" / "bundled" / "nano_see"
SHAPE = Shape(side=48, patch=12, width=32, heads=2, tower_layers=2, tower_inner=48, decoder_layers=2, decoder_inner=48,
              text_tokens=300)  # fmt: skip
TINY = Recipe(shape=SHAPE, steps=6, tower_steps=1, crowds=2, reading_steps=1, pictures=5, length=96, easy=2, warmup=2,
              without=0.2, talk=0.5, reading=0.2)  # fmt: skip
KINDS = [kind for kind, _ in TINY.mix]


@pytest.fixture(scope="module", name="tokenizer")
def _tokenizer() -> Tokenizer:
    rng = Random(1)
    texts = [
        text
        for seed in range(600)
        for question in [ask(rng, make_scene(rng, KINDS[seed % 5], heldout=False, easy=False), "train")]
        for text in (question.text, question.answer)
    ]
    return build_tokenizer(texts, SHAPE.text_tokens)


@pytest.fixture(scope="module", name="work")
def _work(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def trainer(work: Path, name: str) -> Trainer:
    folder = work / name
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes((work / "tokenizer.json").read_bytes())
    return Trainer(TINY, folder, dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_patch_says_what_it_shows(kind: str) -> None:
    shape = Recipe().shape
    for seed in range(30):
        scene = make_scene(Random(seed), kind, heldout=False, easy=True)
        drawing = draw(Random(seed), scene, shape, easy=True)
        shown = {WHAT[number] for number in drawing.what} - {"nothing", "bar", *LABELS}
        drawn = {thing.shape for thing in scene.things} | set(scene.text)
        assert shown == drawn - set(LABELS)
        colours = {WHICH[number] for number in drawing.which[drawing.what > 0]}
        assert colours >= {thing.colour for thing in scene.things} | {bar.colour for bar in scene.bars}
        assert drawing.pixels.shape == (shape.side, shape.side, 3)


def test_a_thing_has_its_colour_in_its_middle() -> None:
    for seed in range(40):
        scene = make_scene(Random(seed), "shapes", heldout=False, easy=True)
        image, _ = paint(Random(seed), scene, easy=True)
        for thing in scene.things:
            if thing.shape != "ring":
                assert image.getpixel((int(thing.x * image.width), int(thing.y * image.height))) == thing.rgb


def test_things_do_not_overlap() -> None:
    for seed in range(60):
        for kind in ("shapes", "counts"):
            things = make_scene(Random(seed), kind, heldout=False, easy=False).things
            assert 1 <= len(things) <= MOST_COUNTED
            for at, thing in enumerate(things):
                for other in things[at + 1 :]:
                    distance = max(abs(thing.x - other.x), abs(thing.y - other.y))
                    assert distance > (thing.size + other.size) / 2


@pytest.mark.parametrize("name", [*FONTS, *HELDOUT_FONTS])
def test_fonts_have_all_characters(name: str) -> None:
    from training.see.drawing import CHARACTERS, font_of

    masks = {bytes(font_of(name, 40).getmask(character)) for character in CHARACTERS}
    assert len(masks) == len(CHARACTERS)


def test_pictures_are_resized_as_the_processor_does() -> None:
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 96}, max_image_size={"longest_edge": 96}, do_image_splitting=False, do_normalize=False,
        do_rescale=False, resample=1,
    )  # fmt: skip
    generator = np.random.default_rng(1)
    for height, width in ((96, 96), (200, 150), (90, 133), (300, 301)):
        image = Image.fromarray(generator.integers(0, 256, (height, width, 3), np.uint8))
        pixels = processor(image, return_tensors="np")["pixel_values"][0, 0].transpose(1, 2, 0)
        assert np.array_equal(np.asarray(resized(image, 96)), pixels)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_scene(kind: str) -> None:
    kinds = set()
    for seed in range(300):
        rng = Random(seed)
        scene = make_scene(rng, kind, heldout=False, easy=False)
        question = ask(rng, scene, "train")
        kinds.add(question.kind)
        assert "{" not in question.text + question.answer
        if question.kind == "count_all":
            assert f" {len(scene.things)} " in question.answer
        if question.kind in ("number", "word"):
            assert re.split(r"[ .]", question.answer)[-2] == scene.text
        if question.kind == "describe" and scene.things:
            for colour, count in Counter(thing.colour for thing in scene.things).items():
                assert question.answer.lower().count(colour) in range(1, count + 1)
    assert len(kinds) >= 5


def test_without_a_picture_it_asks_for_one() -> None:
    assert {ask_without_picture(Random(seed), split).answer for seed in range(20) for split in SPLITS} == {NO_PICTURE}


def test_numbers_words_and_phrasings_are_held_out() -> None:
    for kind in ("number", "word"):
        kept = {make_scene(Random(seed), kind, heldout=False, easy=False).text for seed in range(300)}
        apart = {make_scene(Random(seed), kind, heldout=True, easy=False).text for seed in range(300)}
        assert not {text for text in kept & apart if len(text) > 1}
        assert all(is_held_out(text) for text in apart if len(text) > 1)
    book = {name: table for name, table in phrase_book("seen").items() if isinstance(table, dict)}
    seen = {
        normalize(phrase) for table in book.values() for pattern in table["train"] for phrase in all_phrases(pattern)
    }
    asked = {
        normalize(phrase) for table in book.values() for pattern in table["heldout"] for phrase in all_phrases(pattern)
    }
    assert not seen & asked
    assert not set(FONTS) & set(HELDOUT_FONTS)


def test_digits_and_capitals_are_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("It says STOP 407.").tokens[-9:] == ["S", "T", "O", "P", "Ġ", "4", "0", "7", "."]
    for text in ("Größe 😀  x\n\ny", "日本", "What colour is it?"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_question_sees_its_picture_and_itself(tokenizer: Tokenizer) -> None:
    ids = Ids(tokenizer)
    step = Steps(ids, replace(TINY, talk=0.0, without=0.0)).make(3)
    assert (step.tokens == ids.image).sum(1).tolist() == [SHAPE.tokens] * TINY.pictures
    for tokens, labels, positions, segments in zip(
        step.tokens, step.labels, step.positions, step.segments, strict=True
    ):
        prefix = int((segments == 0).sum())
        for segment in range(1, int(segments.max()) + 1):
            inside = segments == segment
            assert positions[inside].tolist() == list(range(prefix, prefix + int(inside.sum())))
            following = tokens[inside][1:]
            counted = labels[inside][:-1] != IGNORED
            assert torch.equal(labels[inside][:-1][counted], following[counted])
            assert following[-1] == ids.stop
        assert (labels[segments == PADDING] == IGNORED).all()


def test_training_resumes_with_the_same_losses(work: Path) -> None:
    whole = trainer(work, "whole").train(6, 100, 100, lambda line: None)
    first = trainer(work, "parts")
    assert not first.resume()
    losses = first.train(3, 100, 100, lambda line: None)
    second = trainer(work, "parts")
    assert second.resume()
    assert losses + second.train(6, 100, 100, lambda line: None) == pytest.approx(whole, abs=1e-4)
    assert whole[-1] < whole[1]  # the first step trains the tower alone


def test_a_mean_is_of_the_steps_that_have_the_figure() -> None:
    """The first steps train the tower alone, and have no loss of answers."""
    meter = Meter()
    meter.add({"patches": 1.0}, 2)
    meter.add({"patches": 3.0, "loss": 4.0}, 2)
    figures = meter.take()
    assert (figures["patches"], figures["loss"]) == (2.0, 4.0)


def test_measures_held_out_pictures(work: Path) -> None:
    one = trainer(work, "measured")
    figures = one.measure(*one.steps.heldout(sights(5, 3)))
    assert len(figures) > 3
    assert set(figures.values()) <= {0.0}


def test_transformers_reads_the_export(tokenizer: Tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(1)
    ids = Ids(tokenizer)
    model = See(SHAPE, padded_size(tokenizer), ids.image, torch.float32)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    export(model, tokenizer, tmp_path)
    theirs, missing = Idefics3ForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not missing["missing_keys"]
    assert not missing["unexpected_keys"]
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil.from_pretrained(tmp_path), loaded, SHAPE.tokens, loaded.chat_template
    )
    sight = sights(1, 5)[0]
    content = [{"type": "text", "text": "What is this?"}, {"type": "image"}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=prompt, images=[sight.image], return_tensors="pt")
    tokens = inputs["input_ids"]
    positions, segments = torch.arange(tokens.shape[1])[None], torch.zeros_like(tokens)
    pixels = torch.tensor(sight.drawing(SHAPE).pixels)[None]
    with torch.no_grad():
        states, _ = model(pixels, tokens, positions, segments)
        expected = theirs.eval()(**inputs).logits
    assert torch.allclose(model.logits(states), expected, atol=1e-4)
    # The prompt is the one of the training.
    row = Steps(ids, TINY)._prefix("", picture=True)
    assert tokens[0, : len(row)].tolist() == row


def test_pictures_stand_before_the_text_of_their_message() -> None:
    template = ChatTemplate(TEMPLATE.read_text("utf-8"))
    assert template.wants_parts  # otherwise servers write pictures where they were
    question = [{"type": "text", "text": "Which is red? "}, {"type": "image"}, {"type": "image"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": question}]
    text = template.render({"messages": messages, "add_generation_prompt": True})
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<image><image>Which is red?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_command_trains_and_exports(work: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "Recipe", lambda: TINY)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "tokenizer.json").write_bytes((work / "tokenizer.json").read_bytes())
    run.main(["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), "--until", "1"])
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= written


def test_right_answers_are_counted() -> None:
    drawn = sights(3, 1)
    answers = {question.text: question.answer for sight in drawn for question in sight.questions}
    right = evaluate.evaluate(lambda sight, text: answers[text].upper().rstrip("."), drawn)
    assert {figures["percent"] for figures in right.values()} == {100.0}
    assert normalized(" It is  RED.") == normalized("it is red")
    wrong = evaluate.evaluate(lambda sight, text: "", drawn)
    assert {figures["percent"] for figures in wrong.values()} == {0.0}


def test_shipped_files_are_those_of_the_recipe() -> None:
    weights = load_file(SHIPPED / "model.safetensors")
    assert sum(weight.numel() for weight in weights.values()) < 12_000_000
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 25_000_000
    config = json.loads((SHIPPED / "config.json").read_text("utf-8"))
    shape = Recipe().shape
    assert config["vision_config"]["image_size"] == shape.side
    assert weights["model.text_model.embed_tokens.weight"].shape == (config["text_config"]["vocab_size"], shape.width)
    assert (SHIPPED / "README.md").exists()
    assert set(COLOURS) >= {"red", "grey"}


def test_shipped_model_answers() -> None:
    answering = evaluate.local(SHIPPED)
    figures = evaluate.evaluate(answering, sights(10, 3, split="train"))
    questions = sum(group["questions"] for group in figures.values())
    right = sum(group["questions"] * group["percent"] for group in figures.values())
    assert right / questions > 50
