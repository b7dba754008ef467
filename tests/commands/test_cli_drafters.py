"""Every drafter flag leaves greedy output what it is, in both modes, and drafts something."""

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import PROMPTS, Result, Specdec, assert_valid, each, ids_of
from tiny import hf_greedy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from commands.options.drafter_flags import algorithm_flag, example_of
from commands.options.leader_flags import LeaderOptions
from commands.options.speculation_flags import LeaderFlags, SpeculationOptions, speculation_from_flags
from runtime.drafters.specs import DRAFTERS

NUM_TOKENS = 16
NGRAM = ["--ngram-config", "[4,3,[0]]"]
V2_NGRAM = ["--spec-decode-algo", "NGRAM", "--max-matching-ngram-size", "3"]
DRAFT = ["--draft-engine-dir", "DRAFT"]
SELF = ["--engine-dir", "WITH_COPY"]
WITH_HEAD = ["--engine-dir", "WITH_HEAD"]
WITH_MTP = ["--engine-dir", "WITH_MTP"]
WITH_ASSISTANT = ["--engine-dir", "WITH_ASSISTANT"]
V1_DRAFT = [*DRAFT, "--draft-target-model-config", "[2,[0],[0],False]"]

# Name -> (flags of orchestrator mode, those of leader mode, drafters).
FLAGS: dict[str, tuple[list[str], list[str], list[str]]] = {
    **{
        f"ranking {ranking}": (
            [*NGRAM, "--ngram-ranking", ranking],
            [*V2_NGRAM, "--ngram-ranking", ranking],
            ["ngram"],
        )
        for ranking in ("oldest", "frequent")
    },
    "pool": ([*NGRAM, "--ngram-pool", "public"], [*V2_NGRAM, "--ngram-pool", "public"], ["ngram"]),
    "corpus": ([*NGRAM, "--ngram-corpus", "CORPUS"], [*V2_NGRAM, "--ngram-corpus", "CORPUS"], ["ngram"]),
    "suffix, pool": (
        ["--suffix-config", "[6,[0]]", "--ngram-pool", "public"],
        ["--spec-decode-algo", "SUFFIX", "--ngram-pool", "public"],
        ["suffix"],
    ),
    "grammar": (
        [*NGRAM, "--grammar-config", "[6,[0]]", "--drafters", "auto"],
        ["--max-matching-ngram-size", "3", "--drafters", "ngram,grammar"],
        ["ngram", "grammar"],
    ),
    "answers": (
        [*NGRAM, "--answers-config", "[6,[0]]", "--drafters", "auto"],
        ["--max-matching-ngram-size", "3", "--drafters", "ngram,answers"],
        ["ngram", "answers"],
    ),
    "self": (
        [*SELF, "--self-draft-config", "[6,[0]]"],
        [*SELF, "--spec-decode-algo", "SELF", "--spec-decode-max-draft-len", "3"],
        ["self"],
    ),
    "head": (
        [*WITH_HEAD, "--eagle-config", "[3,[0]]", "--draft-engine-dir", "HEAD"],
        [*WITH_HEAD, "--draft-model-dir", "HEAD"],
        ["eagle"],
    ),
    "DSpark": (
        [*WITH_HEAD, "--dflash-config", "[3,[0]]", "--draft-engine-dir", "BLOCK"],
        [*WITH_HEAD, "--draft-model-dir", "BLOCK"],
        ["dflash"],
    ),
    "MTP": (
        [*WITH_MTP, "--mtp-config", "[3,[0]]", "--draft-engine-dir", "MTP_DIR"],
        [*WITH_MTP, "--spec-decode-algo", "MTP", "--draft-model-dir", "MTP_DIR"],
        ["mtp"],
    ),
    "assistant": (
        [*WITH_ASSISTANT, "--assistant-config", "[3,[0]]", "--draft-engine-dir", "ASSISTANT"],
        [*WITH_ASSISTANT, "--draft-model-dir", "ASSISTANT"],
        ["assistant"],
    ),
    "chain with head": (
        [*WITH_HEAD, *NGRAM, "--eagle-config", "3", "--draft-engine-dir", "HEAD", "--drafters", "auto"],
        [*WITH_HEAD, "--draft-model-dir", "HEAD", "--spec-decode-max-draft-len", "4", "--drafters", "ngram,eagle"],
        ["ngram", "eagle"],
    ),
    "chain with self": (
        [*SELF, *NGRAM, "--self-draft-config", "6", "--drafters", "auto"],
        [*SELF, "--spec-decode-max-draft-len", "4", "--drafters", "ngram,self"],
        ["ngram", "self"],
    ),
    "parallel": (
        ["--pard-config", "[3,[0],[0],False]", "--draft-engine-dir", "PARD"],
        ["--draft-engine-dir", "PARD", "--spec-decode-max-draft-len", "3"],
        ["pard"],
    ),
    "chain": (
        [*NGRAM, *V1_DRAFT, "--drafters", "ngram,draft-target"],
        [*DRAFT, "--spec-decode-max-draft-len", "4", "--drafters", "ngram,draft-target"],
        ["ngram", "draft-target"],
    ),
    "chain of all": (
        [
            *NGRAM, "--suffix-config", "[6,[0]]", *V1_DRAFT, "--drafter", "custom_drafters:LastOccurrence",
            "--ngram-corpus", "CORPUS", "--drafters", "suffix,custom,ngram,draft-target",
        ],
        [
            *DRAFT, "--drafter", "custom_drafters:LastOccurrence", "--max-matching-ngram-size", "3",
            "--ngram-corpus", "CORPUS", "--drafters", "suffix,custom,ngram,draft-target",
        ],
        ["suffix", "custom", "ngram", "draft-target"],
    ),
}  # fmt: skip
_NAMED = {name for *_, drafters in FLAGS.values() for name in drafters}
BY_SPEC = {
    name: (example_of(spec).split(), algorithm_flag(spec).split(), [name])
    for name, spec in DRAFTERS.items()
    if name not in _NAMED and not spec.models()
}
"""Drafters of which nothing is said here, by the example and the algorithm that they describe themselves with."""
FLAGS |= BY_SPEC


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A few sentences and many ids, some of which the model is going to say."""
    from runtime.text.corpus import write_corpus
    from runtime.text.text import tokenizer_digest

    path = tmp_path_factory.mktemp("corpus") / "c"
    documents = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS] + [[i, i % 7 + 3, i] for i in range(3, 300)]
    write_corpus(path, documents, vocab_size=300, tokenizer_digest=tokenizer_digest(tokenizer), replace=False)
    return path


# Word among the flags -> the fixture that makes it, and which of its parts it is.
PATHS = {
    "CORPUS": ("corpus", None),
    "DRAFT": ("draft_engine_dir", None),
    "PARD": ("pard_engine_dir", None),
    "WITH_COPY": ("self_draft_engine_dir", None),
    "WITH_HEAD": ("head_dirs", 0),
    "HEAD": ("head_dirs", 1),
    "BLOCK": ("block_dir", None),
    "WITH_MTP": ("mtp_dirs", 0),
    "MTP_DIR": ("mtp_dirs", 1),
    "WITH_ASSISTANT": ("assistant_dirs", 0),
    "ASSISTANT": ("assistant_dirs", 1),
}


@pytest.fixture
def with_paths(request: pytest.FixtureRequest) -> Callable[[list[str]], list[str]]:
    """`with_paths(flags)`: with paths in the place of their names, of which only those are made."""

    def path(word: str) -> str:
        fixture, part = PATHS[word]
        made = request.getfixturevalue(fixture)
        return str(made if part is None else made[part])

    return lambda flags: [path(flag) if flag in PATHS else flag for flag in flags]


BY_DEFAULT = {
    "ranking frequent": "leader", "corpus": "orchestrator", "suffix, pool": "leader", "grammar": "leader",
    "answers": "leader",
    "self": "orchestrator", "head": "leader", "DSpark": "orchestrator", "MTP": "leader", "assistant": "orchestrator",
    "parallel": "leader", "chain with self": "leader", "chain of all": "orchestrator",
    **dict.fromkeys(BY_SPEC, "leader"),
}  # fmt: skip
"""Each drafter in one of the modes, with flags of either kind in both."""


def test_every_drafter_has_flags_here() -> None:
    assert {name for *_, drafters in FLAGS.values() for name in drafters} == {*DRAFTERS}
    assert {name for one in BY_DEFAULT for name in FLAGS[one][2]} == {*DRAFTERS}


@pytest.mark.one_in(3)  # `test_contract.py` has every drafter
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if BY_DEFAULT.get(name) == mode else pytest.mark.slow)
        for name in FLAGS
        for mode in ("orchestrator", "leader")
    ],
)
def test_greedy_output_is_hugging_faces(
    name: str, mode: str, run: Callable[..., Result], with_paths: Callable[[list[str]], list[str]],
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Flags of the mode, or for every other drafter those of the other mode and `--mode`."""
    orchestrator, leader, drafters = FLAGS[name]
    if list(FLAGS).index(name) % 2:
        flags = [*with_paths(leader if mode == "orchestrator" else orchestrator), "--mode", mode]
    else:
        flags = with_paths(orchestrator if mode == "orchestrator" else leader)
    more = ["--max-output-len", NUM_TOKENS, "--end-id", 299, "--draft-len-mode", "fixed", "--json"]
    document = run(*each("--input-text", PROMPTS[:3]), *flags, *more).document
    assert_valid("run", document)
    model = request.getfixturevalue("assistant_dirs")[2] if name == "assistant" else llama
    expected = [hf_greedy(model, tokenizer(prompt)["input_ids"], NUM_TOKENS, 299) for prompt in PROMPTS[:3]]
    assert ids_of(document) == expected
    assert document["settings"]["drafters"] == drafters
    assert document["settings"]["mode"] == mode
    assert document["total"]["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("flags", "drafters"),
    [
        (["--spec-decode-algo", "MTP"], ["mtp"]),
        (["--spec-decode-algo", "AUTO"], ["suffix", "mtp"]),
        (["--drafters", "ngram,mtp"], ["ngram", "mtp"]),
    ],
)
def test_a_models_own_head_needs_no_path(
    flags: list[str], drafters: list[str], mtp_dirs: tuple[Path, Path], draft_engine_dir: Path
) -> None:
    options = LeaderOptions(
        model_dir=str(mtp_dirs[1]), spec_decode_algo=flags[1] if flags[0] == "--spec-decode-algo" else None
    )
    named = flags[1] if flags[0] == "--drafters" else None
    speculation, _ = SpeculationOptions(drafters=named).resolve(options.flags(None, SpeculationOptions(drafters=named)))
    assert speculation.names == drafters
    assert speculation.read_heads()[0].directory == mtp_dirs[1]
    without = speculation_from_flags({}, "auto", None, LeaderFlags({}, model_dir=str(draft_engine_dir)))
    assert "mtp" not in without[0].names


def test_the_public_pool_has_the_answers_of_other_requests_and_none_of_the_warm_up(
    specdec: Specdec, llama_engine_dir: Path
) -> None:
    """One request finds nothing, though it was run before as a warm-up; of nine equal ones, four at a time, the later
    find the answer.
    """
    totals = {}
    for num in (1, 9):
        inputs = [*each("--input-text", ["The dog"] * num), "--max-output-len", 12, "--end-id", 299]
        for pool in ("private", "public"):
            flags = ["--ngram-config", "[4,3,[0]]", "--min-matching-ngram-size", 3, "--ngram-pool", pool]
            document = specdec("run", "--engine-dir", llama_engine_dir, *inputs, *flags, "--check-lossless", "--json")
            total = document.document["total"]
            totals[num, pool] = [total[key] for key in ("num_steps", "num_draft_tokens", "num_accepted_draft_tokens")]
    assert totals[1, "private"] == totals[1, "public"]
    assert totals[9, "public"][-1] > totals[9, "private"][-1] + 5 * 12 // 2
