"""`examples/ray_serve.py`: two replicas answer as `specdec serve` does. Skipped where Ray Serve is absent."""

import os
from pathlib import Path

import httpx2
import pytest
from waiting import HANG_S

pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

import ray  # noqa: E402

from specdec_cli import LLM, SamplingParams  # noqa: E402

ROOT = Path(__file__).parents[2]
PROMPT = "The little dog had a red ball. The"


def test_two_replicas_answer(llama_uncompiled_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"SPECDEC_ENGINE_DIR": str(llama_uncompiled_dir), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(ROOT))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        from examples.ray_serve import app

        serve.run(app, route_prefix="/")
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}
        with httpx2.Client(base_url="http://127.0.0.1:8000", timeout=HANG_S) as client:
            answers = [client.post("/v1/completions", json=body) for _ in range(8)]
            refused = client.post("/v1/completions", json=body | {"temperature": -1})
        (replicas,) = (one.deployments["Specdec"].replica_states for one in serve.status().applications.values())
    finally:
        serve.shutdown()
        ray.shutdown()
    with LLM(llama_uncompiled_dir) as llm:
        (expected,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [expected.text] * 8
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"
    assert replicas == {"RUNNING": 2}
