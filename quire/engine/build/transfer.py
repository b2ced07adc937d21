"""OpenedTransfer: the connections of an engine that sends KV blocks to others or reads theirs."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path

import quire
from quire.config.kv_transfer import KVTransferConfig
from quire.config.options import EngineOptions
from quire.engine.build.cache import CachePlan, reason_against_reading_blocks
from quire.engine.build.core_config import CoreConfig
from quire.engine.client.facts import Facts
from quire.engine.client.kv_transfer import KVTransferInfo
from quire.engine.client.model_info import Generates
from quire.engine.client.transport import CoreChannel
from quire.engine.core.transfer import ReaderSources, Transfer
from quire.engine.execution.devices.device import Device
from quire.engine.models.checkpoint.packed_cache import source_digest
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.loader import LoadedModel
from quire.engine.scheduling.block_source import RemoteLoading
from quire.engine.scheduling.blocks import BlockPool
from quire.engine.scheduling.held_blocks import EngineAddress, HeldBlocks, HoldLimits
from quire.engine.transfer.block_facts import file_facts
from quire.engine.transfer.block_reader import BlockReader
from quire.engine.transfer.block_server import BlockServer
from quire.engine.transfer.loop_thread import LoopThread
from quire.engine.transfer.security import Security, UnusableSecurity

logger = logging.getLogger(__name__)
_CODE = ("kernels", "engine/models", "engine/execution")  # what computes keys and values, and lays them out
_OPTIONS = ("quantization", "activation_quantization", "load_format", "hf_overrides", "model_impl")


@dataclass(frozen=True, slots=True)
class OpenedTransfer:
    """What the core and each of its schedulers need to send blocks and to read them.

    Attributes:
        loading: None: blocks are not read.
        address: None: blocks are not sent.
    """

    core: Transfer
    info: KVTransferInfo
    limits: HoldLimits
    loading: RemoteLoading | None
    address: EngineAddress | None

    def held_blocks(self, pool: BlockPool) -> HeldBlocks | None:
        """Return what keeps blocks of a pool; None: none are kept."""
        return None if self.address is None else HeldBlocks(pool, self.address, self.limits)

    def close(self) -> None:
        """End the connections."""
        self.core.close()


def open_transfer(
    config: CoreConfig, loaded: LoadedModel, plan: CachePlan, device: Device, channel: CoreChannel
) -> OpenedTransfer | None:
    """Open the connections of an engine; None: it has none.

    `channel`: wakes the core up when blocks are asked for.

    Raises:
        UnsupportedModel: the blocks of this engine cannot be sent, or a file of the settings cannot be used.
        AddressUnavailable: the address of --kv-transfer-config cannot be bound.
    """
    settings = config.engine.kv_transfer
    if settings is None:
        return None
    if reason := _reason_against(config, loaded, plan, device):
        raise UnsupportedModel(f"--kv-transfer-config is not supported: {reason}")
    extra = settings.kv_connector_extra_config
    try:
        security = Security.of(extra)
    except UnusableSecurity as error:
        raise UnsupportedModel(f"--kv-transfer-config: {error}") from error
    thread = LoopThread()
    server, address = None, None
    if settings.sends:
        port = settings.kv_port + config.replica if settings.kv_port else 0
        try:
            server = BlockServer(
                thread, (settings.kv_ip, port), plan.block_bytes, extra.max_connections, channel.waker(), security
            )
        except BaseException:
            thread.close()
            raise
        address = EngineAddress(_engine_id(settings, config.replica), settings.kv_ip, server.port)
        logger.info("KV blocks are sent from %s:%d", address.host, address.port)
    reader = BlockReader(thread, plan.block_bytes, extra.load_timeout, security) if settings.receives else None
    loading = None
    if reader is not None:
        recomputes = settings.kv_load_failure_policy == "recompute"
        loading = RemoteLoading(ReaderSources(reader), extra.load_timeout, recomputes)
    _compare_later(config.folder, _facts(config, loaded, plan, device), server, reader)
    info = KVTransferInfo(sends=settings.sends, receives=settings.receives, allowed_hosts=extra.allowed_hosts)
    limits = HoldLimits(extra.held_share, extra.abort_request_timeout)
    return OpenedTransfer(Transfer(thread, plan.block_bytes, server, reader), info, limits, loading, address)


def _engine_id(settings: KVTransferConfig, replica: int) -> str:
    name = settings.engine_id or str(uuid.uuid4())
    return f"{name}_dp{replica}" if replica else name


def _reason_against(config: CoreConfig, loaded: LoadedModel, plan: CachePlan, device: Device) -> str:
    """Return why blocks of an engine are not sent; empty: they are."""
    if device.has_memory:
        return "the KV blocks of GPUs are not sent"
    if reason := reason_against_reading_blocks(config, plan):
        return reason
    if not config.engine.enable_prefix_caching:
        return "it needs --enable-prefix-caching"
    if not isinstance(loaded.config.kind(loaded.context_len, config.engine.max_num_batched_tokens), Generates):
        return "the model does not answer completions or chats"
    return ""


def _facts(config: CoreConfig, loaded: LoadedModel, plan: CachePlan, device: Device) -> Facts:
    """Return what the bytes of blocks depend on, without the files of the model."""
    options: EngineOptions = config.engine
    settings = {f"option {name}": _text(getattr(config.model, name)) for name in _OPTIONS}
    return {
        "version of Quire": quire.__version__,
        "architecture": loaded.config.model_type,
        "context length": str(loaded.context_len),
        "data type": str(loaded.dtype).removeprefix("torch."),
        "data type of the KV cache": str(plan.dtype).removeprefix("torch."),
        "block size": str(plan.block_size),
        "size of a block in bytes": str(plan.block_bytes),
        "hash function of blocks": options.prefix_caching_hash_algo,
        "attention backend": options.attention_backend,
        "kernels": device.description,
        **settings,
        "layout of blocks": hashlib.sha256(repr(plan.layout).encode()).hexdigest()[:16],
        "digest of Quire's kernels": source_digest(_CODE).hex()[:16],
    }


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _compare_later(folder: Path, facts: Facts, *ends: BlockServer | BlockReader | None) -> None:
    """Read the model's files in a thread: it takes seconds per model, in which requests may already be computed."""

    def read() -> None:
        try:
            complete: Facts | str = {**facts, **file_facts(folder)}
        except OSError as error:
            logger.warning("no KV blocks are sent or read: a file of the model cannot be read: %s", error)
            complete = f"a file of the model cannot be read: {error.strerror}"
        for end in ends:
            if end is not None:
                end.set_facts(complete)

    threading.Thread(target=read, name="quire-kv-transfer-digest", daemon=True).start()
