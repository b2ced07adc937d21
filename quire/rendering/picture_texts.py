"""Pictures in a rendered chat: the texts of their layouts take the place of what the template has for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.multimodal.errors import PromptError


@dataclass(frozen=True, slots=True)
class PictureTexts:
    """The pictures of a conversation.

    Attributes:
        placeholder: what the chat template writes for each.
        layouts: texts of their layouts, in their order.
    """

    placeholder: str
    layouts: Sequence[str]

    def put_into(self, text: str) -> str:
        """Replace the placeholder of each picture by the text of its layout.

        Raises:
            PromptError: there are more or fewer placeholders than pictures.
        """
        pieces = text.split(self.placeholder)
        if len(pieces) - 1 != len(self.layouts):
            raise PromptError(
                f"The chat template has rendered {len(pieces) - 1} pictures; the messages have {len(self.layouts)}. It "
                f"must write {self.placeholder} once for each picture, and nowhere else.",
                "messages",
            )
        texts = [*self.layouts, ""]
        return "".join(part for pair in zip(pieces, texts, strict=True) for part in pair)
