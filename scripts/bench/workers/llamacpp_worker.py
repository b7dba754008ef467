"""The worker of llama.cpp: llama-cpp-python's `llama_decode`, a token a step.

The K/V cache has the given dtype; beside quantized weights it is float16. Denormals are flushed to zero as in the
other systems. Flash attention, on by default,
is off: without it a step of the 101 M model took 0.6 of the time in float32 and 0.9 in bfloat16, and a prompt of 900
tokens 1.3 and 0.8. Where the processor has AMX quantized weights stay as they lie in the file: 0.3.36 lays them out for
it, and its products of those crash. What a library can do was settled when it was built: the note has its instruction
sets.
"""

import ctypes
import platform
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from scripts.bench.workers.worker import Job, Variant, serve

CACHE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}  # ggml.h, enum ggml_type
FLUSH_DENORMALS = 0x8040  # of MXCSR: flush to zero, denormals are zero
ERROR = 4  # ggml.h, enum ggml_log_level


@llama_cpp.llama_log_callback
def log_errors(level: int, text: bytes, _: Any) -> None:
    if level == ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def has_amx() -> bool:
    return "amx_tile" in Path("/proc/cpuinfo").read_text()


def flush_denormals() -> None:
    """Set it in this thread and those it starts, by the C library: its x86-64 fenv_t ends with MXCSR."""
    if platform.machine() == "x86_64":
        environment = (ctypes.c_uint32 * 8)()
        libm = ctypes.CDLL("libm.so.6")
        libm.fegetenv(environment)
        environment[7] |= FLUSH_DENORMALS
        libm.fesetenv(environment)


class Model:
    """One sequence: tokens in, chosen tokens out."""

    def __init__(self, settings: dict[str, Any], dtype: str) -> None:
        """Open the model with a K/V cache of that dtype."""
        file, num_threads, max_tokens = (settings[f] for f in ("gguf_file", "num_threads", "max_request_tokens"))
        loading = llama_cpp.llama_model_default_params()
        loading.use_extra_bufts = not (settings["is_quantized"] and has_amx())
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), loading)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = max_tokens
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.n_threads = params.n_threads_batch = num_threads
        params.type_k = params.type_v = CACHE_TYPES[dtype]
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {max_tokens} tokens for {file}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._sampler: Any = None
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(max_tokens, 0, 1)
        self._tokens, self._positions, num_sequences, self._has_logits = (
            np.ctypeslib.as_array(array, (max_tokens,))
            for array in (self._batch.token, self._batch.pos, self._batch.n_seq_id, self._batch.logits)
        )
        num_sequences[:] = 1
        for i in range(max_tokens):
            self._batch.seq_id[i][0] = 0

    def forget(self) -> None:
        """Drop the K/V of all tokens."""
        llama_cpp.llama_memory_seq_rm(self._memory, 0, 0, -1)

    def choose_by(self, job: Job) -> None:
        """Its samplers for the sampling that the job asks for, in the order of its own programs; none for greedy."""
        if self._sampler:
            llama_cpp.llama_sampler_free(self._sampler)
        self._sampler = job.sampling and llama_cpp.llama_sampler_chain_init(
            llama_cpp.llama_sampler_chain_default_params()
        )
        if job.sampling:
            for sampler in (
                llama_cpp.llama_sampler_init_top_k(job.sampling.top_k),
                llama_cpp.llama_sampler_init_top_p(job.sampling.top_p, 1),
                llama_cpp.llama_sampler_init_temp(job.sampling.temperature),
                llama_cpp.llama_sampler_init_dist(job.seed),
            ):
                llama_cpp.llama_sampler_chain_add(self._sampler, sampler)

    def step(self, tokens: list[int], position: int) -> int:
        """Compute the tokens, the first at `position`; the choice after the last."""
        n = self._batch.n_tokens = len(tokens)
        self._tokens[:n] = tokens
        self._positions[:n] = np.arange(position, position + n)
        self._has_logits[:n] = np.arange(n) == n - 1
        if llama_cpp.llama_decode(self._context, self._batch) != 0:
            raise RuntimeError(f"llama_decode failed for {n} tokens at position {position}")
        if self._sampler:
            return int(llama_cpp.llama_sampler_sample(self._sampler, self._context, n - 1))
        logits = llama_cpp.llama_get_logits_ith(self._context, n - 1)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


def load(settings: dict[str, Any]) -> tuple[dict[str, Variant], str]:
    flush_denormals()
    llama_cpp.llama_log_set(log_errors, None)
    llama_cpp.llama_backend_init()
    cache = "float16" if settings["is_quantized"] else settings["dtype"]
    model = Model(settings, cache)

    def generate(job: Job, arrived: Any) -> list[int]:
        prompt = job.prompt
        model.forget()
        model.choose_by(job)
        tokens = [*prompt, model.step(prompt, 0)]
        arrived()
        end = len(prompt) + job.max_new_tokens
        while len(tokens) < end and tokens[-1] not in job.end_ids:
            tokens.append(model.step(tokens[-1:], len(tokens) - 1))
            arrived()
        return tokens[len(prompt) :]

    built_for = [
        part.split(" = ")[0].split(":")[-1].strip()
        for part in llama_cpp.llama_print_system_info().decode().split("|")
        if part.strip().endswith("= 1")
    ]
    note = f"{cache} K/V cache of {settings['max_request_tokens']} tokens, built for {' '.join(built_for)}"
    return {"none": generate}, note


if __name__ == "__main__":
    serve(load)
