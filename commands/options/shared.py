"""What commands share on the command line: annotated options, and what must not be given together."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from commands.options.drafting import DraftLen, NgramPoolKind, NgramRanking
from runtime.errors import UsageError

if TYPE_CHECKING:
    from runtime.sampling import SamplingParams

INPUT, OUTPUT, SPECULATION, SAMPLING = "Input", "Output", "Speculation", "Sampling"
KV_CACHE, RUNTIME, LEADER = "KV cache", "Runtime", "Leader mode (V2)"
PANELS = (INPUT, RUNTIME, SPECULATION, SAMPLING, KV_CACHE, LEADER, OUTPUT)  # in this order in `--help`

EngineDir = Annotated[Path, typer.Option(help="Engine directory made by `build`.", rich_help_panel=INPUT)]
TokenizerDir = Annotated[
    Path | None,
    typer.Option(help="Tokenizer to use instead of the engine's own.", rich_help_panel=INPUT, show_default="engine's"),
]
NgramConfig = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Draft by n-gram lookup: [max_draft_len, max_matching_ngram_size, device_list], such as [10,2,[0]].",
        rich_help_panel=SPECULATION,
        show_default="no drafter",
    ),
]
NgramRankingOption = Annotated[
    NgramRanking | None,
    typer.Option(
        "--ngram-ranking",
        metavar="NAME",
        help="Which earlier occurrence n-gram lookup continues: oldest, leftmost, recent or frequent.",
        rich_help_panel=SPECULATION,
        show_default="oldest",
    ),
]
MinMatchingNgramSize = Annotated[
    int | None,
    typer.Option(min=1, help="Shortest tail n-gram lookup looks up.", rich_help_panel=SPECULATION, show_default="1"),
]
NgramPoolOption = Annotated[
    NgramPoolKind | None,
    typer.Option(
        "--ngram-pool",
        metavar="NAME",
        help="`public` looks in the outputs of the run's finished requests too, `private` does not; for suffix "
        "matching too.",
        rich_help_panel=SPECULATION,
        show_default="private",
    ),
]
NgramCorpus = Annotated[
    Path | None,
    typer.Option(
        help="Corpus, made by `specdec corpus create`, in which n-gram lookup looks up what it finds nowhere else.",
        rich_help_panel=SPECULATION,
        show_default=False,
    ),
]
SuffixConfig = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Draft by suffix matching, what most often followed the longest match of any length: [max_draft_len, "
        "device_list], such as [10,[0]].",
        rich_help_panel=SPECULATION,
        show_default="no drafter",
    ),
]
DraftLenOption = Annotated[
    DraftLen | None,
    typer.Option(
        "--draft-len",
        metavar="[fixed|auto]",
        help="`auto` sends of each draft what pays: by what steps cost, measured by `build`, and by how often drafts "
        "were right so far; nothing, where nothing pays.",
        rich_help_panel=SPECULATION,
        show_default="fixed",
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="Draft as `specdec tune` recommends for this engine, or not at all; in place of all flags that choose a "
        "drafter.",
        rich_help_panel=SPECULATION,
        show_default=False,
    ),
]
Drafters = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME",
        help="Ask several drafters, each where those before it have nothing: ngram, suffix, draft-target, custom. Each "
        "needs its own flag.",
        rich_help_panel=SPECULATION,
        show_default=False,
    ),
]
OutputTraces = Annotated[
    Path | None,
    typer.Option(
        help="Write prompt and output ids as JSON lines, which `corpus create` reads.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
DraftTargetModelConfig = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Draft by a draft model: [draft_len, draft_device_list, target_device_list, use_logits], such as "
        "[4,[0],[0],False]. use_logits chooses rejection sampling over comparing tokens.",
        rich_help_panel=SPECULATION,
        show_default="no drafter",
    ),
]
DraftEngineDir = Annotated[
    Path | None,
    typer.Option(help="Engine directory of the draft model.", rich_help_panel=SPECULATION, show_default=False),
]
CustomDrafter = Annotated[
    str | None,
    typer.Option(
        metavar="NAME:NAME",
        help="Draft by what a function of your own returns: module:factory; the current directory is searched too.",
        rich_help_panel=SPECULATION,
        show_default="no drafter",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(help="Divides the logits; 0 is greedy.", rich_help_panel=SAMPLING, show_default="1.0"),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Sample among this many best tokens; 1 is greedy, 0 leaves all.",
        rich_help_panel=SAMPLING,
        show_default="1; 0 with --temperature, --top-p or --min-p",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample among the best tokens of this total probability; 0.0 is off.",
        rich_help_panel=SAMPLING,
        show_default="0.0",
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Leave out tokens below this share of the best one's probability; 0.0 is off.",
        rich_help_panel=SAMPLING,
        show_default="0.0",
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        help="Divides positive scores of tokens that occurred, and multiplies negative ones; 1.0 is off.",
        rich_help_panel=SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float, typer.Option(help="Taken off the score of tokens that occurred.", rich_help_panel=SAMPLING)
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Taken off the score of a token for each time it occurred.", rich_help_panel=SAMPLING)
]
NoRepeatNgramSize = Annotated[
    int | None,
    typer.Option(
        help="No n-gram of this size comes twice, the prompt included.",
        rich_help_panel=SAMPLING,
        show_default="off",
    ),
]
BadWords = Annotated[
    list[str] | None,
    typer.Option(
        help="Text whose tokens are banned, with or without a space before it; repeatable.",
        rich_help_panel=SAMPLING,
        show_default="none",
    ),
]
CheckLossless = Annotated[
    bool,
    typer.Option(
        "--check-lossless",
        help="Compare with the same engine without a drafter; exit 1 if speculation changed the output.",
        rich_help_panel=OUTPUT,
    ),
]
BlockReuse = Annotated[
    bool,
    typer.Option(
        "--kv-cache-enable-block-reuse",
        help="Find K/V computed before. Orchestrator mode needs it.",
        rich_help_panel=KV_CACHE,
        show_default="on",
    ),
]
NoBlockReuse = Annotated[bool, typer.Option("--no-kv-cache-enable-block-reuse", hidden=True)]
FreeGpuMemoryFraction = Annotated[
    float,
    typer.Option(help="Share of free GPU memory for the K/V cache.", min=0.0, max=1.0, rich_help_panel=KV_CACHE),
]
MaxTokensInCache = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Size of the K/V cache in tokens.",
        rich_help_panel=KV_CACHE,
        show_default="CPU: max_batch_size x max_seq_len",
    ),
]
EndId = Annotated[
    int | None,
    typer.Option(min=0, help="Token id that ends an output.", rich_help_panel=RUNTIME, show_default="the model's own"),
]
StopWords = Annotated[
    list[str] | None,
    typer.Option(help="Text that ends an output; repeatable.", rich_help_panel=RUNTIME, show_default="none"),
]
MaxNumTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens of prompts computed at a time, so that a long one does not stall the others.",
        rich_help_panel=RUNTIME,
        show_default="512",
    ),
]
ModelDir = Annotated[
    str | None,
    typer.Option(
        help="Model directory, hub id, or shipped name (`demo`); its engine is built once and kept in the cache.",
        rich_help_panel=LEADER,
        show_default=False,
    ),
]
SpecDecodeAlgo = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How to draft: NGRAM, SUFFIX or DRAFT_TARGET.",
        rich_help_panel=LEADER,
        show_default="no drafter",
    ),
]
SpecDecodeMaxDraftLen = Annotated[
    int | None, typer.Option(min=1, help="Tokens in a draft.", rich_help_panel=LEADER, show_default="4")
]
MaxMatchingNgramSize = Annotated[
    int | None, typer.Option(min=1, help="Longest tail looked up.", rich_help_panel=LEADER, show_default="2")
]
DraftModelDir = Annotated[
    str | None,
    typer.Option(help="The draft model, as for `--model-dir`.", rich_help_panel=LEADER, show_default=False),
]
DisableKvCacheReuse = Annotated[
    bool,
    typer.Option("--disable-kv-cache-reuse", help="Do not find K/V computed before.", rich_help_panel=LEADER),
]
DisableOverlapScheduler = Annotated[
    bool,
    typer.Option(
        "--disable-overlap-scheduler", help="Accepted: nothing overlaps (docs/leader-mode.md).", rich_help_panel=LEADER
    ),
]
ModelDtype = Annotated[
    Literal["auto", "float32", "float16", "bfloat16"] | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="Dtype of `--model-dir`'s engine: auto, float32, float16 or bfloat16.",
        rich_help_panel=LEADER,
        show_default="auto",
    ),
]
MaxBatchSize = Annotated[
    int | None,
    typer.Option(min=1, help="Sequences per step of `--model-dir`'s engine.", rich_help_panel=LEADER, show_default="4"),
]
MaxSeqLen = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens in prompt and output together of `--model-dir`'s engine.",
        rich_help_panel=LEADER,
        show_default="the model's positions, at most 4,096",
    ),
]
NoCache = Annotated[
    bool,
    typer.Option("--no-cache", help="Build `--model-dir`'s engine anew and keep nothing.", rich_help_panel=LEADER),
]
NumBeams = Annotated[int, typer.Option(hidden=True)]
UsePySession = Annotated[bool, typer.Option("--use-py-session", hidden=True)]
Stats = Annotated[
    Literal["summary", "detailed", "none"],
    typer.Option(
        "--stats",
        metavar="NAME",
        help="`summary` is the tables; `detailed` adds acceptance by draft length and position and tokens per step "
        "over time, and to `--json` the counts of each step; `none` leaves outputs and checks only.",
        rich_help_panel=OUTPUT,
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE.html",
        help="Write a page with charts, tables, settings and marked outputs; it needs no other file.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print the result only.", rich_help_panel=OUTPUT)]
Force = Annotated[
    bool, typer.Option("--force", help="Replace the output directory if specdec wrote it.", rich_help_panel=OUTPUT)
]


def sort_by_panel(params: list[Any]) -> list[Any]:
    """A command's parameters in the order of their panels; arguments and what has no panel first."""
    places = {panel: i for i, panel in enumerate(PANELS)}
    return sorted(params, key=lambda param: places.get(getattr(param, "rich_help_panel", None) or "", -1))


def check_orchestrator_flags(*, block_reuse: bool, num_beams: int, py_session: bool) -> None:
    """UsageError for what orchestrator mode cannot do, whatever the files hold."""
    if not block_reuse:
        raise UsageError(
            "orchestrator mode needs block reuse: `--no-kv-cache-enable-block-reuse`", hint="leave the flag out"
        )
    if num_beams != 1:
        raise UsageError(f"beam search is not supported: `--num-beams {num_beams}`", hint="leave the flag out")
    if py_session:
        raise UsageError("there is no Python session to choose: `--use-py-session`", hint="leave the flag out")


def check_profile_flags(profile: Path | None, model_dir: str | None, drafter_flags: Mapping[str, object]) -> None:
    """UsageError for a profile beside flags that choose a drafter, or for an engine yet to be made of a model."""
    if profile is None:
        return
    given = [flag for flag, value in drafter_flags.items() if value is not None]
    if given:
        raise UsageError(
            f"`{given[0]}` and `--profile` both say how to draft: {profile}", hint="leave one of the two out"
        )
    if model_dir is not None:
        raise UsageError(
            f"a profile needs `--engine-dir`, and cannot be given with `--model-dir`: {profile}",
            hint="name the engine that was tuned, or give the drafter by its flags",
        )


def check_drafter_flags(*, check_lossless: bool, draft_len: DraftLen | None, has_drafter: bool) -> None:
    """UsageError for what needs a drafter where there is none."""
    if draft_len == "auto" and not has_drafter:
        raise UsageError("`--draft-len auto` needs a drafter: there is none", hint="`--suffix-config [10,[0]]` is one")
    if check_lossless and not has_drafter:
        raise UsageError(
            "`--check-lossless` compares a drafter with none, and there is no drafter",
            hint="`--ngram-config [10,2,[0]]` is one",
        )


def sampling_params(
    *,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    no_repeat_ngram_size: int | None,
    **others: Any,
) -> "SamplingParams":
    """The parameters as given; `others` are `SamplingParams`' own. UsageError for one that is out of range.

    Without `--top-k` TensorRT-LLM is greedy, whatever temperature it is given. Here, to give one is to ask for samples.
    """
    from commands.output import warn
    from runtime.sampling import SamplingParams

    asks_to_sample = temperature is not None or bool(top_p) or bool(min_p)
    if top_k is None:
        top_k = 0 if asks_to_sample else 1
    elif top_k == 1 and asks_to_sample:
        warn("`--top-k 1` is greedy: `--temperature`, `--top-p` and `--min-p` have no effect")
    if temperature == 0 and (top_k > 1 or top_p or min_p):
        warn("`--temperature 0` is greedy: `--top-k`, `--top-p` and `--min-p` have no effect")
    return SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_k=top_k,
        top_p=top_p or 0.0,
        min_p=min_p or 0.0,
        no_repeat_ngram_size=no_repeat_ngram_size or 0,
        **others,
    )
