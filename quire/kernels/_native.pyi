"""See csrc/module.cpp; tensors are given by address, `narrow` is 1 for bfloat16."""

INSTRUCTIONS: str

def rms_norm(
    narrow: int, x: int, weight: int, out: int, rows: int, stride: int, dim: int, eps: float, offset: float, /
) -> None: ...
def turn_heads(
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
    key_pages: int,
    value_pages: int,
    slots: int,
    keys: int,
    values: int,
    tokens: int,
    heads: int,
    slots_per_head: int,
    key_bytes: int,
    value_bytes: int,
    key_stride: int,
    value_stride: int,
    /,
) -> None: ...
def act_and_mul(narrow: int, x: int, out: int, rows: int, size: int, act: int, /) -> None: ...
def paged_decode(
    narrow: int,
    q: int,
    keys: int,
    values: int,
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
    key_row: int,
    value_row: int,
    block_size: int,
    head_slots: int,
    table_stride: int,
    window: int,
    scale: float,
    softcap: float,
    positions: int,
    /,
) -> None: ...
def paged_prefill(
    q: int,
    keys: int,
    values: int,
    out: int,
    table: int,
    sinks: int,
    tokens: int,
    length: int,
    heads: int,
    kv_heads: int,
    q_stride: int,
    key_dim: int,
    value_dim: int,
    key_row: int,
    value_row: int,
    block_size: int,
    head_slots: int,
    window: int,
    scale: float,
    softcap: float,
    /,
) -> None: ...
def linear(
    x: int, weight: int, bias: int, out: int, rows: int, size_in: int, size_out: int, x_stride: int, wide: int, /
) -> None: ...
def quantised_linear(
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
