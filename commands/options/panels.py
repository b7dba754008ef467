"""The panels of `--help`, in the order of all commands."""

from typing import Any

INPUT, OUTPUT, SPECULATION, SAMPLING = "Input", "Output", "Speculation", "Sampling"
KV_CACHE, RUNTIME, LEADER, SERVER = "KV cache", "Runtime", "Leader mode (V2)", "Server"
ROUNDING, CLUSTER = "Rounding", "Cluster"
PANELS = (INPUT, SERVER, CLUSTER, RUNTIME, ROUNDING, SPECULATION, SAMPLING, KV_CACHE, LEADER, OUTPUT)

COMMON = frozenset(
    {
        "help_all", "prompt", "engine_dir", "hf_model_dir", "input_text", "input_file", "apply_chat_template", "system",
        "dataset",
        "max_output_len", "output_len", "test_engine", "test_hf", "batch_size", "max_ite", "stop_words",
        "ngram_config", "draft_len_mode", "profile", "draft_target_model_config", "draft_engine_dir",
        "temperature", "top_k", "top_p", "random_seed",
        "model_dir", "draft_model_dir", "streaming",
        "check_accuracy", "check_lossless", "stats", "show_tokens", "report",
        "json", "quiet",
        "host", "port", "api_key", "served_model_name", "max_queue_len",
        "output_file", "ray", "num_workers", "traces", "output",
    }
)  # fmt: skip
"""What `--help` shows of a command with many flags; `--help-all` shows all."""


def sort_by_panel(params: list[Any]) -> list[Any]:
    """A command's parameters in the order of their panels; arguments and what has no panel first."""
    places = {panel: i for i, panel in enumerate(PANELS)}
    return sorted(params, key=lambda param: places.get(getattr(param, "rich_help_panel", None) or "", -1))
