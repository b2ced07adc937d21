"""The processor that transformers has for a model, which prepares pictures for models that no family knows.

transformers takes a second to import and is only imported when a processor is made: in worker processes of the front
end, and where configs are read. It never needs torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image

_TEXT_OUTPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
INPUT_TYPES = (np.float32, np.int64, np.int32, np.uint8, np.bool_)  # that arrays for transformers' models may have
_MARKERS = ("image_placeholder_token", "image_token")  # attributes of processors: the first that there is
_MAX_DIMS = 8  # of an array


class ProcessorError(Exception):
    """transformers has no processor for the model that could be used here, or it cannot prepare a picture."""


@dataclass(frozen=True, slots=True)
class ProcessedPicture:
    """A picture as a processor has prepared it.

    Attributes:
        text: stands for it in the text of a prompt.
        token_ids: tokens of that text.
        inputs: arguments of transformers' model, by their names.
    """

    text: str
    token_ids: NDArray[np.int32]
    inputs: Mapping[str, NDArray[Any]]

    @property
    def nbytes(self) -> int:
        """Bytes of all inputs."""
        return sum(values.nbytes for values in self.inputs.values())


class PictureProcessor:
    """transformers' processor of a model's folder.

    Attributes:
        marker: text that stands for a picture in a prompt before the processor replaces it.
    """

    def __init__(self, folder: str) -> None:
        """Load it.

        Raises:
            ProcessorError: there is none for the model, or what it needs is not installed.
        """
        from transformers import AutoProcessor  # noqa: PLC0415 a second of imports

        try:
            self._processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # of transformers' code, and that of packages it needs
            raise ProcessorError(f"transformers has no processor for it: {_reason(error)}") from error
        self._tokenizer: Any = getattr(self._processor, "tokenizer", None)
        marker = next(
            (text for name in _MARKERS if isinstance(text := getattr(self._processor, name, None), str) and text), None
        )
        if self._tokenizer is None or getattr(self._processor, "image_processor", None) is None:
            raise ProcessorError(f"{type(self._processor).__name__} of transformers does not prepare pictures and text")
        if marker is None:
            raise ProcessorError(f"{type(self._processor).__name__} of transformers has no text that marks a picture")
        self.marker = marker

    def count(self, height: int, width: int) -> int | None:
        """The tokens of a picture of a size, or about so many; None if the processor cannot tell before."""
        counter = getattr(self._processor, "_get_num_multimodal_tokens", None)
        if counter is None:
            return None
        try:
            return int(counter(image_sizes=[[height, width]])["num_image_tokens"][0])
        except Exception:  # noqa: BLE001 of transformers' code: it is a hint, and `prepare` says what is wrong
            return None

    def prepare(self, picture: Image.Image) -> ProcessedPicture:
        """Prepare a picture in RGB.

        Raises:
            ProcessorError: the processor cannot do it, or what it makes is not understood.
        """
        try:
            output: Mapping[str, Any] = self._processor(
                images=[picture],
                text=[self.marker],
                return_tensors="np",
                return_text_replacement_offsets=True,
            )
            text = _replacement(output)
            token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        except (MemoryError, ProcessorError):
            raise
        except Exception as error:  # of transformers' code
            raise ProcessorError(_reason(error)) from error
        inputs = {name: _array(name, values) for name, values in output.items() if name not in _TEXT_OUTPUTS}
        return ProcessedPicture(text, np.array(token_ids, np.int32), inputs)


def _replacement(output: Mapping[str, Any]) -> str:
    """The text that the processor has put in the place of the one marker."""
    replaced = output.get("text_replacement_offsets")
    if replaced is None or len(replaced) != 1 or len(replaced[0]) != 1:
        raise ProcessorError("the processor does not say which text stands for a picture")
    return str(replaced[0][0]["replacement"])


def _array(name: str, values: Any) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype not in INPUT_TYPES or array.ndim > _MAX_DIMS or not array.size:
        raise ProcessorError(f"{name} of the processor's result is no array of numbers")
    return np.ascontiguousarray(array)


def _reason(error: Exception) -> str:
    lines = (str(error) or type(error).__name__).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(lines)}"[:300]


def placeholder_runs(token_ids: NDArray[np.int32], placeholder: int) -> tuple[tuple[int, int], ...]:
    """The runs of a placeholder among the tokens of a picture: where each begins, and its length.

    Beginnings are counted from that of the first one.
    """
    places = np.flatnonzero(token_ids == placeholder)
    if not len(places):
        return ()
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return tuple((int(run[0] - places[0]), len(run)) for run in runs)
