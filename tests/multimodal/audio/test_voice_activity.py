"""Voice activity: the network is Silero's, and events do not depend on how audio arrives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from quire.multimodal.audio.features import SAMPLE_RATE
from quire.multimodal.audio.silero import CONTEXT, FRAME, STATE, SileroNetwork
from quire.multimodal.audio.voice_activity import SpeechEvent, SpeechStarted, SpeechStopped, VoiceActivity, find_speech
from tests.support.audio import Samples, voice


def dialogue(*utterances: tuple[float, float]) -> Samples:
    """Voices at these times (start and end in seconds), with a second of silence behind the last one."""
    samples = np.zeros(round((utterances[-1][1] + 1.0) * SAMPLE_RATE), np.float32)
    for start, end in utterances:
        spoken = voice(end - start)
        samples[round(start * SAMPLE_RATE) : round(start * SAMPLE_RATE) + len(spoken)] = spoken
    return samples


def events_of(samples: Samples, size: int, **options: int) -> list[SpeechEvent]:
    detector = VoiceActivity(**options)
    events: list[SpeechEvent] = []
    for start in range(0, len(samples), size):
        events += detector.push(samples[start : start + size])
    return events


def test_each_utterance_starts_and_stops_once_near_its_ends() -> None:
    spoken = [(1.0, 2.5), (4.0, 6.0), (8.0, 9.0)]
    events = events_of(dialogue(*spoken), 1600)
    assert [type(event) for event in events] == [SpeechStarted, SpeechStopped] * 3
    seconds = [event.at_sample / SAMPLE_RATE for event in events]
    for (start, end), begun, stopped in zip(spoken, seconds[::2], seconds[1::2], strict=True):
        assert start - 0.45 <= begun <= start  # with 0.3 s of padding
        assert abs(stopped - end) <= 0.3


def test_an_onset_is_known_within_a_fifth_of_a_second() -> None:
    detector, samples = VoiceActivity(), dialogue((1.0, 2.5))
    for start in range(0, len(samples), 320):
        if detector.push(samples[start : start + 320]):
            break
    assert 1.0 <= detector.position / SAMPLE_RATE <= 1.2


@pytest.mark.parametrize("size", [1, 37, 160, 512, 4000, 10**6])
def test_events_are_the_same_for_pieces_of_any_size(size: int) -> None:
    samples = dialogue((0.3, 1.3), (2.2, 3.0))
    assert events_of(samples, size) == events_of(samples, 480)


def test_silence_noise_and_clicks_are_not_speech() -> None:
    random = np.random.default_rng(1)
    hiss = (random.standard_normal(3 * SAMPLE_RATE) * 0.02).astype(np.float32)
    clicks = np.zeros(3 * SAMPLE_RATE, np.float32)
    clicks[:: SAMPLE_RATE // 2] = 0.9
    assert events_of(hiss, 1600) == events_of(clicks, 1600) == []
    assert events_of(np.zeros(3 * SAMPLE_RATE, np.float32), 1600) == []


def test_silence_duration_decides_whether_a_pause_ends_speech() -> None:
    samples = dialogue((0.5, 1.5), (2.1, 3.0))
    assert len(events_of(samples, 1600, silence_duration_ms=300)) == 4
    assert len(events_of(samples, 1600, silence_duration_ms=900)) == 2


def test_speech_in_audio_as_a_whole_ends_with_it() -> None:
    samples = dialogue((0.5, 1.5), (3.0, 4.0))[: round(3.9 * SAMPLE_RATE)]
    stretches = find_speech(samples)
    assert len(stretches) == 2
    assert stretches[1][1] == len(samples)


def test_other_sample_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="16000"):
        VoiceActivity(8000)


def test_the_network_computes_what_torchs_layers_compute() -> None:
    """With random weights; those of the package have the same shapes."""
    shapes = {
        "stft_conv.weight": (258, 1, 256),
        "conv1.weight": (128, 129, 3),
        "conv1.bias": (128,),
        "conv2.weight": (64, 128, 3),
        "conv2.bias": (64,),
        "conv3.weight": (64, 64, 3),
        "conv3.bias": (64,),
        "conv4.weight": (128, 64, 3),
        "conv4.bias": (128,),
        "lstm_cell.weight_ih": (512, 128),
        "lstm_cell.weight_hh": (512, 128),
        "lstm_cell.bias_ih": (512,),
        "lstm_cell.bias_hh": (512,),
        "final_conv.weight": (1, 128, 1),
        "final_conv.bias": (1,),
    }
    random = np.random.default_rng(3)
    weights = {name: (random.standard_normal(shape) * 0.05).astype(np.float32) for name, shape in shapes.items()}
    t = {name: torch.from_numpy(weight) for name, weight in weights.items()}
    frames = random.standard_normal((3, CONTEXT + FRAME)).astype(np.float32)
    network = SileroNetwork(weights)

    x = F.conv1d(F.pad(torch.from_numpy(frames)[:, None], (0, 64), "reflect"), t["stft_conv.weight"], stride=128)
    x = torch.sqrt(x[:, :129] ** 2 + x[:, 129:] ** 2)
    for layer, stride in ((1, 1), (2, 2), (3, 2), (4, 1)):
        x = F.relu(F.conv1d(x, t[f"conv{layer}.weight"], t[f"conv{layer}.bias"], stride, padding=1))
    np.testing.assert_allclose(network.encode(frames), x[..., 0].numpy(), atol=1e-4)

    cell = torch.nn.LSTMCell(128, 128)
    cell.load_state_dict({name.removeprefix("lstm_cell."): w for name, w in t.items() if name.startswith("lstm")})
    hidden, memory = np.zeros(STATE, np.float32), np.zeros(STATE, np.float32)
    state = (torch.zeros(1, STATE), torch.zeros(1, STATE))
    for encoded in network.encode(frames):
        probability, hidden, memory = network.step(encoded, hidden, memory)
        with torch.no_grad():
            state = cell(torch.from_numpy(encoded)[None], state)
            expected = torch.sigmoid(
                F.conv1d(F.relu(state[0])[..., None], t["final_conv.weight"], t["final_conv.bias"])
            )
        assert probability == pytest.approx(float(expected), abs=1e-5)
