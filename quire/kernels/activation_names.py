"""Names of activations in configs. Without torch: a server reads configs while it imports torch."""

from __future__ import annotations

# A name in configs -> that of the function.
CANONICAL_ACTIVATIONS: dict[str, str] = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
    **{
        name: name
        for name in (
            *("quick_gelu", "relu", "relu2", "relu6", "leaky_relu", "mish", "hardswish", "sigmoid", "tanh", "linear"),
        )
    },
}
