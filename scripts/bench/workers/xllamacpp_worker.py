"""The worker of llama.cpp as its wheel has it (`pip install xllamacpp`): its server, and the times that it tells.

The wheel needs no compiler, and has the instructions that most machines have, as the note tells; `llamacpp_worker.py`
has one that is compiled for the machine. Times are of the server's own clock, without HTTP, the K/V cache is in
float16, and a prompt is computed from its beginning.
"""

import json
import urllib.request
from typing import Any

import xllamacpp

from scripts.bench.workers.worker import Job, Variant, peak_memory_bytes, serve


def load(settings: dict[str, Any]) -> tuple[dict[str, Variant], str]:
    params = xllamacpp.CommonParams()
    params.model.path = settings["gguf_file"]
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = settings["max_request_tokens"], 1, False, 0
    params.port, params.cpuparams.n_threads = 0, settings["num_threads"]
    params.cpuparams_batch.n_threads = settings["num_threads"]
    server = xllamacpp.Server(params)

    def generate(job: Job, _: Any) -> list[int]:
        asked = {"prompt": job.prompt, "n_predict": job.max_new_tokens, "temperature": 0, "ignore_eos": True}
        asked |= {"cache_prompt": False, "return_tokens": True}
        headers = {"Content-Type": "application/json"}
        url, body = f"{server.listening_address}/completion", json.dumps(asked).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            found = json.loads(answer.read())
        told.update(found["timings"])
        return list(found["tokens"])

    return {"none": generate}, f"float16 K/V cache, built for {xllamacpp.get_system_info().strip()}"


told: dict[str, float] = {}
"""The times of the last job."""


def by_server(variant: Variant, job: Job) -> dict[str, Any]:
    output_ids = variant(job, lambda: None)
    return {
        "output_ids": output_ids,
        "num_steps": len(output_ids),
        "ttft_s": told["prompt_ms"] / 1e3,
        "tpot_s": told["predicted_per_token_ms"] / 1e3,
        "peak_memory_bytes": peak_memory_bytes(),
    }


if __name__ == "__main__":
    serve(load, by_server)
