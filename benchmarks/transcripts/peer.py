"""Transcribes arrays of samples with faster-whisper, in an interpreter that has it, and prints a line of JSON for each.

python peer.py MODEL COMPUTE_TYPE FILE.npy ...
"""

import json
import sys
import time

import numpy as np
from faster_whisper import WhisperModel  # type: ignore[import-not-found]


def main(folder: str, compute_type: str, *files: str) -> None:
    """Transcribe each file, first without word times, then with them."""
    model = WhisperModel(folder, device="cpu", compute_type=compute_type, cpu_threads=2)
    for number, file in enumerate(files):
        for with_words in (False, True):
            started = time.perf_counter()
            generator, _ = model.transcribe(
                np.load(file),
                language="en",
                beam_size=1,
                word_timestamps=with_words,
                condition_on_previous_text=False,
            )
            segments = list(generator)
            answer = {
                "file": number,
                "text": "".join(segment.text for segment in segments),
                "segments": [(segment.text, segment.start, segment.end) for segment in segments],
                "words": [(word.word, word.start, word.end) for segment in segments for word in segment.words or ()]
                if with_words
                else None,
                "seconds": time.perf_counter() - started,
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
