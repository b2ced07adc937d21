"""Word errors and errors of times of long recordings, by a Whisper, in every format, beside faster-whisper.

    python -m benchmarks.transcripts --model FOLDER --speech FOLDER --out benchmarks/results/FILE.json
    python -m benchmarks.transcripts ... --peer PYTHON --peer-model FOLDER

--speech has wav files of sentences and transcripts.json. They are joined with pauses to audio of 1 to 10 minutes; each
is transcribed by `quire serve` in bfloat16 and int8 in all formats, with and without `server_vad`, streamed, and by
realtime sessions. --peer is an interpreter that has faster-whisper, and --peer-model its model with the same weights.
A time is right within 0.3 s of the speech. Prints a table; takes about ten minutes on two cores, of which the peer
needs most (it gets the files of --peer-minutes at most).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.transcripts.client import FORMATS, Answer, over_realtime, post, serving
from benchmarks.transcripts.recordings import JoinedSpeech, join, read_recordings
from benchmarks.transcripts.scores import time_errors, word_errors

TOLERANCE = 0.3  # seconds
SPANNED_PAUSE = 1.5  # seconds of silence that no cue should hold
PAUSES = {
    **{f"{pause:g} s": (pause,) for pause in (0.0, 1.8, 6.0, 8.0)},
    "0 to 8 s": (0.0, 8.0, 1.0, 5.0, 2.0, 3.0, 0.5),
}
_PEER = Path(__file__).with_name("peer.py")


@dataclass(frozen=True, slots=True)
class Score:
    """A transcript's errors, in percent of the words and in seconds; None where the answer has no times."""

    system: str
    mode: str
    pauses: str
    minutes: float
    seconds: float
    word_error_rate: float
    cues: int | None = None
    worst_cue_error: float | None = None
    wrong_cues: int | None = None
    cues_with_pauses: int | None = None
    worst_word_error: float | None = None
    wrong_words: int | None = None


def score(system: str, mode: str, pauses: str, speech: JoinedSpeech, answer: Answer, seconds: float) -> Score:
    """Return the score of an answer."""
    errors, said = word_errors(speech.sentences, answer.text)
    times: dict[str, Any] = {}
    if answer.cues is not None:
        cues = time_errors(speech.sentences, answer.cues, TOLERANCE, SPANNED_PAUSE)
        times |= {"cues": cues.count, "worst_cue_error": round(cues.worst, 2), "wrong_cues": len(cues.wrong)}
        times["cues_with_pauses"] = cues.spanning
    if answer.words is not None:
        words = time_errors(speech.sentences, answer.words, TOLERANCE, SPANNED_PAUSE)
        times |= {"worst_word_error": round(words.worst, 2), "wrong_words": len(words.wrong)}
    minutes = round(speech.seconds / 60, 1)
    return Score(system, mode, pauses, minutes, round(seconds, 1), round(100 * errors / said, 2), **times)


def quire_scores(system: str, url: str, pauses: str, speech: JoinedSpeech) -> Iterator[Score]:
    """Transcribe in every way that a server has."""
    for vad in (False, True):
        for name in FORMATS:
            started = time.perf_counter()
            answer = post(url, speech.wav, name, vad=vad)
            mode = f"{name}, server_vad" if vad else name
            yield score(system, mode, pauses, speech, answer, time.perf_counter() - started)
    started = time.perf_counter()
    answer = asyncio.run(over_realtime(url, speech))
    yield score(system, "realtime", pauses, speech, answer, time.perf_counter() - started)


def peer_scores(
    python: Path, model: Path, quantization: str, audio: Sequence[tuple[str, JoinedSpeech]], folder: Path
) -> Iterator[Score]:
    """Transcribe with faster-whisper, greedily, with word times and without."""
    for number, (_, speech) in enumerate(audio):
        np.save(folder / f"{number}.npy", speech.samples)
    compute_type = "int8" if quantization == "int8" else "float32"
    files = [str(folder / f"{number}.npy") for number in range(len(audio))]
    answers = subprocess.run(
        [str(python), str(_PEER), str(model), compute_type, *files], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    for line in answers.splitlines():
        result = json.loads(line)
        pauses, speech = audio[result["file"]]
        mode = "segments and words" if result["words"] is not None else "segments"
        answer = Answer.read(result["text"], result["segments"], result["words"])
        yield score(f"faster-whisper {compute_type}", mode, pauses, speech, answer, result["seconds"])


def row(scored: Score) -> str:
    """Return a line of the table."""
    shown = [
        scored.system,
        scored.mode,
        scored.pauses,
        *(
            "" if value is None else f"{value:g}"
            for value in (
                *(scored.minutes, scored.word_error_rate, scored.cues, scored.wrong_cues, scored.worst_cue_error),
                *(scored.cues_with_pauses, scored.wrong_words, scored.worst_word_error, scored.seconds),
            )
        ),
    ]
    return f"| {' | '.join(shown)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print a table and write the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--speech", type=Path, required=True)
    parser.add_argument("--minutes", type=float, nargs="+", default=[1, 2, 10], help="in turn, for each pause one")
    parser.add_argument("--pauses", nargs="+", choices=PAUSES, default=list(PAUSES))
    parser.add_argument("--quantization", nargs="+", default=["none", "int8"])
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--peer-model", type=Path)
    parser.add_argument("--peer-minutes", type=float, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    recordings = read_recordings(options.speech)
    audio = []
    for number, name in enumerate(options.pauses):
        pauses = PAUSES[name]
        minutes = options.minutes[number % len(options.minutes)]
        audio.append((name, join(recordings, pauses, 60 * minutes, lead=max(pauses))))
    scores: list[Score] = []

    def take(rows: Iterator[Score]) -> None:
        for score in rows:
            scores.append(score)
            print(row(score), flush=True)

    for quantization in options.quantization:
        system = f"Quire {'bfloat16' if quantization == 'none' else quantization}"
        with serving(str(options.model), "--dtype", "bfloat16", "--quantization", quantization) as url:
            for name, speech in audio:
                take(quire_scores(system, url, name, speech))
        if options.peer is not None:
            short = [clip for clip in audio if clip[1].seconds <= 60 * options.peer_minutes]
            with tempfile.TemporaryDirectory() as folder:
                take(peer_scores(options.peer, options.peer_model, quantization, short, Path(folder)))
    if options.out:
        report = {"date": date.today().isoformat(), "model": options.model.name, "tolerance_s": TOLERANCE}
        options.out.write_text(json.dumps({**report, "scores": [asdict(score) for score in scores]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
