"""`kv_transfer_params`: prefill and decode of a request in two servers, with the fields of vLLM's NixlConnector."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from quire.protocol.common import RequestPart, field_error

_NAME = "kv_transfer_params"
Text = Annotated[str, Field(max_length=256)]
OneRank = Annotated[int, Field(ge=1, le=1)]


class KVTransferParams(RequestPart):
    """What a router passes from a prefiller's answer to a decoder, and before that asks the prefiller for."""

    do_remote_decode: bool | None = Field(
        None, description="keep the KV blocks of the prompt for another server; needs `max_tokens` 1"
    )
    do_remote_prefill: bool | None = Field(
        None, description="read the KV blocks of the prompt from the server that the other fields name"
    )
    remote_engine_id: Text | None = None
    remote_request_id: Text | None = Field(None, description="the request in that server that has computed them")
    remote_host: Annotated[str, Field(max_length=255)] | None = None
    remote_port: Annotated[int, Field(ge=1, lt=1 << 16)] | None = None
    remote_num_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="tokens of the prompt there; default: those of this prompt"
    )
    remote_block_ids: Any = Field(None, description="without effect: blocks are found by their content")
    remote_blocks_expiry_time: float | None = Field(None, description="without effect")
    remote_registration_generation: Any = Field(None, description="without effect")
    transfer_mode: Any = Field(None, description="without effect: the decoder reads")
    tp_size: OneRank | None = None
    dcp_size: OneRank | None = None
    pp_size: OneRank | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.do_remote_decode and self.do_remote_prefill:
            raise field_error(
                f"{_NAME}.do_remote_decode", "`do_remote_decode` cannot be combined with `do_remote_prefill`."
            )
        for name in ("remote_host", "remote_port", "remote_request_id"):
            if self.do_remote_prefill and getattr(self, name) in (None, ""):
                raise field_error(f"{_NAME}.{name}", f"`do_remote_prefill` needs `{name}`.")
        return self
