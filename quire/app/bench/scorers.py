"""Clients that ask servers for the log probabilities of a text's tokens, each in the way that its server has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from quire.app.openai_client import ServerError, connect, error_text

_CONNECT_SECONDS = 10
# Most probable tokens in llama-server's answers; a rarer token of a text costs a second request.
_LLAMA_CANDIDATES = 1000
_ALL_CANDIDATES = 1 << 30
_ID_NAME = "token_id:"  # how the names of tokens begin that are given by id


@dataclass(frozen=True, slots=True)
class Score:
    """What a model says about a token of a text.

    Attributes:
        logprob: natural logarithm of its probability.
        top: those of the most probable tokens at its place, by id; by text where a server gives no ids.
    """

    logprob: float
    top: Mapping[int | str, float]


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text as tokens.

    Attributes:
        prefix: special tokens that the tokenizer puts in front of texts.
        tokens: of the text itself.
    """

    prefix: Sequence[int]
    tokens: Sequence[int]


class Scorer(Protocol):
    """A model of a server."""

    @property
    def context(self) -> int | None:
        """Length of its context, if the server says it."""

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Tokenize a text. `special`: as the model reads texts, with special tokens."""

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""

    def score(self, tokens: Sequence[int], start: int, top: int) -> list[Score]:
        """Return the scores of the tokens from `start` on, which is above 0, with the `top` most probable ones."""


@contextmanager
def connect_scorer(url: str, api_key: str | None, seconds: float, model: str | None = None) -> Iterator[Scorer]:
    """Connect with a server, and yield a client that fits it.

    Args:
        url: base URL of the server, with or without /v1.
        api_key: its key.
        seconds: timeout of a request.
        model: its name; default: the first of the server.

    Raises:
        ServerError: the server cannot be reached, or does not have the model.
    """
    root = url.rstrip("/").removesuffix("/v1")
    with connect(root, api_key, httpx.Timeout(seconds, connect=_CONNECT_SECONDS)) as client:
        api = _Api(client)
        card = _model_card(api, model)
        if card.get("owned_by") == "llamacpp":
            yield _LlamaScorer(api, card.get("meta"))
        else:
            yield _OpenAIScorer(api, str(card["id"]), card.get("max_model_len"))


def split_text(scorer: Scorer, text: str) -> TokenizedText:
    """Tokenize a text, and tell the special tokens in front of it.

    Raises:
        ServerError: the server cannot do it.
    """
    tokens, among = scorer.tokenize(text, special=False), scorer.tokenize(text, special=True)
    for start in range(len(among) - len(tokens) + 1):
        if among[start : start + len(tokens)] == tokens:
            return TokenizedText(among[:start], tokens)
    raise ServerError("the server tokenizes the text itself in another way if special tokens are added")


class _Refusal(ServerError):
    """The server answers a request with an error."""


class _Api:
    """A server's API."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            ServerError: there is none.
        """
        try:
            response = self.client.post(path, json=body)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.client.base_url}{path} does not answer: {error!r}") from error
        if response.is_error:
            raise _Refusal(f"/{path}: {error_text(response)}")
        try:
            answer = response.json()
        except ValueError as error:
            raise ServerError(f"{self.client.base_url}{path} does not answer with JSON") from error
        if not isinstance(answer, dict):
            raise ServerError(f"{self.client.base_url}{path} does not answer with a JSON object")
        return answer

    def tokens(self, body: Mapping[str, Any]) -> list[int]:
        """Return the tokens that /tokenize answers with."""
        tokens = self.post("tokenize", body).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise ServerError(f"{self.client.base_url}tokenize answers without a list `tokens` of ids")
        return tokens


def _model_card(api: _Api, model: str | None) -> Mapping[str, Any]:
    base = api.client.base_url
    try:
        cards = api.client.get("v1/models").raise_for_status().json()["data"]
        names = [str(card["id"]) for card in cards]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ServerError(f"could not list the models of {base}: {error}") from error
    if not names or (model is not None and model not in names):
        raise ServerError(f"{base} has the models {', '.join(names) or '(none)'}, but not {model or 'any'}")
    card: Mapping[str, Any] = cards[names.index(model) if model is not None else 0]
    return card


class _OpenAIScorer:
    """Quire, vLLM, and other servers that have /tokenize and give log probabilities of prompts."""

    def __init__(self, api: _Api, model: str, context: object) -> None:
        self._api = api
        self._model = model
        self._echoes = False
        self._context = context if isinstance(context, int) else None

    @property
    def context(self) -> int | None:
        return self._context

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        return self._api.tokens({"model": self._model, "prompt": text, "add_special_tokens": special})

    def detokenize(self, tokens: Sequence[int]) -> str:
        return str(self._api.post("detokenize", {"model": self._model, "tokens": list(tokens)}).get("prompt"))

    def score(self, tokens: Sequence[int], start: int, top: int) -> list[Score]:
        """Ask for `prompt_logprobs`, as of vLLM and Quire; if there are none, for `echo` with `logprobs`, as of OpenAI.

        Raises:
            ServerError: the server gives neither.
        """
        if self._echoes:
            return self._by_echo(tokens, start, top)
        try:
            return self._by_prompt_logprobs(tokens, start, top)
        except _Refusal as refusal:
            first_refusal = refusal
        try:
            scores = self._by_echo(tokens, start, top)
        except _Refusal as refusal:
            raise ServerError(
                f"{self._api.client.base_url} gives no log probabilities of prompts, neither with `prompt_logprobs` "
                f"({first_refusal}) nor with `echo` and `logprobs` ({refusal})"
            ) from refusal
        self._echoes = True
        return scores

    def _by_prompt_logprobs(self, tokens: Sequence[int], start: int, top: int) -> list[Score]:
        entries = self._choice(tokens, {"prompt_logprobs": top}).get("prompt_logprobs")
        if not isinstance(entries, list) or len(entries) != len(tokens):
            raise _Refusal("the answer has no `prompt_logprobs` of all tokens")
        try:
            return [
                Score(
                    float(entry[str(token)]["logprob"]),
                    {int(name): float(candidate["logprob"]) for name, candidate in entry.items()},
                )
                for entry, token in zip(entries[start:], tokens[start:], strict=True)
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _Refusal(f"the answer's `prompt_logprobs` are of another form: {error!r}") from error

    def _by_echo(self, tokens: Sequence[int], start: int, top: int) -> list[Score]:
        choice = self._choice(tokens, {"echo": True, "logprobs": top, "return_tokens_as_token_ids": True})
        logprobs = choice.get("logprobs")
        try:
            values, candidates = logprobs["token_logprobs"], logprobs["top_logprobs"]  # type: ignore[index]
            if len(values) < len(tokens):
                raise _Refusal("the answer's `logprobs` are not of all tokens of the prompt")
            return [
                Score(float(value), {_name(name): float(logprob) for name, logprob in entry.items()})
                for value, entry in zip(values[start : len(tokens)], candidates[start : len(tokens)], strict=True)
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _Refusal(f"the answer has no `logprobs` of the prompt: {error!r}") from error

    def _choice(self, tokens: Sequence[int], fields: Mapping[str, Any]) -> Mapping[str, Any]:
        body = {"model": self._model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, **fields}
        choices = self._api.post("v1/completions", body).get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise _Refusal("the answer has no `choices`")
        return choices[0]


def _name(name: str) -> int | str:
    number = name.removeprefix(_ID_NAME)
    return int(number) if number != name and number.isdecimal() else name


class _LlamaScorer:
    """llama-server, which gives no log probabilities of prompts: a request for each token asks for the next one's.

    Its cache holds the tokens before, so that each request computes one.
    """

    def __init__(self, api: _Api, meta: object) -> None:
        self._api = api
        context = meta.get("n_ctx") if isinstance(meta, dict) else None
        self._context = context if isinstance(context, int) else None

    @property
    def context(self) -> int | None:
        return self._context

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        return self._api.tokens({"content": text, "add_special": special, "parse_special": False})

    def detokenize(self, tokens: Sequence[int]) -> str:
        return str(self._api.post("detokenize", {"tokens": list(tokens)}).get("content"))

    def score(self, tokens: Sequence[int], start: int, top: int) -> list[Score]:
        scores = []
        for place in range(start, len(tokens)):
            token = tokens[place]
            candidates = self._next(tokens[:place], _LLAMA_CANDIDATES)
            if token not in candidates:
                candidates = self._next(tokens[:place], _ALL_CANDIDATES)
            if token not in candidates:
                raise ServerError(f"llama-server does not say the probability of token {token}")
            first = sorted(candidates.items(), key=lambda pair: -pair[1])[:top]
            scores.append(Score(candidates[token], {**dict(first), token: candidates[token]}))
        return scores

    def _next(self, tokens: Sequence[int], count: int) -> dict[int | str, float]:
        body = {"prompt": list(tokens), "n_predict": 1, "n_probs": count, "temperature": 0, "cache_prompt": True}
        answer = self._api.post("completion", body)
        try:
            (place,) = answer["completion_probabilities"]
            return {int(candidate["id"]): float(candidate["logprob"]) for candidate in place["top_logprobs"]}
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"llama-server answers without probabilities of the next token: {error!r}") from error
