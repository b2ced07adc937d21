"""Asks the server at URL for its models, and the first that generates text for some tokens."""

import json
import os
import urllib.error
import urllib.request
from typing import Any


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    """The answer to a request; POST with a body, GET without."""
    key = os.environ.get("QUIRE_API_KEY", "").split(",")[0]
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(os.environ["URL"] + path, data, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


models = [model["id"] for model in ask("/v1/models")["data"]]
print("models:", *models)
for model in models:
    messages = [{"role": "user", "content": "Hello"}]
    try:
        answer = ask("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 16})
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        continue  # an embedder or a speech recognizer
    print(model, "answers:", answer["choices"][0]["message"]["content"])
    break
