"""Subtitles: SubRip (srt) and WebVTT (vtt)."""

from __future__ import annotations

from collections.abc import Sequence

from quire.speech.types import Segment


def srt(segments: Sequence[Segment]) -> str:
    """The segments as SubRip."""
    return "".join(
        f"{number}\n{_time(segment.start, ',')} --> {_time(segment.end, ',')}\n{_line(segment.text)}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    """The segments as WebVTT."""
    cues = (f"{_time(cue.start, '.')} --> {_time(cue.end, '.')}\n{_escaped(_line(cue.text))}\n\n" for cue in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _line(text: str) -> str:
    """The text in one line; an empty one would end the cue. The arrow separates times."""
    return " ".join(text.split()).replace("-->", "->")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
