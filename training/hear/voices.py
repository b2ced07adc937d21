"""Voices of espeak-ng with speed, pitch and volume; some variants are held out. Speaks a text with one."""

from __future__ import annotations

import io
import subprocess
from dataclasses import dataclass
from random import Random

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from quire.multimodal.audio.features import SAMPLE_RATE

ACCENTS = {"en": ("en-us", "en-us", "en-gb", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-029"), "de": ("de",)}
# Variants change formants, voicing and pitch; "" is the plain voice. Robots, whispering and croaking are left out.
VARIANTS = (
    "", "m1", "m2", "m4", "m5", "m6", "m8", "f1", "f2", "f4", "Alex", "Alicia", "Andrea", "Andy", "adam", "antonio",
    "aunty", "belinda", "boris", "caleb", "david", "Denis", "ed", "edward", "Gene", "Gustave", "Henrique", "iven",
    "iven2", "Jacky", "john", "kaukovalta", "Lee", "linda", "marcelo", "max", "michel", "mike", "norbert", "pablo",
    "paul", "rob", "sandro", "shelby", "steph", "steph2", "travis", "victor", "zac", "grandpa",
)  # fmt: skip
HELDOUT_VARIANTS = (
    "m3", "m7", "f3", "f5", "Annie", "Diogo", "edward2", "Hugo", "Marco", "miguel", "pedro", "robert", "steph3",
    "anika", "benjamin", "Mario",
)  # fmt: skip
_SPEEDS = (125, 215)  # words per minute
_PITCHES = (20, 80)
_VOLUMES = (60, 140)
_QUIET = 0.01  # of the loudest sample: what is below at the ends is cut off
_TIMEOUT = 30.0  # seconds


class SpeakError(Exception):
    """espeak-ng is missing or has failed."""


@dataclass(frozen=True, slots=True)
class Voice:
    """Settings of espeak-ng.

    Attributes:
        name: voice and variant.
        speed: words per minute.
        pitch: 0 to 99.
        volume: 0 to 200.
    """

    name: str
    speed: int
    pitch: int
    volume: int


def make_voice(rng: Random, language: str, *, heldout: bool) -> Voice:
    """Draw a voice. A held-out one has a variant that training never uses."""
    variant = rng.choice(HELDOUT_VARIANTS if heldout else VARIANTS)
    accent = rng.choice(ACCENTS[language])
    speed, pitch, volume = (rng.randint(*limits) for limits in (_SPEEDS, _PITCHES, _VOLUMES))
    return Voice(f"{accent}+{variant}" if variant else accent, speed, pitch, volume)


def speak(text: str, voice: Voice) -> NDArray[np.int16]:
    """Return 1-D samples at 16 kHz, without the silence around them.

    Raises:
        SpeakError: espeak-ng cannot be run, or does not know the voice.
    """
    options = ["-v", voice.name, "-s", voice.speed, "-p", voice.pitch, "-a", voice.volume, "--stdout", "--", text]
    command = ["espeak-ng", *map(str, options)]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=_TIMEOUT)  # noqa: S603
        samples, rate = soundfile.read(io.BytesIO(done.stdout), dtype="float32")
    except FileNotFoundError as error:
        raise SpeakError("espeak-ng is not installed; Debian's package is espeak-ng") from error
    except (subprocess.SubprocessError, soundfile.LibsndfileError) as error:
        raise SpeakError(f"espeak-ng cannot say {text!r} with {voice}: {error}") from error
    loud = np.flatnonzero(np.abs(samples) > _QUIET * np.abs(samples).max(initial=0.0))
    if not len(loud):
        raise SpeakError(f"espeak-ng says nothing for {text!r} with {voice}")
    resampled = soxr.resample(samples[loud[0] : loud[-1] + 1], rate, SAMPLE_RATE)
    scaled: NDArray[np.int16] = np.clip(resampled * 32767, -32768, 32767).astype(np.int16)
    return scaled
