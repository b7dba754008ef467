"""Settings in variables and files: which one holds, what each flag may be written as, and what is wrong with one."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
from command_line import PROMPT, Specdec, assert_valid, ids_of
from sentences import Said

from commands.options.parameters import NOT_IN_FILES, commands_of
from runtime.drafters.specs import DRAFTERS
from specdec_cli.app import app


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the test, with the user's configuration in `home`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "specdec").mkdir(parents=True)
    return tmp_path


def shown(specdec: Specdec, *arguments: object) -> dict[str, tuple[str, str]]:
    """(value, origin) of each setting, by `config show`."""
    document = specdec("config", "show", *arguments, "--json").document
    assert_valid("config_show", document)
    return {one["name"]: (one["value"], one["origin"]) for one in document["settings"]}


def test_flag_then_variable_then_named_file_then_home_file(
    place: Path, specdec: Specdec, llama_engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = place / "home" / "specdec" / "config.yaml"
    home.write_text("# mine\nruntime:\n  max_output_len: 3\nmax_seq_len: 64\nspec_decode_algo: SUFFIX\n")
    Path("prod.yaml").write_text("max-tokens: 5\nrun:\n  speculative_config: {method: ngram, max_draft_len: 4}\n")
    run = ["run", llama_engine_dir, PROMPT, "--end-id", 299, "--json"]
    lengths, drafters = [], []

    def take(*flags: object) -> None:
        document = specdec(*run, *flags).document
        lengths.append(len(ids_of(document)[0]))
        drafters.append(document["settings"]["drafters"])

    take()  # max_seq_len is for engines made of models, and waits for one
    take("--config", "prod.yaml")
    assert shown(specdec, "run", "--config", "prod.yaml")["--spec-decode-max-draft-len"] == ("4", "prod.yaml, line 3")
    monkeypatch.setenv("SPECDEC_MAX_OUTPUT_LEN", "6")
    take("--config", "prod.yaml")
    take("--config", "prod.yaml", "--max-output-len", 7, "--ngram-config", "[2,2]")
    monkeypatch.setenv("SPECDEC_CONFIG", "prod.yaml")
    monkeypatch.delenv("SPECDEC_MAX_OUTPUT_LEN")
    take("--profile", "off")
    take("--spec-decode-algo", "NONE")
    take("--drafters", "none")
    assert lengths == [3, 5, 6, 7, 5, 5, 5]
    assert drafters == [["suffix"], ["ngram"], ["ngram"], ["ngram"], [], [], []]
    settings = shown(specdec, "run")
    assert settings["--max-output-len"] == ("5", "prod.yaml, line 1") and settings["--stats"] == ("summary", "default")
    assert settings["--max-seq-len"] == ("64", f"{home}, line 4")
    assert settings["--kv-cache-enable-block-reuse"] == ("on", "default")
    Path("off.yaml").write_text("kv_cache_enable_block_reuse: false")
    off = shown(specdec, "run", "--config", "off.yaml")["--kv-cache-enable-block-reuse"]
    assert off == ("false", "off.yaml, line 1")


def test_a_word_names_the_model_before_a_file_does(place: Path, specdec: Specdec, llama_engine_dir: Path) -> None:
    Path("prod.yaml").write_text("model: ./gone\nmax_output_len: 4\n")
    by_word = specdec("run", llama_engine_dir, PROMPT, "--config", "prod.yaml", "--json").document
    by_flag = specdec("run", PROMPT, "--engine-dir", llama_engine_dir, "--config", "prod.yaml", "--json").document
    assert by_word["requests"][0]["prompt"] == by_flag["requests"][0]["prompt"] == PROMPT
    assert ids_of(by_word) == ids_of(by_flag)
    gone = specdec("run", "hello", "--config", "prod.yaml")
    assert "./gone (prod.yaml, line 1)" in gone.stderr


def test_every_flag_of_every_command_may_be_a_variable_or_a_key(
    place: Path, specdec: Specdec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with a value that its type takes."""
    for name, command in commands_of(_context()).items():
        flags = [one for one in command.params if one.param_type_name == "option" and one.name not in NOT_IN_FILES]
        samples = {flag.name: sample_of(flag) for flag in flags}
        lines = [f"  {key}: {json.dumps(value)}" for key, value in samples.items()]
        Path("all.yaml").write_text("\n".join([f"{name}:", *lines]))
        by_key = shown(specdec, name, "--config", "all.yaml")
        with monkeypatch.context() as patch:
            for key, value in samples.items():
                patch.setenv(f"SPECDEC_{key.upper()}", value)
            by_variable = shown(specdec, name)
        for line, flag in enumerate(flags, 2):
            assert by_key[flag.opts[0]][1] == f"all.yaml, line {line}", (name, flag)
            assert by_variable[flag.opts[0]][1] == f"the variable SPECDEC_{flag.name.upper()}", (name, flag)
            assert by_key[flag.opts[0]][0] == by_variable[flag.opts[0]][0], (name, flag)


def test_every_switch_can_be_put_off_on_the_command_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Put off what a file puts on, by a flag that `--help` does not list."""
    root = _context()
    for name, command in commands_of(root).items():
        kept = [one for one in command.params if one.param_type_name == "option" and one.name not in NOT_IN_FILES]
        switches = [one for one in kept if one.is_bool_flag]
        Path("on.yaml").write_text("\n".join([f"{name}:", *(f"  {one.name}: true" for one in switches)]))
        config = [] if not any(one.name == "config" for one in command.params) else ["--config", "on.yaml"]
        off = [_opposite(one.opts[0]) for one in switches]
        words = [one.name for one in command.params if one.param_type_name == "argument"]
        needed = [word for one in kept if one.required for word in (one.opts[0], sample_of(one))]
        context = command.make_context(name, [*config, *off, *needed, *words], parent=root)
        taken = {flag for one in kept for flag in one.opts}  # `--no-kv-cache-enable-block-reuse` is a flag itself
        assert not [one.name for one in switches if context.params[one.name] and _opposite(one.opts[0]) not in taken]
        listed = {*re.findall(r"--[\w-]+", command.get_help(context) + capsys.readouterr().out)}
        assert listed and not listed & (set(off) - taken)


def _context() -> typer.Context:
    """A context with the settings of the app: a command keeps the names of its help that it first sees."""
    group = typer.main.get_command(app)
    return typer.Context(group, **group.context_settings)


def _opposite(flag: str) -> str:
    return flag.replace("--no-", "--") if flag.startswith("--no-") else flag.replace("--", "--no-")


def test_a_file_merges_mappings_as_yaml_does(place: Path, specdec: Specdec) -> None:
    """A section's own key holds, then that of the first mapping that has it."""
    Path("prod.yaml").write_text(
        "base: &base\n  max_seq_len: 2048\n  temperature: 0.5\n  streaming: true\n"
        "run: &run\n  <<: *base\n  temperature: 0.7\n"
        "serve:\n  <<: [{port: 8001, max_seq_len: 4096}, *run]\n"
    )
    run, serve = (shown(specdec, name, "--config", "prod.yaml") for name in ("run", "serve"))
    assert run["--max-seq-len"] == ("2048", "prod.yaml, line 2") and run["--streaming"][0] == "true"
    assert run["--temperature"] == ("0.7", "prod.yaml, line 7")
    assert serve["--port"] == ("8001", "prod.yaml, line 9") and serve["--max-seq-len"][0] == "4096"
    assert run["--top-k"][1] == run["--quiet"][1] == "default" and run["--quiet"][0] == "false"


def test_a_flag_that_commands_call_differently_is_one_row(place: Path, specdec: Specdec) -> None:
    Path("prod.yaml").write_text("quantization: int4\noutput_len: 3")
    document = specdec("config", "show", "--config", "prod.yaml", "--json").document
    assert [(one["name"], one["value"]) for one in document["settings"] if one["name"].startswith("--")] == [
        ("--quantization", "int4"),
        ("--max-output-len", "3"),
    ]


SAMPLES = {spec.description.flag: spec.description.form.example for spec in DRAFTERS.values()} | {
    "spec_decode_algo": "NGRAM",
    "drafters": "ngram",
    "speculative_config": '{"method": "ngram"}',
    "kv_cache_disk_size": "20G",
    "tool_call_parser": "hermes",
    "reasoning_parser": "think",
    "max_diverged": "2%",
}
"""Values of flags that are texts of a form."""


def sample_of(flag: Any) -> str:
    described = flag.type_descriptor
    if described.choices:
        return str(described.choices[0])
    if flag.name in SAMPLES:
        return SAMPLES[flag.name]
    kinds = {described.annotation, *get_args(described.annotation)}
    least = described.parameter_info.min or 0
    samples = {int: f"{max(7, int(least))}", float: "0.5", bool: "true"}
    return next((text for kind, text in samples.items() if kind in kinds), "word")


@pytest.mark.parametrize(
    ("variable", "command", "flag"),
    [
        ("SPECDEC_MAX_MODEL_LEN", "run", "--max-seq-len"),
        ("SPECDEC_QFORMAT", "run", "--quantization"),
        ("SPECDEC_QFORMAT", "convert", "--quantization"),
        ("SPECDEC_SEED", "batch", "--random-seed"),
    ],
)
def test_a_variable_may_have_any_spelling_of_the_flag(
    variable: str, command: str, flag: str, place: Path, specdec: Specdec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value := "int4" if "QUANT" in variable or "QFORMAT" in variable else "64")
    assert shown(specdec, command)[flag] == (value, f"the variable {variable}")


@pytest.mark.parametrize(
    ("variables", "values"),
    [
        ({"SPECDEC_MAX_SEQ_LEM": "64"}, ("SPECDEC_MAX_SEQ_LEM", "SPECDEC_MAX_SEQ_LEN")),
        ({"SPECDEC_CACHE_DIRR": "x"}, ("SPECDEC_CACHE_DIRR", "SPECDEC_CACHE_DIR")),
        ({"SPECDEC_MAX_OUTPUT_LEN": "many"}, ("`--max-output-len`", "many", "the variable SPECDEC_MAX_OUTPUT_LEN")),
        ({"SPECDEC_SERVICE_HOST": "10.0.0.1", "SPECDEC_PORT_80_TCP": "tcp://10.0.0.1:80"}, ("engine_outputs",)),
        (
            {"SPECDEC_MAX_MODEL_LEN": "64", "SPECDEC_MAX_SEQ_LEN": "64"},
            ("two", "SPECDEC_MAX_MODEL_LEN", "SPECDEC_MAX_SEQ_LEN"),
        ),
        ({"SPECDEC_MODEL": "demo", "SPECDEC_MODEL_DIR": "demo"}, ("SPECDEC_MODEL and", "SPECDEC_MODEL_DIR")),
    ],
)
def test_what_is_wrong_with_a_variable_is_said(
    variables: dict[str, str], values: tuple[str, ...], place: Path, specdec: Specdec, said: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = specdec("run", "a b")
    assert result.exit_code in (1, 2) and "Traceback" not in result.stderr
    said(result, *values)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("max_seq_len: 64\nmax_outptu_len: 3", ("max_outptu_len", "line 2", "`max_output_len`")),
        ("sampling:\n  temprature: 1", ("temprature", "line 2", "`temperature`")),
        ("serv:\n  port: 8001", ("serv", "line 1", "`serve`")),
        ("samplng:\n  temperature: 1", ("samplng", "line 1", "`sampling`")),
        ("speculative_confg:\n  method: ngram", ("speculative_confg", "line 1", "`speculative_config`")),
        ("max_output_len: many", ("`--max-output-len`", "many", "line 1")),
        ("max_output_len: true", ("`--max-output-len`", "true", "line 1")),
        ("max_output_len: 0", ("`--max-output-len`", "0", "line 1")),
        ("\nstreaming: perhaps", ("`--streaming`", "perhaps", "line 2")),
        ("stats: some", ("`--stats`", "some", "line 1")),
        ("model: demo\nengine_dir: engine", ("`--model-dir`", "`--engine-dir`", "prod.yaml")),
        ("speculative_config:\n  method: ngram\n  depth: 3", ("depth: 3", "line 3")),
        ("speculative_config:\n  method: ngram\n  max_draft_lne: 3", ("max_draft_lne: 3", "line 3", "`max_draft_len`")),
        ("tensor_parallel_size: 2", ("2", "line 1", "`specdec convert MODEL --tp-size 2`")),
        ("model: ''", ("`model`", "line 1")),
        ("config: other.yaml", ("another", "line 1")),
        ("a: b: c", ("YAML", "line 1")),
        ("- max_output_len", ("line 1",)),
        ("top_k: 1\ntop_k: 2", ("`top_k`", "line 2", "line 1")),
        ("stop_words: &a [*a]", ("prod.yaml",)),
        ("max_new_tokens: 2\nmax_tokens: 3", ("`max_tokens`", "`max_new_tokens`", "line 2", "line 1")),
        ("run:\n  port: 8001", ("port", "line 2")),
        ("run: 3", ("`run`", "section", "line 1")),
        (None, ("prod.yaml",)),
        ("top_k: 1\n<<: 3", ("`<<`", "line 2")),
        (f"stats: {'some' * 750}", ("`--stats`", "3,000 characters", "line 1")),
        ("# TOML\nmax_seq_len = 64\nmodel = 'demo'", ("line 2", "`max_seq_len = 64`", "`max_seq_len: 64`")),
        ("model: demo\n[serve]  # TOML\nport = 1", ("line 2", "`serve:`")),
        ("model: demo\nsampling:\n  top_k=5", ("line 3", "`top_k: 5`")),
        ("run:\n  stop_words = ['a']", ("line 2", "`stop_words: ['a']`")),
        ("model: demo\nmax_seq_len:64", ("line 2", "`max_seq_len: 64`")),
        ("sampling: 3", ("`sampling`", "section", "line 1")),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(
    text: str | None, values: tuple[str, ...], place: Path, specdec: Specdec, said: Said
) -> None:
    if text is not None:
        Path("prod.yaml").write_text(text)
    result = specdec("run", "a b", "--config", "prod.yaml")
    assert result.exit_code == 2 and result.stderr.count("error: ") == 1 and "Traceback" not in result.stderr
    said(result, *values)


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("spec_decode_max_draft_len: 4", True),
        ("draft_len_mode: auto", True),
        ("ngram_pool: owner", True),
        ("spec_decode_max_draft_len: 4\nspec_decode_algo: none", True),
        ("draft_len_mode: auto\nspec_decode_algo: SUFFIX", False),
        ("spec_decode_max_draft_len: 4\ndraft_model_dir: draft", False),
    ],
)
def test_config_show_tells_that_a_setting_lacks_its_drafter(
    text: str, is_told: bool, place: Path, specdec: Specdec
) -> None:
    """It is no error there: the drafter may come from the command line."""
    Path("prod.yaml").write_text(text)
    result = specdec("config", "show", "run", "--config", "prod.yaml")
    assert result.exit_code == 0 and ("warning" in result.stderr) == is_told, result.stderr
    if is_told:
        refused = specdec("run", "demo", "a b", "--config", "prod.yaml").stderr.splitlines()[0]
        assert "(prod.yaml, line 1)" in refused and refused.removeprefix("error: ") in result.stderr


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        ("run", "spec_decode_algo: NGRRAM"),
        ("run", "ngram_config: '[300,x]'"),
        ("run", "drafters: ngram,sufix"),
        ("run", "speculative_config: magic"),
        ("run", "kv_cache_disk_size: much"),
        ("serve", "tool_call_parser: herms"),
        ("regress", "max_diverged: many"),
        ("convert", "qformat: int5"),
        ("build", "device: gpu"),
    ],
)
def test_config_show_says_what_the_command_would_say(
    command: str, setting: str, place: Path, specdec: Specdec, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, value = setting.partition(": ")
    Path("prod.yaml").write_text(f"\n{setting}")
    needed = ["demo", "--traces", "t.jsonl"] if command == "regress" else [] if command == "build" else ["demo"]
    by_command = specdec(command, *needed, "--config", "prod.yaml")
    assert by_command.exit_code == 2 and "prod.yaml, line 2)" in by_command.stderr, by_command.stderr
    assert (
        specdec("config", "show", command, "--config", "prod.yaml").stderr.splitlines()[0]
        == by_command.stderr.splitlines()[0]
    )
    monkeypatch.setenv(variable := f"SPECDEC_{name.upper()}", value.strip("'"))
    for words in ((command, *needed), ("config", "show", command), ("config", "show")):
        assert f"(the variable {variable})" in specdec(*words).stderr, words
