"""The worker of OpenVINO GenAI: one pipeline, without prompt lookup.

It runs in OpenVINO's virtual environment and imports nothing of specdec's. The backend is paged attention, the default
and here the faster one. Weights and K/V cache have the given dtype, and activations are not quantized; where weights
are quantized, activations are too, by groups of 64, and K/V to 8 bits. Prefix caching, on by default, would find the
prompt of the run before.
"""

from typing import Any

import numpy as np
import openvino
import openvino_genai

from scripts.bench.workers.worker import Job, Variant, serve

NO_TOP_K = 2**31 - 1


class StepStreamer(openvino_genai.StreamerBase):
    """Calls `arrived` once per step, whose tokens come together."""

    def __init__(self, arrived: Any) -> None:
        super().__init__()
        self._arrived = arrived

    def write(self, token: int | list[int]) -> openvino_genai.StreamingStatus:
        self._arrived()
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def load(settings: dict[str, Any]) -> tuple[dict[str, Variant], str]:
    precision = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[settings["dtype"]]
    is_quantized = settings["is_quantized"]
    properties: dict[str, Any] = {
        "ATTENTION_BACKEND": "PA",
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": "u8" if is_quantized else precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 64 if is_quantized else 0,
        "CPU_DENORMALS_OPTIMIZATION": True,
        "INFERENCE_NUM_THREADS": settings["num_threads"],
    }
    note = ", ".join(f"{name} {value}" for name, value in properties.items())
    # A precision that the processor lacks may become float32 without a word.
    note += f", processor has {' '.join(openvino.Core().get_property('CPU', 'OPTIMIZATION_CAPABILITIES'))}"
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 1 << 16  # a prompt is computed at once, as by default
    properties["scheduler_config"] = scheduler
    config = openvino_genai.GenerationConfig()
    pipeline = openvino_genai.LLMPipeline(settings["openvino_dir"], "CPU", **properties)

    def generate(job: Job, arrived: Any) -> list[int]:
        config.max_new_tokens, config.rng_seed = job.max_new_tokens, job.seed
        config.ignore_eos, config.stop_token_ids = not job.end_ids, set(job.end_ids)
        config.do_sample = job.sampling is not None
        if job.sampling:
            config.temperature, config.top_p = job.sampling.temperature, job.sampling.top_p
            config.top_k = job.sampling.top_k or NO_TOP_K
        ids = openvino.Tensor(np.array([job.prompt], dtype=np.int64))
        return list(pipeline.generate(ids, config, StepStreamer(arrived)).tokens[0])

    return {"none": generate}, f"{note}, prefix caching off"


if __name__ == "__main__":
    serve(load)
