"""Names of code in README.md and docs/ are there: Python's names, keys of JSON, flags of C++, and modules.

A span looks like code where it is one name, or where a name in it has an underscore or a capital inside. Such a name
must be an identifier of the project's own: defined, passed, read or asked for somewhere. Words of sentences do not
count, and neither does the changelog, which speaks of what was.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import pytest

import specdec_cli
from scripts.tools import update_docs

ROOT = Path(__file__).parents[1]
PAGES = {name: text for name, text in update_docs.read_pages().items() if name != "docs/changelog.md"}
DIRECTORIES = ("runtime", "commands", "specdec_cli", "scripts", "tests", "examples")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_KEY = re.compile(r"[A-Za-z_][\w.:-]*")
OTHERS = {
    "PrefixCacheAffinityRouter": "Ray's", "StructuredOutputsParams": "vLLM's",
    "ChatOpenAI": "LangChain's", "bind_tools": "LangChain's", "with_structured_output": "LangChain's",
    "OpenAI": "of openai's package", "OpenAIChatModel": "Pydantic AI's", "OpenAIProvider": "Pydantic AI's",
    "api_base": "smolagents'", "mutants": "a file for cosmic-ray",
    "EchoDrafter": "the drafter of an example", "echo_": "the same", "echo_algorithm": "the same",
    "echo_config": "the same",
    "SECURITY": "a file",
    "fp8_kv_cache": "TensorRT-LLM's", "int8_kv_cache": "TensorRT-LLM's", "int4_awq": "TensorRT-LLM's",
    "int8_sq": "TensorRT-LLM's", "w4a8_awq": "TensorRT-LLM's", "tensorrt_llm_bls": "TensorRT-LLM's",
    "use_draft_logits": "TensorRT-LLM's", "convert_checkpoint": "TensorRT-LLM's",
    "convert_hf_to_gguf": "llama.cpp's", "request_format": "guidellm's",
    "quickstart_advanced": "TensorRT-LLM's", "nvfp4": "TensorRT-LLM's",
    "NO_COLOR": "a variable of the environment, which rich reads", "pbtxt": "the ending of Triton's configs",
    "logits_generation": "a file that `run` writes", "x_generation": "a file that `run` writes",
    "rankN": "stands for rank0, rank1 and so on",
    "tokenizer_backend": "lm-evaluation-harness's", "add_bos_token": "lm-evaluation-harness's",
    "python3": "a command", "torchrun": "torch's command",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "a variable of the environment, which Claude Code reads",
    "assistant_model": "transformers' `generate`", "MKL_CBWR": "a variable of the environment, which MKL reads",
    "_keep_in_fp32_modules": "transformers'", "_keep_in_fp32_modules_strict": "transformers'",
    "num_preemptions_total": "a metric", "num_turns_total": "a metric",
    "modules_to_not_convert": "transformers' quantization_config",
    "vdpbf16ps": "an instruction",
    "Q4_K_M": "a format of GGUF files", "LLAMA_ARG_CTX_SIZE": "a variable of llama.cpp's",
    "SPECDEC_MAX_SEQ_LEN": "the variable of a flag",
    "dependentRequired": "JSON Schema's", "dependentSchemas": "JSON Schema's", "propertyNames": "JSON Schema's",
    "unevaluatedItems": "JSON Schema's", "unevaluatedProperties": "JSON Schema's", "uniqueItems": "JSON Schema's",
    "duration": "JSON Schema's", "email": "JSON Schema's", "hostname": "JSON Schema's", "ipv4": "JSON Schema's",
    "ipv6": "JSON Schema's", "uri": "JSON Schema's", "uuid": "JSON Schema's",
}  # fmt: skip
"""Names in the documentation that are not the project's, and whose they are."""


@cache
def own_names() -> frozenset[str]:
    """Identifiers of the Python files, strings that are nothing but a key, and words of the other files."""
    names: set[str] = set()
    for path in sources(".py"):
        names.add(path.stem)
        if path.name.startswith("test_"):
            continue  # pages name what a test is called, and helpers
        # Python keeps the compiled module of what is imported, and what is compiled here.
        code = SourceFileLoader(path.stem, str(path)).get_code(path.stem)
        names.update(names_in(code, keys=ROOT / "tests" not in path.parents))  # tests have keys of others' configs
    for suffix in (".json", ".cpp", ".h", ".toml", ".yml", ".pbtxt", ".html"):
        for path in sources(suffix):
            names.update(_IDENTIFIER.findall(path.read_text(encoding="utf-8")))
    for text in PAGES.values():  # what examples define, which `test_python_runs` runs
        names.update(Path(name).stem for name in re.findall(r"<!-- file: ([\w.]+) -->", text))
    names |= {
        f"{name}_total"
        for name in names
        if name.startswith(("spec_decode_", "request_", "prompt_", "generation_", "num_"))
    }
    return frozenset(names | {path.name for directory in DIRECTORIES for path in (ROOT / directory).rglob("*/")})


def sources(suffix: str) -> Iterator[Path]:
    """Files of the project, but for this file, which names what is not there."""
    for directory in DIRECTORIES:
        if directory != "tests" or suffix == ".py":
            yield from (path for path in (ROOT / directory).rglob(f"*{suffix}") if path != Path(__file__))
    yield from ROOT.glob(f"*{suffix}")


def names_in(value: object, *, keys: bool) -> Iterator[str]:
    """Names of a compiled module and, with `keys`, strings in it that are nothing but a key."""
    match value:
        case CodeType():
            yield from (*value.co_varnames, *value.co_freevars, value.co_name)
            yield from (part for name in value.co_names for part in name.split("."))
            yield from (name for one in value.co_consts for name in names_in(one, keys=keys))
        case tuple() | frozenset():
            yield from (name for one in value for name in names_in(one, keys=keys))
        case str() if keys and _KEY.fullmatch(value):
            yield from _IDENTIFIER.findall(value)


def spans(text: str) -> list[str]:
    """Spans between backticks in the prose."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def code_names(span: str) -> Iterator[str]:
    """`a.b_c` has b_c and, as it is names alone, a; in `--flag some_value` it is some_value."""
    is_name = re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", span) is not None
    for word in re.findall(r"(?<![\w\-/$|])[A-Za-z_]\w*", span):  # `<|im_end|>` is a token
        if is_name or "_" in word.strip("_") or re.search(r"[a-z][A-Z]", word):
            yield word


def test_names_of_code_are_the_projects_own() -> None:
    named = {(page, word) for page, text in PAGES.items() for span in spans(text) for word in code_names(span)}
    known = own_names() | OTHERS.keys()
    assert {(page, word) for page, word in named if word not in known} == set()


def test_exceptions_are_needed() -> None:
    named = {word for text in PAGES.values() for span in spans(text) for word in code_names(span)}
    assert OTHERS.keys() - named == set(), "no page names it"


def test_modules_and_what_is_in_them_can_be_imported() -> None:
    for span in {span for text in PAGES.values() for span in spans(text)}:
        if re.fullmatch(r"(runtime|commands|specdec_cli)(\.\w+)+", span):
            resolve(span)


def resolve(dotted: str) -> object:
    """A module, or what is in one."""
    module, _, name = dotted.rpartition(".")
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module) if "." in module or module in DIRECTORIES else module, name)


def test_members_of_public_classes_are_theirs() -> None:
    """`LLM.stream`, `llm.stream(…)`, `Draft.probs`."""
    for span in {span for text in PAGES.values() for span in spans(text)}:
        for owner, member in re.findall(r"(?<![\w./])(\w+)\.([a-z_]\w*)(?![\w/]|\.\w)", span):
            owner = "LLM" if owner == "llm" else owner
            if owner in specdec_cli.__all__:
                found = getattr(specdec_cli, owner)
                fields = getattr(found, "__dataclass_fields__", {})
                assert hasattr(found, member) or member in fields or member in found.__init__.__code__.co_names, span


def test_every_public_name_has_an_example_that_is_run_and_a_sentence() -> None:
    """`test_python_runs` runs the blocks of docs/python.md."""
    page = PAGES["docs/python.md"]
    examples = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    nodes = [node for example in examples for node in ast.walk(ast.parse(example))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "specdec_cli"]
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    public = set(specdec_cli.__all__)
    assert public - ({alias.name for node in imports for alias in node.names} & used) == set(), "no example uses it"
    assert {name for name in public if f"`{name}`" not in page and f"`{name}(" not in page} == set()


@pytest.mark.parametrize("span", ["use_linear_kernels_of_old", "runtime.nothing", "Draft.no_such", "noSuchThing"])
def test_what_is_not_there_is_noticed(span: str) -> None:
    unknown = set(code_names(span)) - own_names()
    with pytest.raises((AssertionError, AttributeError, ModuleNotFoundError)):
        assert unknown == set()
        resolve(span)
