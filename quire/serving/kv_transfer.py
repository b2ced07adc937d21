"""From the field `kv_transfer_params` to what the engine is asked for, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.engine.client.kv_transfer import RemoteBlocks
from quire.protocol.errors import InvalidRequest, shorten
from quire.protocol.kv_transfer import KVTransferParams
from quire.protocol.sampling import GenerationRequest
from quire.serving.models import ServedModel
from quire.workers.tenant import current_tenant

_NAME = "kv_transfer_params"


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What the sequence of a request has to do with other engines; see `RequestFields`."""

    is_held: bool = False
    remote: RemoteBlocks | None = None
    flow: str = ""


_NO_TRANSFER = TransferPlan()


def transfer_plan(body: GenerationRequest, model: ServedModel, n: int) -> TransferPlan:
    """Return what a request asks for.

    Raises:
        InvalidRequest: the server does not do that, or not for this request.
    """
    params = body.kv_transfer_params
    if params is None or not (params.do_remote_decode or params.do_remote_prefill):
        return _NO_TRANSFER
    name, role = ("do_remote_decode", "sends") if params.do_remote_decode else ("do_remote_prefill", "reads")
    info = model.info.kv_transfer
    if info is None or not (info.sends if params.do_remote_decode else info.receives):
        verb = "sends no KV blocks" if role == "sends" else "reads no KV blocks of others"
        needed = "kv_producer or kv_both" if role == "sends" else "kv_consumer or kv_both"
        raise InvalidRequest(
            f"`{name}` is not supported: this server {verb}; --kv-transfer-config with the kv_role {needed} is needed.",
            f"{_NAME}.{name}",
        )
    if n > 1:
        raise InvalidRequest(f"`{name}` is supported for requests with one answer, not {n}.", "n")
    if getattr(body, "use_beam_search", False):
        raise InvalidRequest(f"`{name}` cannot be combined with `use_beam_search`.", "use_beam_search")
    if isinstance(prompt := getattr(body, "prompt", None), list) and len(prompt) > 1:
        raise InvalidRequest(f"`{name}` is supported for requests with one prompt, not {len(prompt)}.", "prompt")
    if params.do_remote_decode:
        _check_prefill(body)
        return TransferPlan(is_held=True, flow=current_tenant())
    remote = _remote_blocks(params)
    if not info.allows(remote.host):
        raise InvalidRequest(
            f"`remote_host` {shorten(remote.host)!r} is none of the hosts that KV blocks are read from (allowed_hosts "
            "of --kv-transfer-config).",
            f"{_NAME}.remote_host",
        )
    return TransferPlan(remote=remote)


def answer_params(held_blocks: RemoteBlocks | None) -> dict[str, Any] | None:
    """Return the `kv_transfer_params` of an answer, which are those of the decoder's request; None: nothing is kept."""
    if held_blocks is None:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": held_blocks.engine_id,
        "remote_request_id": held_blocks.request_id,
        "remote_block_ids": held_blocks.block_ids,
        "remote_host": held_blocks.host,
        "remote_port": held_blocks.port,
        "remote_num_tokens": held_blocks.num_tokens,
        "remote_blocks_expiry_time": held_blocks.expires_at,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
    }


def _check_prefill(body: GenerationRequest) -> None:
    if body.most_tokens != 1:
        raise InvalidRequest(
            f"`do_remote_decode` needs `max_tokens` 1, not {body.most_tokens}: the decoder generates the answer.",
            "max_tokens",
        )
    if body.stream:
        raise InvalidRequest("`do_remote_decode` is not available when `stream=True`.", "stream")


def _remote_blocks(params: KVTransferParams) -> RemoteBlocks:
    tokens = params.remote_num_tokens
    return RemoteBlocks(
        engine_id=params.remote_engine_id or "",
        host=params.remote_host or "",  # not empty, as the fields were checked
        port=params.remote_port or 0,
        request_id=params.remote_request_id or "",
        num_tokens=(1 << 31) - 1 if tokens is None else tokens,
    )
