"""huggingface_hub: feature extraction, at TEI's path and at the root of the server."""
# needs: huggingface_hub>=2,<3 numpy

from __future__ import annotations

from huggingface_hub import InferenceClient
from texts import QUERY, SERVER, TEXTS, close, expected

for address in (SERVER, f"{SERVER}/embed"):
    client = InferenceClient(base_url=address, token="none")
    single = client.feature_extraction(TEXTS[0])
    assert close(single, expected(TEXTS[:1])), single.shape
    query = client.feature_extraction(QUERY, prompt_name="query", normalize=True, truncate=True,
                                      truncation_direction="right")  # fmt: skip
    assert close(query, expected([QUERY], input_type="query"))
