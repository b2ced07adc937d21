"""Media in a rendered chat: texts of layouts take the place of what the template has for pictures and videos.

So do texts of audio where templates do not write all of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from quire.multimodal.errors import PromptError


@dataclass(frozen=True, slots=True)
class PictureTexts:
    """The pictures and videos of a conversation.

    Attributes:
        layouts: what the chat template writes for each, and the text of its layout, in the order of the messages.
        in_order: the template must keep that order, because they have the same placeholder tokens.
    """

    layouts: Sequence[tuple[str, str]]
    in_order: bool = False

    def put_into(self, text: str) -> str:
        """Replace the placeholder of each medium by the text of its layout.

        Raises:
            PromptError: there are more or fewer placeholders than pictures, or they have another order.
        """
        expected = [placeholder for placeholder, _ in self.layouts]
        pattern = re.compile("|".join(map(re.escape, sorted(set(expected), key=len, reverse=True))))
        rendered = pattern.findall(text)
        for placeholder, count in Counter(expected).items():
            if rendered.count(placeholder) != count:
                raise PromptError(
                    f"The chat template has rendered {rendered.count(placeholder)} pictures, videos or audio parts; "
                    f"the messages have {count}. It must write {placeholder} once for each of them, and nowhere else.",
                    "messages",
                )
        if self.in_order and rendered != expected:
            raise PromptError("The chat template must keep the order of pictures and videos.", "messages")
        texts = {name: iter([text for other, text in self.layouts if other == name]) for name in set(expected)}
        return pattern.sub(lambda match: next(texts[match[0]]), text)
