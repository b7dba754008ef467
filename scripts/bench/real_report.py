"""Report of bench/real.py as Markdown: of each model a row for each system, and what others take of our time.

TPOT of a kind is the time after the first token of all its prompts by their tokens after the first; that of all kinds
is the mean of theirs, and a ratio that of two such means.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median
from typing import Any

OURS = ("specdec", "no drafter")
NAMES = {
    "specdec-bfloat16": "specdec, bfloat16",
    "openvino-int8": "OpenVINO GenAI, int8",
    "openvino-int4": "OpenVINO GenAI, int4",
    "llama.cpp": "llama.cpp",
    "hugging-face": "Hugging Face, bfloat16",
}
NOT_IN_SUMMARY = [
    ("specdec", "n-gram `[10,2]`, fixed"),
    ("specdec", "n-gram `[10,2]`, automatic"),
    ("specdec-bfloat16", "no drafter"),
]
MODES = ("greedy", "sampled")
Records = list[dict[str, Any]]


def tpot_ms(records: Iterable[dict[str, Any]]) -> float:
    """Milliseconds per token after the first, outputs of one token left out."""
    longer = [record for record in records if record["num_output_tokens"] > 1]
    seconds = sum(record["tpot_s"] * (record["num_output_tokens"] - 1) for record in longer)
    return seconds * 1e3 / sum(record["num_output_tokens"] - 1 for record in longer)


def by_kind(records: Records) -> dict[str, float]:
    """TPOT of each kind, and the mean as `all`."""
    kinds = list(dict.fromkeys(record["kind"] for record in records))
    values = {kind: tpot_ms(record for record in records if record["kind"] == kind) for kind in kinds}
    return values | {"all": mean(values.values())}


def tokens_per_step(records: Records) -> float:
    return sum(record["num_output_tokens"] for record in records) / sum(record["num_steps"] for record in records)


def label(system: str, variant: str) -> str:
    return ", ".join(part for part in (NAMES.get(system, system), variant) if part)


def tables(document: dict[str, Any], titles: dict[str, str]) -> dict[str, str]:
    """Ratios by model, of those that were measured, and a `summary` of all."""
    found = {"summary": summary(document, titles)}
    for model, title in titles.items():
        records = [record for record in document["records"] if record["model"] == model]
        if records:
            found[model] = "\n".join(
                [
                    *heading(document, title, records),
                    *times(records, document["seconds_to_first_token"].get(model, {})),
                    "",
                    *ratios(records),
                ]
            )
    return found


def summary(document: dict[str, Any], titles: dict[str, str]) -> str:
    """All kinds of prompts together, all models in one table: greedy / sampled."""
    machine = document["machine"]
    lines = [
        "Published models from their GGUF files, on Spec-Bench's six kinds of prompts, against llama.cpp and Hugging",
        "Face with the same file, and OpenVINO GenAI, which requantizes the same weights. All kinds together,",
        f"greedy / sampled, {document['date']}, {document['num_threads']} threads of an {machine['cpu']};",
        "[benchmarks](docs/benchmarks.md#real-models) has the kinds of prompts, and all other figures.",
        "",
        "| | ms per token | ÷ ours | tokens per step | TTFT | command to first token | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, title in titles.items():
        records = [record for record in document["records"] if record["model"] == model]
        grouped = by_system(records)
        if OURS not in grouped:
            continue
        ours = [by_kind(own)["all"] for own in grouped[OURS].values()]
        lines.append(f"| **{title}** | | | | | | |")
        for (system, variant), modes in grouped.items():
            if (system, variant) in NOT_IN_SUMMARY:
                continue
            values = [by_kind(own)["all"] for own in modes.values()]
            cells = [
                slashed(values),
                slashed([theirs / own for theirs, own in zip(values, ours, strict=True)]),
                *others(modes, document["seconds_to_first_token"].get(model, {}).get(system)),
            ]
            lines.append(f"| {label(system, variant)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_system(records: Records) -> dict[tuple[str, str], dict[str, Records]]:
    """Records of each system and variant, greedy ones and sampled ones."""
    grouped: dict[tuple[str, str], dict[str, Records]] = {}
    for name in dict.fromkeys((record["system"], record["variant"]) for record in records):
        own = [record for record in records if (record["system"], record["variant"]) == name]
        grouped[name] = {mode: [record for record in own if record["mode"] == mode] for mode in MODES}
    return grouped


def slashed(values: Iterable[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def others(modes: dict[str, Records], start_s: float | None) -> list[str]:
    """Tokens per step, TTFT, the time to a command's first token, and memory."""
    both = [record for own in modes.values() for record in own]
    return [
        slashed(tokens_per_step(own) for own in modes.values()),
        f"{median(record['ttft_s'] for record in both) * 1e3:,.0f} ms",
        "-" if start_s is None else f"{start_s:.1f} s",
        f"{max(record['peak_memory_bytes'] for record in both) / 1e6:,.0f} MB",
    ]


def heading(document: dict[str, Any], title: str, records: Records) -> list[str]:
    machine, versions = document["machine"], document["versions"]
    prompts = {(record["kind"], record["prompt"]): record["num_prompt_tokens"] for record in records}
    others = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "specdec-cli")
    return [
        f"**{title}**, {document['date']}, {document['num_threads']} threads on {machine['num_cores']} cores of an "
        f"{machine['cpu']} ({others}); {len(prompts)} prompts of {min(prompts.values())} to {max(prompts.values())} "
        f"tokens, outputs of up to {document['output_len']}. Milliseconds per token, greedy / sampled:",
        "",
    ]


def times(records: Records, starts: dict[str, float]) -> list[str]:
    kinds = list(dict.fromkeys(record["kind"] for record in records))
    lines = [
        f"| | {' | '.join(kinds)} | all | tokens per step | TTFT, median | command to first token | memory |",
        "|---" * (len(kinds) + 6) + "|",
    ]
    for (system, variant), modes in by_system(records).items():
        values = [by_kind(own) for own in modes.values()]
        cells = [slashed(one[kind] for one in values) for kind in (*kinds, "all")]
        cells += others(modes, starts.get(system))
        lines.append(f"| {label(system, variant)} | {' | '.join(cells)} |")
    if first := starts.get("specdec, first"):
        lines += ["", f"The very first command, which builds the engine, takes {first:.0f} s to its first token."]
    return lines


def ratios(records: Records) -> list[str]:
    """Ratio of others' time to ours without a drafter; for drafters, how many times as fast the engine is with them."""
    kinds = list(dict.fromkeys(record["kind"] for record in records))
    lines = [f"| | {' | '.join(kinds)} | all |", "|---" * (len(kinds) + 2) + "|"]
    grouped = by_system(records)
    for (system, variant), modes in grouped.items():
        base = (system, "no drafter") if variant else OURS
        if base not in grouped or (system, variant) == base:
            continue
        cells: dict[str, list[float]] = defaultdict(list)
        for mode, own in modes.items():
            theirs, ours = by_kind(own), by_kind(grouped[base][mode])
            for kind in (*kinds, "all"):
                cells[kind].append(ours[kind] / theirs[kind] if variant else theirs[kind] / ours[kind])
        what = f"times as fast as {base[1]}" if variant else f"÷ {label(*base)}"
        lines.append(f"| {label(system, variant)}: {what} | {' | '.join(map(slashed, cells.values()))} |")
    return lines


def put(file: Path, name: str, text: str) -> None:
    """Between the marks of that name in a Markdown file, if it has them."""
    content = file.read_text(encoding="utf-8")
    begin, end = f"<!-- real models: {name} -->\n", "<!-- end real models -->"
    before, mark, rest = content.partition(begin)
    if mark:
        after = rest[rest.index(end) :]
        file.write_text(f"{before}{begin}{text}\n\n{after}", encoding="utf-8")
