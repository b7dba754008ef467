"""Fixtures for every test: tiny models, engines made from them, and one thread for torch."""

import os

# Set before torch is imported: with tiny tensors, threads that wait for each other are the whole run time.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import build_tiny, make_build, make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from runtime.checkpoint import convert
from runtime.compiler.build import build_engine
from runtime.engine import Engine, KVCacheConfig

torch.set_num_threads(1)
torch.set_num_interop_threads(1)
CPU = torch.device("cpu")

MakeEngineDir = Callable[..., Path]
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["SPECDEC_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def make_engine_dir(tmp_path_factory: pytest.TempPathFactory) -> MakeEngineDir:
    """`make_engine_dir(model, **build)`: the engine directory of a model; `build` as for `make_build`."""

    def make(model: PreTrainedModel, **build: Any) -> Path:
        work_dir = tmp_path_factory.mktemp("engine")
        model.save_pretrained(work_dir / "model")
        return build_tiny(work_dir / "model", work_dir, **build)

    return make


@pytest.fixture
def make_engine(make_engine_dir: MakeEngineDir) -> Iterator[MakeEngine]:
    """`make_engine(model, kv_cache, **build)`: an opened engine, closed after the test."""
    engines: list[Engine] = []

    def make(model: PreTrainedModel, kv_cache: KVCacheConfig | None = None, **build: Any) -> Engine:
        engines.append(Engine.open(make_engine_dir(model, **build), kv_cache=kv_cache))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


_TEXT = (
    "Once upon a time there was a little dog. The little dog had a red ball. One day the dog lost the ball. "
    "The dog looked for the ball in the park, and the dog looked for the ball under the bed. "
    "Then a little girl found the red ball and gave the ball to the little dog."
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on a few sentences: about 300 tokens, every text round-trips."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([_TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A Hugging Face model directory: a tiny random Llama with `tokenizer` beside it."""
    directory = tmp_path_factory.mktemp("llama") / "model"
    model = make_model("llama", vocab_size=len(tokenizer))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def llama(llama_dir: Path) -> PreTrainedModel:
    """Hugging Face's own model of `llama_dir`, float32 and eager."""
    return AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def llama_checkpoint_dir(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama") / "checkpoint"
    convert(llama_dir, directory, None, replace=False, progress=lambda done, total: None)
    return directory


@pytest.fixture(scope="session")
def llama_uncompiled_dir(llama_checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engine directory of `llama_dir` with compiler none."""
    directory = tmp_path_factory.mktemp("llama") / "uncompiled"
    build_engine(llama_checkpoint_dir, directory, make_build(), CPU, replace=False, phase=lambda name: None)
    return directory


@pytest.fixture(scope="session")
def llama_engine_dir(llama_checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engine directory of `llama_dir`, compiled ahead of time (half a minute, once)."""
    directory = tmp_path_factory.mktemp("llama") / "engine"
    build = make_build(compiler="aot")
    build_engine(llama_checkpoint_dir, directory, build, CPU, replace=False, phase=lambda name: None)
    return directory
