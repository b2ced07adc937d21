"""ModelInfo: each kind of model arrives as it was sent, and says what the model does."""

from __future__ import annotations

import msgspec
import pytest

from quire.engine.client.model_info import Generates, ModelKind
from quire.engine.client.protocol import CoreMessage, Ready
from quire.engine.client.streaming import DelayedStreamsInfo, TransducerInfo
from quire.engine.client.transport import MessageDecoder, MessageEncoder
from tests.support import ctc_speech
from tests.support.audio_chat import audio_info
from tests.support.fake_core import INFO
from tests.support.pooling import POOLING
from tests.support.speech import SPEECH

DELAYED = DelayedStreamsInfo(
    sample_rate=16000,
    num_mel_bins=128,
    columns_per_frame=8,
    floor=-6.5,
    delay_frames=6,
    left_frames=32,
    right_frames=17,
    start_token=1,
    pad_token=32,
)
TRANSDUCER = TransducerInfo(
    sample_rate=16000, num_mel_bins=128, columns_per_frame=8, chunk_frames=7, blank_token=1024, max_symbols=10
)


@pytest.mark.parametrize(
    ("kind", "tasks"),
    [
        (Generates(), ("generate",)),
        (Generates(audio=audio_info("qwen3_asr")), ("generate", "transcribe")),
        (POOLING, POOLING.tasks),
        (
            msgspec.structs.replace(POOLING, tasks=("embed", "token_embed"), score_method="cosine"),
            ("embed", "token_embed", "score"),
        ),
        (msgspec.structs.replace(POOLING, tasks=("embed",), score_method=None), ("embed",)),
        (SPEECH, ("transcribe",)),
        (ctc_speech.SPEECH, ("transcribe",)),
        (DELAYED, ("transcribe",)),
        (TRANSDUCER, ("transcribe",)),
    ],
)
def test_a_kind_arrives_and_has_its_tasks(kind: ModelKind, tasks: tuple[str, ...]) -> None:
    sent = Ready(msgspec.structs.replace(INFO, kind=kind))
    received = MessageDecoder[CoreMessage](CoreMessage).decode(MessageEncoder().encode(sent))
    assert received == sent
    assert isinstance(received, Ready)
    assert received.info.tasks == tasks
