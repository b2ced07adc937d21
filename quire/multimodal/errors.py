"""Errors of prompts, and of the files that they are made with."""

from __future__ import annotations

from typing import Any


class ModelFileError(Exception):
    """A file of the model, such as its tokenizer or chat template, is missing or cannot be used."""


class PromptError(ValueError):
    """Messages or a text cannot be turned into a prompt.

    Attributes:
        param: the request field that caused the error.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param

    def __reduce__(self) -> tuple[Any, ...]:
        """Tell pickle of `param`, which it would leave out: worker processes raise it as well."""
        return PromptError, (str(self), self.param)
