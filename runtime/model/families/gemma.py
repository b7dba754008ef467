"""Gemma 2 to 4: windows, caps, and ropes by type of layer."""

from runtime.model.families.family import Family

FAMILIES = (
    Family("gemma2", always={"hidden_act": "gelu_pytorch_tanh"}),
    Family(
        "gemma3_text",
        reads={"rope_local_base_freq", "sliding_window_pattern"},
        always={"hidden_act": "gelu_pytorch_tanh"},
    ),
    Family("gemma3n_text", reads={"rope_local_base_freq", "sliding_window_pattern"}),
    Family("gemma4_text", reads={"audio_config", "global_head_dim", "num_global_key_value_heads"}),
    Family(
        "gemma4_unified_text",
        reads={"audio_config", "global_head_dim", "num_global_key_value_heads"},
        always={"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 262144},
    ),
)
