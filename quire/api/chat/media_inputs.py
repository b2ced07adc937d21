"""Which media a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.api.chat.media_parts import PartPlace
from quire.engine.client.pictures import VideoInfo
from quire.protocol.errors import InvalidRequest, shorten
from quire.serving.models import AudioInput, GeneratingModel, PictureInput, PoolingModel, ServedModel


@dataclass(frozen=True, slots=True)
class MediaInputs:
    """How a model reads media.

    Attributes:
        name: name of the model.
        audio: None if it does not read audio.
        pictures: None if it does not read pictures, nor videos.
    """

    name: str
    audio: AudioInput | None = None
    pictures: PictureInput | None = None

    @classmethod
    def of(cls, model: ServedModel) -> MediaInputs:
        """What a model reads; those that only transcribe have no messages with media."""
        if isinstance(model, GeneratingModel):
            return cls(model.names[0], model.audio, model.pictures)
        if isinstance(model, PoolingModel):
            return cls(model.names[0], pictures=model.pictures)
        return cls(model.names[0])

    def check(self, place: PartPlace) -> None:
        """Check that the model reads a content part. Documents have text at least.

        Raises:
            InvalidRequest: it does not.
        """
        read = {
            "document": True,
            "audio": self.audio is not None,
            "image": self.pictures is not None,
            "video": self.videos is not None,
        }
        if place.kind is None or not read[place.kind]:
            raise InvalidRequest(
                f"Content parts of type {shorten(place.type)!r} are not supported: the model `{self.name}` accepts "
                f"{self._accepted} only.",
                place.where,
            )

    def check_settings(self, names: Sequence[str]) -> None:
        """Check that settings of pictures and videos may have an effect. `names`: the fields that are set.

        Raises:
            InvalidRequest: the model does not read pictures.
        """
        if names and self.pictures is None:
            raise InvalidRequest(
                f"`{names[0]}` is not supported: the model `{self.name}` accepts {self._accepted} only.", names[0]
            )

    @property
    def videos(self) -> VideoInfo | None:
        """How it reads videos; None if it does not."""
        return None if self.pictures is None else self.pictures.info.video

    @property
    def _accepted(self) -> str:
        names = ["text"]
        if self.pictures is not None:
            names.append("pictures")
        if self.videos is not None:
            names.append("videos")
        if self.audio is not None:
            names.append("audio")
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
