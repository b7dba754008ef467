"""Flags of vLLM, llama.cpp, Ollama, SGLang and TensorRT-LLM: taken, dropped with a reason, or answered."""

import shlex
from dataclasses import replace

import pytest
from command_line import Specdec
from sentences import Said

from commands.options.foreign import Flags, without_foreign
from runtime.util.errors import UsageError

VALUES = ["text", "model-dir", "input-text", "max-output-len", "max-seq-len", "max-batch-size", "random-seed"]
NAMES = frozenset([*VALUES, "system", "draft-model-dir", "kv-cache-dtype"])
RUN = Flags("run", NAMES | {"json"}, NAMES, frozenset({"-i"}))


@pytest.mark.parametrize(
    ("given", "kept", "told"),
    [
        ("--gemm_plugin float16 --json", "--json", "--gemm_plugin"),
        ("--gemm-plugin=float16 --json", "--json", "--gemm-plugin"),
        ("--cuda_graph_mode --json", "--json", "--cuda_graph_mode"),
        ("--log_level verbose --workers=2", "", "--log_level, --workers"),
        ("--gemm_plugin", "", "--gemm_plugin"),
        ("-- --gemm_plugin a", "-- --gemm_plugin a", ""),
        ("--text --gemm_plugin --gemm_plugin a", "--text --gemm_plugin", "--gemm_plugin"),
        ("--text=x --gemm_plugin a", "--text=x", "--gemm_plugin"),
        ("--text", "--text", ""),
        ("gemm_plugin -gemm_plugin", "gemm_plugin -gemm_plugin", ""),
        # llama.cpp's, and a prompt that looks like a flag of its
        ("-m F -p 'a b' -n 32 -c 8192", "--model-dir F --input-text 'a b' --max-output-len 32 --max-seq-len 8192", ""),
        (
            "-hf a/b -md d.gguf -np 2 -s 7",
            "--model-dir a/b --draft-model-dir d.gguf --max-batch-size 2 --random-seed 7",
            "",
        ),
        ("-m=F -i -x", "--model-dir=F -i -x", ""),
        ("--input-text -m", "--input-text -m", ""),
        ("F -ngl 99 --threads 4 --jinja", "F", "-ngl (an engine is whole on one device), --threads (the variable"),
        # vLLM's
        ("--model F --max_model_len 9 --max-num-seqs 2", "--model F --max_model_len 9 --max-num-seqs 2", ""),
        ("--trust-remote-code --enable-chunked-prefill", "", "--trust-remote-code (code that comes with a model"),
        ("--enable-auto-tool-choice --tensor-parallel-size 1 -tp 1", "", "--enable-auto-tool-choice (tools are called"),
    ],
)
def test_flags_of_others(given: str, kept: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert without_foreign(shlex.split(given), RUN) == shlex.split(kept)
    assert capsys.readouterr().err.startswith(f"warning: no effect in specdec: {told}" if told else "")


def test_what_a_command_does_anyway_needs_no_answer() -> None:
    assert without_foreign(["F", "-cnv", "-n", "3"], replace(RUN, command="chat")) == ["F", "--max-output-len", "3"]


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("serve demo --tensor-parallel-size 2", ("2", "--tp-size 2")),
        ("serve demo -tp=2", ("2", "--tp-size 2")),
        ("run demo --tp_size 2 a", ("2", "--tp-size 2")),
        ("run demo --pipeline-parallel-size 4 a", ("4", "--tp-size 4")),
        ("serve demo --gpu-memory-utilization 0.8", ("0.8", "--kv-cache-free-gpu-memory-fraction 0.8")),
        ("run demo -ctk q8_0 a", ("q8_0", "`--kv-cache-dtype int8`")),
        ("run demo --block-size 16 a", ("16", "--tokens-per-block 16")),
        ("run demo -cnv", ("`specdec chat MODEL`",)),
        ("serve demo --chat-template t.jinja", ("t.jinja", "`--tokenizer-dir`")),
        ("run demo --load-in-4bit a", ("`--quantization int4`",)),
        ("run demo --lora a", ("merge",)),
        ("ps", ("`specdec list`",)),
        ("quantize demo", ("--quantization int4",)),
        ("run demo a --quantization awq", ("awq", "AWQ")),
        ("run demo a --kv-cache-dtype q4_0", ("q4_0", "int8")),
        ("run demo a --quantization fp8 --activations int8", ("int8", "fp8")),
        ("run demo a --dtype int4", ("int4", "`--quantization int4`")),
        ("run demo a --speculative-config ngram", ("ngram", '"method"')),
        ("run demo a --speculative-config '[]'", ("[]",)),
        ("""run demo a --speculative-config '{"method": "medusa"}'""", ("medusa", "eagle3")),
        (
            """run demo a --speculative-config '{"method": "ngram", "disable_by_batch_size": 4}'""",
            ("disable_by_batch_size", "4"),
        ),
        ("""run demo a --speculative-config '{"method": "ngram", "max_draft_len": 0}'""", ("max_draft_len", "0")),
        ("""run demo a --speculative-config '{"max_draft_len": 5}'""", ("names no method",)),
        ("""run demo a --ngram-config 4,2 --speculative-config '{"method": "suffix"}'""", ("--ngram-config",)),
        ("run demo a --engine-dir engine_outputs", ("`demo`", "`--engine-dir`", "engine_outputs")),
        ("run demo a --model-dir demo-draft", ("`demo`", "`--model-dir`", "demo-draft")),
        ("chat demo --model demo-draft", ("`demo`", "`--model`", "demo-draft")),
        ("tune demo --engine-dir engine --input-text a", ("`demo`", "`--engine-dir`", "engine")),
        ("summarize demo --model_dir demo-draft", ("`demo`", "`--model-dir`")),
        ("doctor demo --engine-dir engine", ("`demo`", "`--engine-dir`")),
        ("convert demo --model-dir demo-draft", ("`demo`", "`--model-dir`", "demo-draft")),
        ("convert", ("no model", "`specdec convert demo`")),
        ("tune --traces t.jsonl --save", ("`--save`",)),
        ("run demo --prompt-cache f.bin a", ("f.bin", "`--kv-cache-dir DIR`")),
    ],
)
def test_what_means_something_else_is_answered(
    line: str, values: tuple[str, ...], specdec: Specdec, said: Said
) -> None:
    result = specdec(*shlex.split(line))
    assert result.exit_code == 2 and result.stdout == "", result.stderr
    assert result.stderr.count("error: ") == result.stderr.count("hint: ") == 1
    said(result, *values)


def test_a_value_that_is_so_anyway_is_taken() -> None:
    assert without_foreign(["--cache-type-k", "f16", "--pipeline-parallel-size=1"], RUN) == []
    with pytest.raises(UsageError):
        without_foreign(["--cache-type-k"], RUN)
