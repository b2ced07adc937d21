"""A tiny recognizer trains, resumes with the same losses and exports; transformers reads the folder."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import wave
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

from quire.engine.models.families.whisper import read_speech
from quire.multimodal.audio.features import SAMPLE_RATE, log_mel
from training.hear import evaluate, recordings, run
from training.hear.evaluate import word_errors
from training.hear.export import export
from training.hear.features import LogMel
from training.hear.heldout import utterances, with_noise
from training.hear.loop import Trainer
from training.hear.model import Hear
from training.hear.noise import KINDS, add_noise, make_noise
from training.hear.recipe import Recipe, Shape
from training.hear.recordings import Recordings
from training.hear.sentences import LANGUAGES, make_sentence, normalized, ordinal, split_sentence
from training.hear.tokens import Ids, build_tokenizer
from training.hear.voices import HELDOUT_VARIANTS, VARIANTS, SpeakError, Voice, make_voice, speak
from training.hear.windows import IGNORED, Steps

SHIPPED = Path(__file__).parents[2] / "quire" / "bundled" / "nano_hear"
SHAPE = Shape(
    text_tokens=300, seconds=4, mels=16, width=32, heads=2, encoder_layers=2, decoder_layers=2, inner=48, targets=128
)
TINY = Recipe(shape=SHAPE, shards=2, steps=6, seconds=12, lengths=(3, 4), earlier=0.5, silent=0.2, warmup=2)
LANDED = pytest.mark.skipif(not SHIPPED.exists(), reason="weights are being trained")
ESPEAK = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng")


def tone(text: str, voice: Voice) -> np.ndarray:
    """Stands in for espeak-ng: a tone for each text."""
    pitch = 200 + int(hashlib.sha256(text.encode()).hexdigest(), 16) % 2000 + voice.pitch
    seconds = 0.3 + 0.02 * len(text)
    times = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    return (8000 * np.sin(2 * np.pi * pitch * times)).astype(np.int16)


@pytest.fixture(scope="module", name="recorded")
def _recorded(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recordings, "speak", tone)
        return Recordings(tmp_path_factory.mktemp("recordings"), 1, TINY.shards, size=40)


def trainer(work: Path, recorded: Recordings) -> Trainer:
    return Trainer(TINY, work, recorded, dtype=torch.float32)


def test_sentences_are_divided_by_their_text() -> None:
    rng = Random(3)
    for language in LANGUAGES:
        texts = {split_sentence(rng, language, heldout=False).text for _ in range(400)}
        apart = {split_sentence(rng, language, heldout=True).text for _ in range(400)}
        assert not {normalized(text) for text in texts} & {normalized(text) for text in apart}
        assert not any("{" in text or "  " in text for text in texts | apart)


def test_times_and_dates_are_written_in_figures_and_spoken_in_words() -> None:
    drawn = [make_sentence(Random(seed), language, "times") for seed in range(300) for language in LANGUAGES]
    spoken = {sentence.text: sentence.spoken for sentence in drawn if sentence.text != sentence.spoken}
    assert any("th" in text and "teenth" in said for text, said in spoken.items())
    assert any(":" in text and ":" not in said for text, said in spoken.items())
    assert [ordinal(number, "de") for number in (3, 21, 30)] == ["dritte", "einundzwanzigste", "dreißigste"]
    assert [ordinal(number, "en") for number in (3, 21, 30)] == ["third", "twenty first", "thirtieth"]


def test_voices_are_divided_by_variant() -> None:
    assert not set(VARIANTS) & set(HELDOUT_VARIANTS)
    rng = Random(1)
    names = {make_voice(rng, "en", heldout=True).name.partition("+")[2] for _ in range(200)}
    assert names <= set(HELDOUT_VARIANTS)


@ESPEAK
def test_espeak_speaks() -> None:
    voice = Voice("en-us+f3", 170, 50, 100)
    short, long = speak("Yes.", voice), speak("Please turn on the light in the kitchen.", voice)
    assert 0.1 * SAMPLE_RATE < len(short) < len(long) < 5 * SAMPLE_RATE
    assert np.abs(long).max() > 3000
    assert np.array_equal(long, speak("Please turn on the light in the kitchen.", voice))
    with pytest.raises(SpeakError, match="says nothing"):
        speak("", voice)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_has_the_asked_ratio(kind: str) -> None:
    generator = np.random.default_rng(1)
    speech = np.sin(np.arange(32_000) / 5).astype(np.float32)
    noise = make_noise(generator, len(speech), lambda number: np.roll(speech, number % 999)[:9000], kind)
    power = float(np.mean(speech**2))
    added = add_noise(speech, noise, power, 10) - speech
    assert 10 * np.log10(power / np.mean(added**2)) == pytest.approx(10, abs=0.01)


def test_features_are_those_of_the_server() -> None:
    samples = np.random.default_rng(1).normal(0, 0.1, 3 * SAMPLE_RATE).astype(np.float32)
    mine = LogMel(80)(torch.from_numpy(samples)[None])[0].T.numpy()
    assert mine == pytest.approx(log_mel(samples, 80, 3), abs=1e-4)


def test_recordings_are_read_again_from_their_files(recorded: Recordings, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recordings, "speak", tone)
        first = Recordings(tmp_path, 1, 1, size=10)
        patch.setattr(recordings, "speak", None)
        again = Recordings(tmp_path, 1, 1, size=10)
    assert len(again) == 10
    assert again[7].text == first[7].text == recorded[7].text
    assert np.array_equal(again[7].samples, first[7].samples)


def test_windows_have_the_text_and_times_of_their_sentences(recorded: Recordings) -> None:
    tokenizer = build_tokenizer(recorded.texts(), SHAPE.text_tokens, SHAPE.seconds)
    ids = Ids(tokenizer)
    steps = Steps(recorded, ids, TINY)
    generator = np.random.default_rng(1)
    windows = [steps.window(generator, 4) for _ in range(40)]
    assert {len(window.segments) for window in windows} >= {0, 1, 2}
    assert all(len(window.samples) <= 4 * SAMPLE_RATE for window in windows)
    made = [steps.make(number) for number in range(24)]
    seen = set()
    for step in made:
        for inputs, labels in zip(step.inputs.tolist(), step.labels.tolist(), strict=True):
            start = inputs.index(ids.start)
            seen.add((inputs[0] == ids.previous, labels[start] == ids.no_speech))
            written = [token for token in labels[start + 2 :] if token != IGNORED]
            assert written[-1] == ids.end
            assert set(labels[:start]) <= {IGNORED}
            times = [token - ids.first_time for token in written if token >= ids.first_time]
            assert times == sorted(times)
            assert all(0 <= time <= 50 * SHAPE.seconds for time in times)
    assert len(seen) == 4
    again = steps.make(5)
    assert torch.equal(again.samples, made[5].samples)
    assert torch.equal(again.labels, made[5].labels)


def test_resumed_run_has_the_same_losses(tmp_path: Path, recorded: Recordings) -> None:
    whole = trainer(tmp_path / "whole", recorded).train(6, save_every=100, report=lambda _: None)
    first = trainer(tmp_path / "parts", recorded)
    losses = first.train(4, save_every=100, report=lambda _: None)
    second = trainer(tmp_path / "parts", recorded)
    assert second.resume()
    assert second.step == 4
    losses += second.train(6, save_every=100, report=lambda _: None)
    assert losses == pytest.approx(whole, rel=1e-4)


def test_exported_folder_gives_the_same_logits(tmp_path: Path, recorded: Recordings) -> None:
    made = trainer(tmp_path / "work", recorded)
    folder = tmp_path / "out"
    export(made.model, made.tokenizer, folder)
    reference = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    model = Hear(SHAPE, made.model.vocabulary, torch.float32)
    model.load_state_dict({name: weight.bfloat16().float() for name, weight in made.model.state_dict().items()})
    features = torch.randn(1, 2 * SHAPE.positions, SHAPE.mels)
    tokens = torch.tensor([[made.ids.start, made.ids.languages["de"], made.ids.transcribe, 5, 6, 7]])
    with torch.no_grad():
        expected = reference(input_features=features.transpose(1, 2), decoder_input_ids=tokens).logits
        logits, _ = model(features, tokens)
    assert torch.allclose(logits, expected, atol=1e-4)
    speech = read_speech(folder, reference.config).info
    assert (speech.languages, speech.window_seconds) == (made.ids.languages, 4.0)
    assert speech.timestamp_begin == made.ids.time(0)
    assert speech.translate_token is None
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    assert extractor(np.zeros(100, np.float32), sampling_rate=SAMPLE_RATE).input_features[0].shape == (16, 400)


def test_tokens_of_a_text(recorded: Recordings, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(recorded.texts(), SHAPE.text_tokens, SHAPE.seconds)
    ids = Ids(tokenizer)
    assert ids.text_count == SHAPE.text_tokens
    assert len(ids.text("1207")) >= 4
    assert tokenizer.decode(ids.text("Grüße, 日本!")) == " Grüße, 日本!"
    assert tokenizer.id_to_token(ids.time(1.5)) == "<|1.50|>"
    with pytest.raises(ValueError, match="no token"):
        ids.of("<|fr|>")


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Recipe", lambda: TINY)
    monkeypatch.setattr(recordings, "speak", tone)
    monkeypatch.setattr(run, "Recordings", partial(Recordings, size=20))
    work, out = tmp_path / "work", tmp_path / "out"
    run.main(["--work", str(work), "--out", str(out), "--shards", "1", "--until", "1"])
    assert json.loads((out / "config.json").read_text("utf-8"))["max_source_positions"] == 200
    Tokenizer.from_file(str(out / "tokenizer.json"))


def test_word_errors() -> None:
    assert word_errors("It is 7:30, my friend.", "it is 7:30 my friend") == (0, 5)
    assert word_errors("one two three", "one three four five") == (3, 3)
    assert word_errors("one two", "") == (2, 2)


def test_heldout_utterances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "speak", tone)
    clean = utterances(12, 1)
    noisy = with_noise(clean, 10, 1)
    assert {utterance.noise for utterance in noisy} == set(KINDS)
    for utterance, other in zip(clean, noisy, strict=True):
        assert utterance.text == other.text
        assert len(normalized(utterance.text).split()) >= 3
        assert not np.array_equal(utterance.samples, other.samples)
    with wave.open(io.BytesIO(noisy[0].wav())) as file:
        assert (file.getframerate(), file.getnframes()) == (SAMPLE_RATE, len(noisy[0].samples))


def test_results_of_the_evaluation_have_their_date(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recordings, "speak", tone)
    monkeypatch.setattr(
        evaluate,
        "transcribe",
        lambda client, utterance: evaluate.Answer(utterance.text, utterance.language, utterance.speech),
    )
    evaluate.main(["--count", "6", "--json", str(tmp_path / "results.json")])
    written = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert written["date"] == date.today().isoformat()
    assert written["results"]["clean"]["word_error_rate"] == 0.0


@LANDED
def test_shipped_model_is_small() -> None:
    files = [path for path in SHIPPED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 25_000_000
    tensors = load_file(SHIPPED / "model.safetensors").values()
    assert sum(tensor.numel() for tensor in tensors) <= 12_000_000
    assert all(tensor.dtype is torch.bfloat16 for tensor in tensors)


@LANDED
def test_shipped_tokenizer_is_whispers() -> None:
    tokenizer = WhisperTokenizer.from_pretrained(SHIPPED)
    ids = tokenizer("Turn on the light.", add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == "Turn on the light."
    assert replace(Shape(), text_tokens=tokenizer.convert_tokens_to_ids("<|endoftext|>")) == Shape()
