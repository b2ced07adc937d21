"""What is wrong with a prompt."""

from __future__ import annotations


class PromptError(ValueError):
    """The caller's messages or text cannot become a prompt.

    Attributes:
        param: the request field that is to blame.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param
