"""Output of `doctor`: every finding with its remedy, and what else was looked at."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from commands.doctor.command import DoctorOptions
from commands.documents.records import Head, Record, document_head
from commands.documents.settings import DrafterNames
from commands.options.engine_choice import EngineChoice
from commands.options.leader_flags import Mode
from commands.output import Output
from runtime.config import Size
from runtime.diagnosis.diagnose import Judgement
from runtime.drafters.specs import DraftLenMode


class DoctorSettings(Record):
    """Settings of the command."""

    drafters: DrafterNames
    draft_len_mode: DraftLenMode
    profile: str | None = Field(description="the file that the drafter's settings are from")
    mode: Mode
    max_output_len: Size


class Diagnosis(Record):
    """A number beside its limit."""

    name: str
    status: Literal["ok", "found", "not_judged"] = Field(
        description="not_judged: there was nothing to measure, or too little"
    )
    number: int | float | None = Field(description="what was measured")
    limit: int | float | None = Field(description="threshold of a fault")
    message: str | None = Field(description="what the number is of")
    remedy: str | None = Field(description="remedy; null unless it was found")


class DoctorDocument(Head):
    """Document of `specdec doctor --json`."""

    command: Literal["doctor"]
    engine_dir: str = Field(description="as given")
    settings: DoctorSettings
    num_prompts: Size
    is_healthy: bool = Field(description="whether nothing was found; the exit code is 1 if not")
    diagnoses: list[Diagnosis]


def doctor_document(
    choice: EngineChoice,
    options: DoctorOptions,
    num_prompts: int,
    judgements: Mapping[str, Judgement | None],
) -> dict[str, Any]:
    document = DoctorDocument(
        **document_head("doctor"),
        engine_dir=str(choice.engine_dir),
        settings=DoctorSettings(
            drafters=choice.speculation.names,
            draft_len_mode=choice.speculation.draft_len_mode or "fixed",
            profile=None if choice.profile is None else str(choice.profile),
            mode=options.mode,
            max_output_len=options.max_output_len,
        ),
        num_prompts=num_prompts,
        is_healthy=not any(judgement and judgement.is_fault for judgement in judgements.values()),
        diagnoses=[_diagnosis(name, judgement) for name, judgement in judgements.items()],
    )
    return document.as_json()


def _diagnosis(name: str, judgement: Judgement | None) -> Diagnosis:
    if judgement is None:
        return Diagnosis(name=name, status="not_judged", number=None, limit=None, message=None, remedy=None)
    return Diagnosis(
        name=name,
        status="found" if judgement.is_fault else "ok",
        number=judgement.number,
        limit=judgement.limit,
        message=judgement.message,
        remedy=REMEDIES[name] if judgement.is_fault else None,
    )


def show(judgements: Mapping[str, Judgement | None], output: Output) -> None:
    found = [name for name, judgement in judgements.items() if judgement and judgement.is_fault]
    for name, judgement in judgements.items():
        if judgement is not None and not judgement.is_fault:
            output.result(f"ok     {name}: {judgement.message}")
    if unknown := [name for name, judgement in judgements.items() if judgement is None]:
        output.result(f"nothing to judge by: {', '.join(unknown)}")
    for name in found:
        judgement = judgements[name]
        assert judgement is not None
        output.result(f"FOUND  {name}: {judgement.message}")
        output.result(f"       {REMEDIES[name]}")
        if output.quiet:
            output.text(name)
    num_judged = sum(judgement is not None for judgement in judgements.values())
    output.result(f"looked at: {num_judged}, found: {len(found)}")


REMEDIES = {
    "drafter_never_used": "leave it out, or let it find more: a lower `--min-matching-ngram-size`, "
    "`--ngram-pool public`, `--ngram-corpus`",
    "acceptance_below_profile": "tune on prompts like these: `specdec tune --engine-dir ENGINE --input-file PROMPTS "
    "--output PROFILE.json`",
    "acceptance_falls_with_context": "`--draft-len-mode auto` drafts less where less is accepted; a draft model should "
    "be trained for contexts as long as the target's",
    "drafts_longer_than_pays": "`--draft-len-mode auto`, or shorter drafts; with a best length of 0 leave the drafter "
    "out",
    "draft_tokenizer_differs": "take a draft model of the target's own family, and its tokenizer's files unchanged",
    "draft_chat_template_differs": "take a draft model that was trained with the target's chat template: it expects "
    "other words around each message",
    "draft_rope_differs": "change `config.json` of both models alike (`rope_parameters`), then `specdec convert` and "
    "`specdec build` again",
    "draft_model_is_target": "name a smaller model's engine with `--draft-engine-dir`",
    "speculation_changes_output": "look for what the drafter changes besides its drafts; if it is one of specdec's "
    "own, `specdec run --check-lossless` shows where: please report it",
    "output_not_repeatable": "test the memory and the processor; if they are sound, please report it",
    "cache_preempts": "raise `--max-tokens-in-paged-kv-cache`, or answer fewer requests at a time",
    "reuse_never_hits": "leave block reuse on (`--kv-cache-enable-block-reuse`), and give the cache room for a prompt "
    "that comes again: `--max-tokens-in-paged-kv-cache`",
    "steps_slower_than_built": "see the other findings; if there are none, the processor is slower than then: too "
    "warm, saving power, shared, or another one. On another machine `specdec build` again",
    "memory_slower_than_built": "stop other processes that use memory, or `specdec build` again on this machine",
    "fewer_threads_than_built": "raise OMP_NUM_THREADS and give the process its cores (`taskset`, the container's "
    "limit), or `specdec build` again with as many",
    "more_threads_than_cores": "lower OMP_NUM_THREADS to the cores, or allow more (`taskset`, the container's limit)",
    "busy_machine": "stop other processes, or reserve cores for this one (`taskset`)",
    "several_numa_nodes": "keep threads and memory on one node: `numactl --cpunodebind 0 --membind 0 specdec …`",
    "no_huge_pages": "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`, as root",
    "denormal_weights": "set them to 0 in the model, or look for what shrank them, and `specdec convert` again",
}
