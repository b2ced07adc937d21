"""Configs of encoders, and of heads for labels, from the metadata of GGUF files.

As in `architectures`, what llama.cpp has in code is said here.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.models.checkpoint.gguf.decoder_config import (
    EMBEDDING,
    Config,
    biases,
    num_layers,
    rms_decoder,
    special_tokens,
)
from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.checkpoint.gguf.rope import THETA, rope_of
from quire.engine.models.errors import BrokenFolder, UnsupportedModel

DENSE, NORM, LABELS = "cls.weight", "cls.norm.weight", "cls.output.weight"  # of heads for labels
JINA_BERT, MODERN_BERT = "jina-bert-v2", "modern-bert"
_CLASSIFIER_POOLING = {1: "mean", 2: "cls"}


def head_for_labels(facts: GgufFacts) -> Config:
    """What the configs of rerankers and classifiers have besides.

    Raises:
        UnsupportedModel: the head is not supported.
    """
    labels = list(facts.texts(".classifier.output_labels"))
    if facts.architecture == "qwen3":
        if labels not in ([], ["yes", "no"]) or facts.shape(LABELS)[0] != 2:
            raise UnsupportedModel(
                f"{facts.file} is a GGUF file of a Qwen 3 with the labels {', '.join(labels)}, which is not supported; "
                'supported are those of rerankers, "yes" and "no"'
            )
        return {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    if facts.architecture not in ("bert", JINA_BERT, MODERN_BERT):
        raise UnsupportedModel(
            f"{facts.file} is a GGUF file of a reranker or classifier of the architecture {facts.architecture!r}, "
            "which is not supported; supported are bert, jina-bert-v2, modern-bert and qwen3"
        )
    needed = (DENSE, NORM, LABELS) if facts.architecture == MODERN_BERT else (DENSE, LABELS)
    if missing := [name for name in needed if name not in facts.shapes]:
        raise UnsupportedModel(
            f"{facts.file} is a GGUF file of a reranker or classifier without {missing[0]}, a part of its head; its "
            "scores would not be those of the model"
        )
    count = facts.shape(LABELS)[0]
    if labels and len(labels) != count:
        key = f"{facts.architecture}.classifier.output_labels"
        raise BrokenFolder(f"{facts.file}: {key} has {len(labels)} labels for {count} outputs")
    named = labels or [f"LABEL_{index}" for index in range(count)]
    by_index = {str(index): label for index, label in enumerate(named)}
    if facts.architecture == MODERN_BERT:
        return {
            "architectures": ["ModernBertForSequenceClassification"],
            "id2label": by_index,
            "classifier_bias": "cls.bias" in facts.shapes,
            "classifier_pooling": _classifier_pooling(facts),
        }
    return {"architectures": [f"{_name(facts)}ForSequenceClassification"], "id2label": by_index}


def _classifier_pooling(facts: GgufFacts) -> str:
    kind = facts.optional_integer(".classifier.pooling_type") or 1
    if kind not in _CLASSIFIER_POOLING:
        raise UnsupportedModel(
            f"{facts.file}: {facts.architecture}.classifier.pooling_type is {kind}, which is not supported; supported "
            "are 1 (mean) and 2 (cls)"
        )
    return _CLASSIFIER_POOLING[kind]


def _bert(facts: GgufFacts) -> Config:
    """BERT, and RoBERTa and its relatives, whose rows of positions before the first token are not in files."""
    positions = facts.shape("position_embd.weight")[0]
    pad = facts.optional_integer("tokenizer.ggml.padding_token_id")
    return {
        **_encoder(facts, "xlm-roberta" if is_roberta(facts) else "bert", _name(facts)),
        "max_position_embeddings": positions + roberta_offset(facts),
        "hidden_act": "gelu",
        "pad_token_id": (1 if is_roberta(facts) else 0) if pad is None else pad,
    }


def _name(facts: GgufFacts) -> str:
    return "XLMRoberta" if is_roberta(facts) else "Bert"


def is_roberta(facts: GgufFacts) -> bool:
    """Whether a file has RoBERTa or one of its relatives, which have the architecture `bert`, too."""
    return facts.architecture == "bert" and facts.optional_text("tokenizer.ggml.model") != "bert"


def roberta_offset(facts: GgufFacts) -> int:
    """How many rows of positions a file lacks, those up to the padding token's."""
    if not is_roberta(facts):
        return 0
    pad = facts.optional_integer("tokenizer.ggml.padding_token_id")
    return (1 if pad is None else pad) + 1


def _jina_bert(facts: GgufFacts) -> Config:
    """Jina's embedders v2. One variant normalizes queries and keys, which configs say by the repository of its code."""
    variant = "qk-post-norm" if "blk.0.attn_q_norm.weight" in facts.shapes else "implementation"
    prefix = "jinaai/jina-bert-v2-" if variant == "qk-post-norm" else "jinaai/jina-bert-"
    return {
        **_encoder(facts, "bert", "Bert"),
        "max_position_embeddings": facts.integer(".context_length"),
        "hidden_act": "gelu",
        "pad_token_id": facts.optional_integer("tokenizer.ggml.padding_token_id") or 0,
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "auto_map": {"AutoConfig": f"{prefix}{variant}--configuration_bert.JinaBertConfig"},
    }


def _nomic_bert(facts: GgufFacts) -> Config:
    return {
        **_encoder(facts, "nomic_bert", "NomicBert"),
        "max_position_embeddings": facts.integer(".context_length"),
        "hidden_act": "silu",
        "pad_token_id": facts.optional_integer("tokenizer.ggml.padding_token_id") or 0,
        "rope_parameters": rope_of(facts),
    }


def _nomic_bert_moe(facts: GgufFacts) -> Config:
    """Nomic Embed v2. Its files lack the bias that is added to the result of a layer's experts."""
    return {
        **_nomic_bert(facts),
        "hidden_act": "gelu",
        "moe_every_n_layers": facts.integer(".moe_every_n_layers"),
        "num_experts": facts.integer(".expert_count"),
        "moe_top_k": facts.integer(".expert_used_count"),
    }


def _jina_bert_v3(facts: GgufFacts) -> Config:
    """Jina's embedder v3, without the adapters, which have files of their own."""
    return {
        **_encoder(facts, "jina_embeddings_v3", "JinaEmbeddingsV3"),
        "max_position_embeddings": facts.integer(".context_length"),
        "hidden_act": "gelu",
        "rope_parameters": rope_of(facts),
    }


def _modern_bert(facts: GgufFacts) -> Config:
    """ModernBERT, whose first layer and every third one behind it attend to all positions if a file does not say."""
    eps = facts.optional_number(".attention.layer_norm_epsilon")
    theta = facts.optional_number(".rope.freq_base") or THETA
    return {
        "architectures": ["ModernBertModel"],
        "model_type": "modernbert",
        "hidden_size": facts.integer(".embedding_length"),
        "intermediate_size": facts.integer(".feed_forward_length"),
        "num_hidden_layers": num_layers(facts),
        "num_attention_heads": facts.integer(".attention.head_count"),
        "max_position_embeddings": facts.integer(".context_length"),
        "norm_eps": facts.number(".attention.layer_norm_rms_epsilon") if eps is None else eps,
        "norm_bias": "output_norm.bias" in facts.shapes,
        "attention_bias": "blk.0.attn_qkv.bias" in facts.shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in facts.shapes,
        "hidden_activation": facts.optional_text(".hidden_activation") or "gelu",
        "local_attention": facts.integer(".attention.sliding_window"),
        "global_attn_every_n_layers": facts.optional_integer(".attention.sliding_window_pattern") or 3,
        "global_rope_theta": theta,
        "local_rope_theta": facts.optional_number(".rope.freq_base_swa") or theta,
        "vocab_size": facts.shape(EMBEDDING)[0],
        **special_tokens(facts),
    }


def _eurobert(facts: GgufFacts) -> Config:
    """EuroBERT: Llama whose tokens attend in both directions."""
    config = rms_decoder(facts, "eurobert", "EuroBert", head_dim=facts.head_dim, **biases(facts))
    return {**config, "architectures": ["EuroBertModel"]}


def _encoder(facts: GgufFacts, model_type: str, head: str) -> Config:
    types = facts.shapes.get("token_types.weight", (0,))[0]
    return {
        "architectures": [f"{head}Model"],
        "model_type": model_type,
        "hidden_size": facts.integer(".embedding_length"),
        "intermediate_size": facts.integer(".feed_forward_length"),
        "num_hidden_layers": num_layers(facts),
        "num_attention_heads": facts.integer(".attention.head_count"),
        "layer_norm_eps": facts.number(".attention.layer_norm_epsilon"),
        "vocab_size": facts.shape(EMBEDDING)[0],
        "type_vocab_size": types,
        **special_tokens(facts),
    }


ENCODERS: dict[str, Callable[[GgufFacts], Config]] = {
    "bert": _bert,
    "eurobert": _eurobert,
    JINA_BERT: _jina_bert,
    "jina-bert-v3": _jina_bert_v3,
    MODERN_BERT: _modern_bert,
    "nomic-bert": _nomic_bert,
    "nomic-bert-moe": _nomic_bert_moe,
}
