"""Report of bench/peers.py's measurements: Markdown tables on stdout and a bar chart.

    python -m scripts.bench.peers_report FILE...

prints the summary of JSON files, one processor after the other. Medians come with their range. A step is one of the
generation phase: its time does not depend on how many drafts were accepted, so that systems can be compared where they
chose other tokens.
"""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

METRICS = ("ttft_s", "tpot_s", "step_s", "wall_s")


def cell(values: dict[str, float], scale: float, digits: int) -> str:
    middle, low, high = (f"{values[key] * scale:,.{digits}f}" for key in ("median", "min", "max"))
    return f"{middle} [{low}-{high}]"


def print_result(result: dict[str, Any]) -> None:
    print(f"\n## {result['model']}, {result['dtype']}\n")
    for name, note in result["notes"].items():
        print(f"- {name}: {note['settings']}; peak memory when loaded {note['loaded_peak_memory_bytes'] / 1e6:,.0f} MB")
    for set_name, lengths in result["prompt_lengths"].items():
        print(f"\n{set_name}, {len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens\n")
        print(
            "| | TTFT ms | TPOT ms | step ms | tokens/s | tokens per step | peak memory MB | ids equal | differ from |"
        )
        print("|---|---|---|---|---|---|---|")
        for row in (row for row in result["systems"] if row["set"] == set_name):
            print(
                f"| {row['name']} | {cell(row['ttft_s'], 1e3, 1)} | {cell(row['tpot_s'], 1e3, 2)} "
                f"| {cell(row['step_s'], 1e3, 2)} "
                f"| {cell(row['output_tokens_per_second'], 1, 1)} | {cell(row['tokens_per_step'], 1, 2)} "
                f"| {row['peak_memory_bytes'] / 1e6:,.0f} | {row['num_equal']}/{row['num_prompts']} "
                f"| {', '.join(map(str, row['first_differences'])) or '-'} |"
            )
    print("\n| ratio, all prompts | TTFT | TPOT | step | wall time |\n|---|---|---|---|---|")
    for row in result["ratios"]:
        cells = " | ".join(cell(row[metric], 1, 2) for metric in METRICS)
        print(f"| {row['numerator']} ÷ {row['denominator']} | {cells} |")


def print_summary(document: dict[str, Any]) -> None:
    """One processor's table: a row per model, dtype and system, over all prompts and runs."""
    machine, settings = document["machine"], document["settings"]
    print(f"\n## {machine['cpu']}: {machine['num_cores']} cores, {settings['num_threads']} threads\n")
    print(f"Instructions: {' '.join(machine['instructions']) or '-'}.")
    print(f"Prompts of at most {settings['max_prompt_len']} tokens, {settings['output_len']} of output.\n")
    print(
        "| model, dtype, system | TTFT ms | TPOT plain ms | TPOT n-gram ms | TTFT ÷ ours | TPOT plain ÷ ours "
        "| TPOT n-gram ÷ ours |"
    )
    print("|---|---|---|---|---|---|---|")
    for result in document["results"]:
        for row in summary_rows(result):
            print(f"| {result['model']}, {result['dtype']}, {' | '.join(row)} |")


def summary_rows(result: dict[str, Any]) -> list[list[str]]:
    """specdec in leader mode, then its peers."""
    rows = [["specdec", *figures(result, "specdec", "none-v2", "ngram-v2"), *["1"] * 3]]
    for system in dict.fromkeys(record["system"] for record in result["records"]):
        if system != "specdec":
            over = {row["numerator"]: row for row in result["ratios"] if row["denominator"].endswith("-v2")}
            plain, ngram = over[f"{system} none"], over[f"{system} ngram"]
            ratios = [cell(values, 1, 2) for values in (plain["ttft_s"], plain["tpot_s"], ngram["tpot_s"])]
            rows.append([system, *figures(result, system, "none", "ngram"), *ratios])
    return rows


def figures(result: dict[str, Any], system: str, plain: str, ngram: str) -> list[str]:
    """TTFT and TPOT without a drafter, TPOT with n-gram lookup: medians in milliseconds."""

    def middle(variant: str, metric: str) -> float:
        own = [r for r in result["records"] if r["system"] == system and r["variant"] == variant]
        return median(record[metric] for record in own) * 1e3

    ttft, tpot, tpot_ngram = middle(plain, "ttft_s"), middle(plain, "tpot_s"), middle(ngram, "tpot_s")
    return [f"{ttft:,.1f}", f"{tpot:,.2f}", f"{tpot_ngram:,.2f}"]


def draw(results: list[dict[str, Any]], file: Path) -> None:
    """TPOT of every system, a panel per model and dtype; bars are medians, lines the range."""
    import matplotlib

    matplotlib.use("Agg")  # draws without a display
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["name"] for result in results for row in result["systems"]))
    figure, panels = pyplot.subplots(
        len(results), 1, figsize=(9, 1 + 0.5 * len(names) * len(results)), squeeze=False, layout="constrained"
    )
    for panel, result in zip(panels[:, 0], results, strict=True):
        sets = list(result["prompt_lengths"])  # every one has the same rows
        for i, set_name in enumerate(sets):
            rows = [row for row in result["systems"] if row["set"] == set_name]
            middle = [row["tpot_s"]["median"] * 1e3 for row in rows]
            low = [m - row["tpot_s"]["min"] * 1e3 for m, row in zip(middle, rows, strict=True)]
            high = [row["tpot_s"]["max"] * 1e3 - m for m, row in zip(middle, rows, strict=True)]
            places = [j + i * 0.8 / len(sets) for j in range(len(rows))]
            panel.barh(places, middle, 0.75 / len(sets), xerr=[low, high], label=set_name, capsize=2)
        panel.set_yticks([j + 0.4 - 0.4 / len(sets) for j in range(len(rows))], [row["name"] for row in rows])
        panel.invert_yaxis()
        panel.set_title(f"{result['model']}, {result['dtype']}")
        panel.set_xlabel("TPOT, ms (less is better)")
        panel.legend()
    figure.savefig(file, format="png", dpi=120)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print_summary(json.loads(Path(name).read_text(encoding="utf-8")))
