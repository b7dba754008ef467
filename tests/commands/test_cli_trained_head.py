"""The shipped head, which was trained: every command drafts with it, and its drafts are accepted."""

import io
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Specdec, assert_valid, ids_of
from safetensors.torch import load_file
from sentences import Said
from test_cli_errors import assert_one_clear_error

from runtime.builder.engine_cache import EngineSettings, engine_of_model
from runtime.checkpoint.bundle import read_bundle
from runtime.checkpoint.config import DraftOutput
from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.adaptive import AdaptiveDrafter
from runtime.drafters.confidence_stop import ConfidenceStop
from runtime.drafters.head_draft import HeadDraft, open_head
from runtime.drafters.heads.head_config import is_head, read_head
from runtime.drafters.protocol import Drafter
from runtime.drafters.under_grammar import NothingDrafted
from runtime.engine.engine import Engine
from runtime.llm import LLM
from runtime.loop import scheduler
from runtime.text.text import open_tokenizer
from runtime.util.cache import cache_dir
from runtime.util.errors import UsageError

ARTICLES = Path(__file__).parents[2] / "runtime/demo/articles.jsonl"
NUM_TOKENS = 24
DEMO = ["--model-dir", "demo", "--compiler", "none"]
SIZES = ["--max-input-len", 64, "--max-seq-len", 128]
HEAD = ["--draft-model-dir", "demo-head", "--draft-len-mode", "fixed"]


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine that `DEMO` and `HEAD` have made."""
    states = read_head("demo-head").hidden_states_of(6)
    with engine_of_model("demo", EngineSettings(hidden_states=states, compiler="none")) as directory:
        return directory


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four held-out articles to describe."""
    articles = [json.loads(line) for line in ARTICLES.read_text(encoding="utf-8").splitlines()]
    chosen = [one for one in articles if one["category"] == "describe"][:4]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{one['article']} TL;DR:"}) + "\n" for one in chosen))
    return path


def test_run(specdec: Specdec, engine_dir: Path, prompts: Path) -> None:
    asked = ["--input-file", prompts, "--max-output-len", NUM_TOKENS, "--json"]
    plain = specdec("run", *DEMO, *asked).document
    for flags in ([*DEMO, *HEAD], ["--engine-dir", engine_dir, "--draft-engine-dir", "demo-head", "--eagle-config", 4]):
        drafted = specdec("run", *flags, *asked).document
        assert ids_of(drafted) == ids_of(plain)
        assert drafted["total"]["tokens_per_step"] > 1.3, drafted["total"]


@pytest.mark.slow
def test_chain_of_lookup_and_head(specdec: Specdec, engine_dir: Path, prompts: Path) -> None:
    asked = ["--input-file", prompts, "--max-output-len", NUM_TOKENS, "--json"]
    engine = ["--engine-dir", engine_dir, "--ngram-config", "10,2"]
    lookup = specdec("run", *engine, *asked).document["total"]
    head = ["--draft-engine-dir", "demo-head", "--eagle-config", 4, "--drafters", "ngram,eagle"]
    chain = specdec("run", *engine, *head, *asked).document["total"]
    assert chain["tokens_per_step"] > lookup["tokens_per_step"]


@pytest.mark.slow
def test_batch(specdec: Specdec, prompts: Path, tmp_path: Path) -> None:
    files = ["-i", prompts, "-o", tmp_path / "results.jsonl"]
    document = specdec(
        "batch", *DEMO, *HEAD, *files, "--max-output-len", NUM_TOKENS, "--temperature", 0, "--json"
    ).document
    assert document["num_accepted_tokens"] > 10


def test_chat(specdec: Specdec, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.loads(prompts.read_text().splitlines()[0])["prompt"].replace("\n", " ")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{said}\n/stats\n"))
    result = specdec("chat", *DEMO, *HEAD, "--max-output-len", NUM_TOKENS)
    assert result.exit_code == 0, result.stderr
    assert "accepted" in result.stdout


@pytest.mark.slow
def test_summarize(specdec: Specdec, engine_dir: Path) -> None:
    flags = ["--engine-dir", engine_dir, "--test-engine", "--max-ite", 2, "--output-len", NUM_TOKENS]
    head = ["--draft-engine-dir", "demo-head", "--eagle-config", 4]
    document = specdec("summarize", *flags, *head, "--json").document
    assert_valid("summarize", document)
    assert document["total"]["num_accepted_draft_tokens"] > 0


class Priced:
    """A drafter, and the seconds that steps of target and head would have taken, at 10 ms and `head_s` for one."""

    def __init__(self, drafter: Drafter, head: HeadDraft, head_s: float) -> None:
        self.drafter, self.seconds, compute = drafter, 0.0, head._logits

        def counted(*given: Any) -> Any:
            self.seconds += head_s
            return compute(*given)

        head._logits = counted  # type: ignore[method-assign]

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        drafts = self.drafter.propose(sequences, max_draft_len)
        mean_len = sum(len(draft.tokens) for draft in drafts) / len(drafts)
        self.seconds += target_s(len(drafts), 0, mean_len)
        return drafts

    def forget(self, request_id: int) -> None:
        self.drafter.forget(request_id)


def target_s(batch_size: int, context_len: int, draft_len: float) -> float:
    """Prices of a large model: a draft token adds a twentieth."""
    return 0.01 * (1 + 0.05 * batch_size * draft_len)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("batch_size", "head_s", "most"), [(1, 0.001, 0.9), (4, 0.001, 1.05), (1, 0.02, 1.05), (4, 0.02, 1.05)]
)
def test_automatic_lengths(batch_size: int, head_s: float, most: float, engine_dir: Path, prompts: Path) -> None:
    """Drafts of a cheap head pay, and what does not pay takes no more than a twentieth of the time."""
    tokenizer = open_tokenizer(engine_dir)
    tokens = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in prompts.read_text().splitlines()]
    requests = [Request(i, tuple(one[-80:]), 24) for i, one in enumerate(tokens)]
    taken: dict[str, float] = {}
    with Engine.open(engine_dir) as engine:
        head, cache = open_head(engine, read_head("demo-head"))
        for mode in ("none", "auto"):
            drafter = HeadDraft(engine, head, cache, use_logits=False)
            drafter.confidence_stop = ConfidenceStop(target_s, lambda batch_size, context_len: head_s)
            automatic = AdaptiveDrafter(drafter, target_s, lambda batch_size, context_len: head_s)
            priced = Priced(NothingDrafted() if mode == "none" else automatic, drafter, head_s)
            for start in range(0, len(requests), batch_size):
                for _ in scheduler.generate(engine, requests[start : start + batch_size], priced, 4):
                    pass
            taken[mode] = priced.seconds
    assert taken["auto"] <= most * taken["none"], taken


BUILD = ["--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 4, "--compiler", "none"]


def test_an_engine_with_an_output_layer_for_drafts(
    specdec: Specdec, llama_checkpoint_dir: Path, mtp_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Both the head and the copy draft the ids that were chosen, and no others."""
    engine, _, traces = tmp_path / "engine", tmp_path, tmp_path / "traces.jsonl"
    traces.write_text(json.dumps({"prompt_ids": [5], "output_ids": [*range(100, 260), 7, 7]}) + "\n")
    build = ["build", "--checkpoint-dir", llama_checkpoint_dir, "--output-dir", engine, "--force", *BUILD, *SIZES]
    build += ["--draft-model-dir", mtp_dirs[1], "--self-draft", "int8", "--draft-output-layer", "int8"]
    build += ["--draft-layers", "int4"]
    result = specdec(*build, "--draft-vocab", traces, "--draft-vocab-size", 150)
    assert "150 of 300 ids in int8, 0.0 MB" in result.stdout and "in int4, but the output layer" in result.stdout
    assert "drafts never" not in result.stderr
    ids = [int(one) for one in (engine / "draft_vocab.txt").read_text().split()]
    assert len(ids) == 150 and {2, 7} <= set(ids) <= {2, 7, *range(100, 260)}  # 2 ends outputs
    run = ["run", "--engine-dir", engine, "--input-text", "the little dog", "--max-output-len", 12, "--json"]
    plain = specdec(*run).document
    for flags in (["--draft-engine-dir", mtp_dirs[1], "--mtp-config", "3"], ["--self-draft-config", "3"]):
        drafted = specdec(*run, *flags, "--draft-len-mode", "fixed").document
        assert ids_of(drafted) == ids_of(plain) and drafted["total"]["num_draft_tokens"] > 0
    assert specdec("verify", engine).exit_code == 0


def test_ids_that_cannot_be_drafted(
    specdec: Specdec, llama_checkpoint_dir: Path, head_dirs: tuple[Path, Path], tmp_path: Path, said: Said
) -> None:
    build = ["build", "--checkpoint-dir", llama_checkpoint_dir, "--output-dir", tmp_path / "engine", *BUILD, *SIZES]
    copy, file = [*build, "--self-draft", "int8"], tmp_path / "ids.json"
    for ids, value in (("[1, 300]", 300), ("[4, 4]", 4), ("[]", file), ("[1.5]", 1.5)):
        file.write_text(ids)
        result = specdec(*copy, "--draft-vocab", file)
        assert result.exit_code == 1
        said(result, value)
    for flags, value in (
        ([*build, "--draft-vocab", "auto"], "auto"),
        ([*build, "--draft-output-layer", "int4"], "int4"),
        ([*copy, "--draft-layers", "int4"], "int4"),
        ([*copy, "--draft-vocab-size", 3], 3),
        ([*copy, "--draft-vocab", "auto", "--draft-vocab-size", 300], 300),
        ([*build, "--draft-model-dir", head_dirs[1], "--draft-vocab", "auto"], 200),
    ):
        result = specdec(*flags)
        assert result.exit_code == 2
        said(result, value)
    assert not (tmp_path / "engine").exists()


@pytest.mark.slow
def test_a_models_engine_has_the_output_layer_that_is_asked_for(
    specdec: Specdec, mtp_dirs: tuple[Path, Path], tmp_path: Path, said: Said
) -> None:
    """Flags and `LLM` make one engine of it, by what the file of ids says and not by where it lies."""
    model, files = mtp_dirs[1], [tmp_path / "ids.txt", tmp_path / "copy.txt"]
    for file in files:
        file.write_text(" ".join(str(i) for i in range(0, 300, 2)))
    flags = ["run", "--model-dir", model, "--compiler", "none", "--input-text", "the little dog", "--json"]
    flags += ["--max-output-len", 12, "--draft-len-mode", "fixed"]
    head = ["--spec-decode-algo", "MTP", "--draft-output-layer", "int8", "--draft-vocab", files[0]]
    head += ["--draft-layers", "int4"]
    plain, drafted = specdec(*flags).document, specdec(*flags, *head).document
    assert ids_of(drafted) == ids_of(plain) and drafted["total"]["num_draft_tokens"] > 0
    wanted: Any = {"head": model, "compiler": "none", "draft_output_layer": "int8", "draft_vocab": files[1]}
    wanted["draft_layers"] = "int4"
    made = {path.name for path in (cache_dir() / "engines").iterdir()}
    with LLM(str(model), **wanted) as llm:
        directory, output = llm.bundle.directory, llm.bundle.config.build_config.draft_output
    assert directory.name in made
    assert output == DraftOutput("int8", 150, "int4")
    assert (directory / "draft_vocab.txt").read_text().split() == files[0].read_text().split()
    files[1].write_text("5 2 7")
    for settings in (wanted, wanted | {"draft_vocab": None}):
        with LLM(str(model), **settings) as llm:
            assert llm.bundle.directory != directory
    for extra, value in (
        (["--draft-vocab", "auto"], "auto"),
        ([*head[:2], "--draft-vocab-size", 9], 9),
        (["--model-dir", "demo", "--draft-model-dir", "demo-head", "--draft-vocab", "auto"], "auto"),
        (["--self-draft", "int8", "--draft-vocab", tmp_path / "none"], tmp_path / "none"),
    ):
        result = specdec(*flags, *extra)
        assert result.exit_code == (1 if "none" in str(value) else 2)
        said(result, value)
    with pytest.raises(UsageError, match="draft_vocab needs a trained head or a self-draft copy: auto"):
        LLM("demo", draft_vocab="auto")
    result = specdec("run", "--engine-dir", mtp_dirs[0], "--draft-vocab", "auto", "--input-text", "x")
    assert result.exit_code == 2
    said(result, "--model-dir", "auto")


def test_drafts_that_never_end(
    specdec: Specdec, llama_checkpoint_dir: Path, head_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Said when ids are listed, and of a head's own when it is opened; an end id among them is nothing to say."""
    (tmp_path / "ids.txt").write_text("5 6 7")
    build = ["build", "--checkpoint-dir", llama_checkpoint_dir, *BUILD, *SIZES, "--self-draft", "int8"]
    result = specdec(*build, "--output-dir", tmp_path / "engine", "--draft-vocab", tmp_path / "ids.txt")
    assert "none of the model's end ids is among the 3 that are drafted: 2" in result.stderr
    own = read_head(head_dirs[1])
    drafted = (torch.arange(200) + load_file(own.directory / "model.safetensors")["d2t"]).tolist()
    missing = next(i for i in range(300) if i not in drafted)
    run = ["run", "--engine-dir", head_dirs[0], "--input-text", "dog", "--max-output-len", 4]
    for end_id, is_said in ((missing, True), (drafted[0], False)):
        engine = tmp_path / str(end_id)
        shutil.copytree(head_dirs[0], engine)
        (engine / "generation_config.json").write_text(json.dumps({"eos_token_id": end_id}))
        run[2] = engine
        result = specdec(*run, "--draft-engine-dir", head_dirs[1], "--eagle-config", "3")
        assert ("drafts never end" in result.stderr) is is_said, result.stderr


def test_the_way_to_longer_drafts_names_the_head(specdec: Specdec, head_dirs: tuple[Path, Path]) -> None:
    engine, head = head_dirs
    flags = ["--engine-dir", engine, "--draft-engine-dir", head, "--eagle-config", 60]
    result = specdec("run", *flags, "--input-text", "dog")
    assert result.exit_code == 1
    assert f"--max-draft-len 60 --draft-model-dir {head}`" in " ".join(result.stderr.split())


def test_an_engine_that_is_found_says_too_that_drafts_never_end(
    specdec: Specdec, mtp_dirs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "ids.txt").write_text("5 6 7")
    run = ["run", "--model-dir", mtp_dirs[1], "--compiler", "none", "--input-text", "dog", "--max-output-len", 4]
    for _ in ("built", "found"):
        result = specdec(*run, "--drafters", "mtp", "--draft-vocab", tmp_path / "ids.txt")
        assert result.exit_code == 0
        assert result.stderr.count("none of the model's end ids is among the 3 that are drafted: 2") == 1


@pytest.mark.slow
def test_tune_has_it_among_its_candidates(specdec: Specdec, engine_dir: Path, prompts: Path, tmp_path: Path) -> None:
    flags = ["--engine-dir", engine_dir, "--max-output-len", 8, "--num-live-prompts", 1, "--max-draft-len", 2]
    for flag in ("--draft-model-dir", "--draft-engine-dir"):
        asked = ["--input-file", prompts, *flags, flag, "demo-head"]
        document = specdec("tune", *asked, "--json").document
        assert_valid("tune", document)
        tried = [record["drafter"] for record in document["tried"]]
        assert {one["name"] for one in tried} == {"eagle", "chain"}, tried
    named = specdec("tune", *asked, "--eagle-config", 2, "--output", tmp_path / "profile.json", "--json")
    assert named.exit_code == 0, named.stderr


def test_a_head_that_is_named_is_not_passed_over(
    specdec: Specdec, llama_dir: Path, mtp_dirs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has one of its own, which drafted in the place of what is not there. Beside a draft model it drafts."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    run = [
        "run",
        "--model-dir",
        mtp_dirs[1],
        "--compiler",
        "none",
        "--input-text",
        "dog",
        "--max-output-len",
        6,
        "--json",
    ]
    for flags in (["--drafters", "mtp"], ["--spec-decode-algo", "MTP"], ["--drafters", "ngram,mtp"]):
        result = specdec(*run, *flags, "--draft-model-dir", tmp_path / "none")
        assert_one_clear_error(result, 1, (str(tmp_path / "none"),))
    document = specdec(*run, "--drafters", "draft-target,mtp", "--draft-model-dir", llama_dir).document
    assert document["settings"]["mtp_config"]["head_dir"] == str(mtp_dirs[1])


TUNED = ["--input-text", "dog", "--max-output-len", 6, "--num-live-prompts", 1, "--max-draft-len", 2, "--json"]


def test_tune_has_the_models_own_head_and_another_model_among_its_candidates(
    specdec: Specdec, llama_dir: Path, mtp_dirs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is said of the head; a model that is named takes its place. The flags that are told are `run`'s."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    model = ["--model-dir", mtp_dirs[1], "--compiler", "none"]
    for flags, name in (([], "mtp"), (["--draft-model-dir", llama_dir], "draft-target")):
        document = specdec("tune", *model, *flags, *TUNED).document
        assert_valid("tune", document)
        assert {one["drafter"]["name"] for one in document["tried"]} == {name, "chain"}
        own = next(one for one in document["tried"] if one["drafter"]["name"] == name)
        engine = document["settings"]["engine_dir"]
        run = specdec(
            "run", "--engine-dir", engine, *shlex.split(own["flags"]), "--input-text", "dog", "--max-output-len", 6
        )
        assert run.exit_code == 0, run.stderr
    document = specdec("tune", *model, "--drafters", "suffix,mtp", *TUNED).document
    chains = [[one["name"] for one in record["drafter"]["drafters"]] for record in document["tried"]]
    assert chains and all(chain == ["suffix", "mtp"] for chain in chains)


def test_it_is_small_and_its_memory_is_its_weights(engine_dir: Path) -> None:
    assert is_head("demo-head") and not is_head("demo")
    directory = read_head("demo-head").directory
    assert sum(path.stat().st_size for path in directory.iterdir()) <= 3_000_000
    assert read_bundle(engine_dir).config.build_config.hidden_states == (1, 3, 5)
