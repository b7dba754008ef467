"""lm-evaluation-harness against a server of ours, and its own Hugging Face model beside it: the scores must be equal.

pip install 'lm-eval[api,hf]' sacrebleu
specdec convert --model-dir demo --output-dir ckpt --dtype float32
specdec build --checkpoint-dir ckpt --output-dir engine --compiler none --max-draft-len 4 \
    --speculative-decoding-mode draft_tokens_external --use-paged-context-fmha enable
specdec serve --engine-dir engine --ngram-config 4,2 --served-model-name demo
python -m scripts.tools.serve_lm_eval http://localhost:8000 runtime/demo/target

A generation task and a likelihood task are made of the demo's articles: how a text goes on, and which of four endings
it had. Exit 1 if a score or a text differs, or a likelihood by more than 1e-3.
"""

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval
from lm_eval.tasks import TaskManager

ARTICLES = Path(__file__).parents[2] / "runtime" / "demo" / "articles.jsonl"
TASKS = ("specdec_generation", "specdec_likelihood")
COMMON = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{beginning}}}}"
"""
GENERATION = """
output_type: generate_until
doc_to_target: "{{ending}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 40, do_sample: false, temperature: 0}
metric_list: [{metric: chrf}, {metric: exact_match}]
"""
LIKELIHOOD = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def write_tasks(directory: Path, num_docs: int) -> None:
    texts = [json.loads(line)["article"] for line in ARTICLES.read_text().splitlines()]
    halves = [(text[: len(text) // 2], text[len(text) // 2 :][:80]) for text in texts[:num_docs]]
    data = directory / "docs.jsonl"
    with data.open("w") as file:
        for i, (beginning, ending) in enumerate(halves):
            others = [halves[(i + step) % num_docs][1] for step in (1, 2, 3)]
            file.write(json.dumps({"beginning": beginning, "ending": ending, "choices": [ending, *others]}) + "\n")
    for task, own in zip(TASKS, (GENERATION, LIKELIHOOD), strict=True):
        (directory / f"{task}.yaml").write_text(COMMON.format(task=task, data=data) + own)


def evaluate(model: str, arguments: str, tasks: TaskManager) -> dict[str, Any]:
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model, arguments, tasks=list(TASKS), task_manager=tasks, bootstrap_iters=0, log_samples=True, device="cpu"
    )
    return found


def scores(found: dict[str, Any]) -> dict[str, float]:
    return {
        f"{task} {name.partition(',')[0]}": value
        for task in TASKS
        for name, value in found["results"][task].items()
        if isinstance(value, float) and "stderr" not in name
    }


def answers(found: dict[str, Any], task: str) -> list[Any]:
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for answer in sample["filtered_resps"]]


def main() -> None:
    url, model_dir = sys.argv[1].rstrip("/"), sys.argv[2]
    num_docs = int(sys.argv[3]) if len(sys.argv) > 3 else 25
    with tempfile.TemporaryDirectory() as directory:
        write_tasks(Path(directory), num_docs)
        tasks = TaskManager(include_path=directory, include_defaults=False)
        # Unasked, lm-eval begins prompts with the tokenizer's first token for Hugging Face's model alone.
        arguments = f"base_url={url}/v1/completions,model=demo,tokenizer={model_dir},add_bos_token=True"
        ours = evaluate("local-completions", arguments, tasks)
        theirs = evaluate("hf", f"pretrained={model_dir},dtype=float32", tasks)
    texts = [answers(found, TASKS[0]) for found in (ours, theirs)]
    likelihoods = [[float(one[0]) for one in answers(found, TASKS[1])] for found in (ours, theirs)]
    largest = max(abs(a - b) for a, b in zip(*likelihoods, strict=True))
    num_equal = sum(a == b for a, b in zip(*texts, strict=True))
    print(f"lm-eval {version('lm_eval')}; specdec | Hugging Face")
    for name, value in scores(ours).items():
        print(f"{name}: {value:.6f} | {scores(theirs)[name]:.6f}")
    print(f"texts equal: {num_equal} of {len(texts[0])}")
    print(f"likelihoods: {len(likelihoods[0])}, the largest difference {largest:.1e}")
    sys.exit(scores(ours) != scores(theirs) or num_equal < len(texts[0]) or largest > 1e-3)


if __name__ == "__main__":
    main()
