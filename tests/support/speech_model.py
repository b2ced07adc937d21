"""A folder of a whisper with random weights and the tokenizer of `tests.support.speech`, which `quire serve` serves."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

from tests.support.speech import END, SPEECH, TOKEN, VOCAB, write_speech_tokenizer
from tests.support.whisper import save_whisper


def tiny_speech_model(folder: Path) -> Path:
    """Write the folder."""
    torch.manual_seed(0)
    start = TOKEN["<|startoftranscript|>"]
    ids = {"eos_token_id": END, "pad_token_id": END, "bos_token_id": END, "decoder_start_token_id": start}
    config = WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=SPEECH.num_mel_bins,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=SPEECH.num_positions,
        max_target_positions=64,
        **ids,
    )
    model = WhisperForConditionalGeneration(config).eval()
    generation = GenerationConfig(max_length=64, **ids)
    facts = {
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": token for code, token in SPEECH.languages.items()},
        "task_to_id": {"transcribe": TOKEN["<|transcribe|>"], "translate": TOKEN["<|translate|>"]},
        "no_timestamps_token_id": TOKEN["<|notimestamps|>"],
        "prev_sot_token_id": TOKEN["<|startofprev|>"],
        "suppress_tokens": list(SPEECH.suppress_tokens),
        "begin_suppress_tokens": list(SPEECH.begin_suppress_tokens),
        "alignment_heads": [[1, 0]],
        "return_timestamps": False,
    }
    for name, value in facts.items():
        setattr(generation, name, value)
    model.generation_config = generation
    save_whisper(model, folder)
    write_speech_tokenizer(folder)
    return folder
