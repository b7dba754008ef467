"""bench/real.py: its tables are sums over what was measured, and what was measured is kept."""

from typing import Any

import pytest

from scripts.bench import real_report


def record(kind: str, tpot_s: float, num_tokens: int, **given: Any) -> dict[str, Any]:
    common = {"model": "smollm2", "prompt": 0, "system": "specdec", "variant": "no drafter", "mode": "greedy"}
    measured = {"ttft_s": 0.1, "num_steps": num_tokens, "num_prompt_tokens": 40, "peak_memory_bytes": 5e8}
    return {"kind": kind, **common, "tpot_s": tpot_s, "num_output_tokens": num_tokens, **measured, **given}


def document(records: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "date": "2026-01-01",
        "machine": {"cpu": "a processor", "num_cores": 2},
        "versions": {"specdec-cli": "1", "llama.cpp": "2"},
        "output_len": 64,
        "num_threads": 2,
        "seconds_to_first_token": {"smollm2": {"specdec": 1.25, "specdec, first": 60.0}},
        "records": records,
    }


def row(table: str, start: str, last: bool = False) -> list[str]:
    found = [line for line in table.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in found[-1 if last else 0].strip("|").split("|")]


def test_time_per_token_is_all_time_by_all_tokens() -> None:
    """9 tokens of 10 ms and 1 of 90 ms are 18 ms each; an output of one token has none after the first."""
    records = [record("chat", 0.010, 10), record("chat", 0.090, 2, prompt=1), record("chat", 5.0, 1, prompt=2)]
    assert real_report.tpot_ms(records) == pytest.approx(18.0)


def test_ratios_are_of_the_same_prompts_and_the_mean_of_kinds() -> None:
    records = []
    for mode, ours, theirs, drafted in (("greedy", 0.010, 0.020, 0.005), ("sampled", 0.012, 0.018, 0.010)):
        for kind, factor in (("chat", 1), ("rag", 3)):
            records += [
                record(kind, ours * factor, 10, mode=mode),
                record(kind, drafted * factor, 10, mode=mode, variant="`AUTO` (suffix matching)", num_steps=5),
                record(
                    kind, theirs * factor * (2 if kind == "rag" else 1), 10, mode=mode, system="llama.cpp", variant=""
                ),
            ]
    table = real_report.tables(document(records), {"smollm2": "SmolLM2", "gemma3": "Gemma"})
    assert list(table) == ["summary", "smollm2"]
    assert row(table["summary"], "llama.cpp")[1:3] == ["70.00 / 63.00", "3.50 / 2.62"]
    times = row(table["smollm2"], "specdec, no drafter")
    assert times[1:] == ["10.00 / 12.00", "30.00 / 36.00", "20.00 / 24.00", "1.00 / 1.00", "100 ms", "1.2 s", "500 MB"]
    assert row(table["smollm2"], "specdec, `AUTO`")[4] == "2.00 / 2.00"
    assert row(table["smollm2"], "llama.cpp", last=True)[1:] == ["2.00 / 1.50", "4.00 / 3.00", "3.50 / 2.62"]
    assert row(table["smollm2"], "specdec, `AUTO`", last=True)[1:] == ["2.00 / 1.20", "2.00 / 1.20", "2.00 / 1.20"]
    assert "takes 60 s to its first token" in table["smollm2"]
