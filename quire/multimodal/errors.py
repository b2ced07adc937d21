"""Errors of prompts."""

from __future__ import annotations


class PromptError(ValueError):
    """Messages or a text cannot be turned into a prompt.

    Attributes:
        param: the request field that caused the error.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param
