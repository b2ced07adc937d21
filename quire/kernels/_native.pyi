"""See csrc/module.cpp; tensors are given by address, `narrow` is 1 for bfloat16."""

INSTRUCTIONS: str

def begin_capture(counts: list[int], /) -> None: ...
def end_capture() -> object | None: ...
def replay(recording: object, counts: list[int], /) -> None: ...
def rms_norm(
    narrow: int, x: int, weight: int, out: int, rows: int, stride: int, dim: int, eps: float, offset: float, /
) -> None: ...
def qk_norm_rope(
    narrow: int,
    x: int,
    cos: int,
    sin: int,
    q_weight: int,
    k_weight: int,
    tokens: int,
    q_heads: int,
    k_heads: int,
    dim: int,
    stride: int,
    pairs: int,
    eps: float,
    offset: float,
    /,
) -> None: ...
def write_pages(
    narrow: int,
    key_pages: int,
    key_pages_head: int,
    key_pages_block: int,
    key_pages_row: int,
    value_pages: int,
    value_pages_head: int,
    value_pages_block: int,
    value_pages_row: int,
    slots: int,
    keys: int,
    values: int,
    tokens: int,
    heads: int,
    block_size: int,
    key_dim: int,
    value_dim: int,
    key_stride: int,
    value_stride: int,
    rounded: int,
    /,
) -> None: ...
def add_scaled(narrow: int, x: int, y: int, out: int, rows: int, dim: int, scale: float, /) -> None: ...
def act_and_mul(narrow: int, x: int, out: int, rows: int, size: int, act: int, /) -> None: ...
def paged_decode(
    narrow: int,
    q: int,
    keys: int,
    keys_head: int,
    keys_block: int,
    keys_row: int,
    values: int,
    values_head: int,
    values_block: int,
    values_row: int,
    out: int,
    tables: int,
    lengths: int,
    sinks: int,
    sequences: int,
    heads: int,
    kv_heads: int,
    q_stride: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
    table_stride: int,
    window: int,
    scale: float,
    softcap: float,
    rounded: int,
    positions: int,
    /,
) -> None: ...
def paged_varlen(
    q: int,
    keys: int,
    keys_head: int,
    keys_block: int,
    keys_row: int,
    values: int,
    values_head: int,
    values_block: int,
    values_row: int,
    out: int,
    tables: int,
    lengths: int,
    counts: int,
    sinks: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    q_stride: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
    table_stride: int,
    window: int,
    scale: float,
    softcap: float,
    rounded: int,
    /,
) -> None: ...
def linear(
    x: int, weight: int, bias: int, out: int, rows: int, size_in: int, size_out: int, x_stride: int, wide: int, /
) -> None: ...
def quantized_linear(
    narrow: int,
    x: int,
    weight: int,
    scales: int,
    corrections: int,
    bias: int,
    out: int,
    rows: int,
    size_in: int,
    size_out: int,
    x_stride: int,
    bits: int,
    wide: int,
    /,
) -> None: ...
def take_rows(table: int, rows: int, out: int, count: int, words: int, stride: int, panel: int, /) -> None: ...
def apply_token_bitmask(logits: int, masks: int, pairs: int, count: int, vocab: int, words: int, /) -> None: ...
def argmax(logits: int, rows: int, vocab: int, /) -> list[int]: ...
def sample(logits: int, temperatures: list[float], randoms: list[float], rows: int, vocab: int, /) -> list[int]: ...
def build_inputs(
    rows: list[int],
    starts: list[int],
    sizes: list[int],
    ends: list[int],
    known: int,
    known_stride: int,
    blocks: int,
    blocks_stride: int,
    block_size: int,
    tokens: int,
    positions: int,
    slots: int,
    lengths: int,
    counts: int,
    tables: int,
    end_rows: int,
    end_lengths: int,
    end_tables: int,
    /,
) -> int: ...
