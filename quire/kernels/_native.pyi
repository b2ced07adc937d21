"""See csrc/module.cpp; tensors are given by address, `narrow` is 1 for bfloat16."""

INSTRUCTIONS: str

def rms_norm(
    narrow: int,
    x: int,
    weight: int,
    out: int,
    rows: int,
    heads: int,
    stride: int,
    dim: int,
    eps: float,
    offset: float,
    /,
) -> None: ...
def rope(
    narrow: int, x: int, cos: int, sin: int, out: int, tokens: int, heads: int, dim: int, stride: int, pairs: int, /
) -> None: ...
def write_pages(
    pages: int, slots: int, rows: int, tokens: int, heads: int, row_bytes: int, token_bytes: int, slots_per_head: int, /
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
def linear(
    x: int, weight: int, bias: int, out: int, rows: int, size_in: int, size_out: int, x_stride: int, wide: int, /
) -> None: ...
