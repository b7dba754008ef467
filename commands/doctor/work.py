"""Work of `doctor`: chooses prompts that fit the engine, diagnoses it, and shows a remedy for each finding."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

from commands.doctor.document import (
    Diagnosis,
    DoctorDocument,
    DoctorSettings,
    ExplanationRecord,
    StepRecord,
    TimedStep,
)
from commands.doctor.page import doctor_page
from commands.inputs.dataset import DEMO, load_samples
from commands.inputs.prompts import Prompt, without_padding
from commands.options.drafter_flags import algorithm_flag
from commands.options.engine_choice import EngineChoice
from commands.options.hints import Advice, advice_at_hand, anew
from commands.options.sessions import open_engine
from commands.output.documents.records import Counts, measured_head
from commands.output.documents.settings import EngineRecord
from commands.output.help import as_flag
from commands.output.html.page import write_page
from commands.output.output import Output
from runtime.builder.profile import read_profile
from runtime.checkpoint.bundle import read_bundle
from runtime.core.params import SamplingParams
from runtime.core.request import Request
from runtime.drafters.specs import NgramDrafter, SuffixDrafter
from runtime.drafters.speculation import Speculation
from runtime.llm import LLM
from runtime.measure.diagnosis.diagnose import OF_DRAFTERS, ExpectedAcceptance, Judgement, StepTime, judge
from runtime.measure.diagnosis.explain import Explanation, explain
from runtime.measure.diagnosis.observe import examine_draft_model, measure
from runtime.util.errors import SpecDecError, UsageError


def doctor_document(
    choice: EngineChoice,
    num_prompts: int,
    judgements: Mapping[str, Judgement | None],
    steps: Sequence[StepTime],
    explanation: Explanation | None = None,
) -> DoctorDocument:
    explained: dict[str, Any] = {} if explanation is None else {"explanation": _explanation(explanation)}
    assert choice.params.max_tokens is not None
    return DoctorDocument(
        **measured_head("doctor"),
        engine_dir=str(choice.engine_dir),
        settings=DoctorSettings(
            drafters=choice.speculation.names,
            draft_len_mode=choice.speculation.draft_len_mode or "fixed",
            profile=None if choice.profile is None else str(choice.profile),
            mode=choice.mode,
            max_output_len=choice.params.max_tokens,
        ),
        num_prompts=num_prompts,
        is_healthy=not any(judgement and judgement.is_fault for judgement in judgements.values()),
        diagnoses=[_diagnosis(name, judgement) for name, judgement in judgements.items()],
        engine=EngineRecord.of(choice.bundle or read_bundle(choice.engine_dir)),
        steps=[
            TimedStep(
                batch_size=step.cost.batch_size,
                num_tokens=step.cost.num_tokens,
                context_len=step.cost.context_len,
                built_s=step.cost.seconds,
                now_s=step.seconds,
            )
            for step in steps
        ],
        **explained,
    )


def _explanation(explanation: Explanation) -> ExplanationRecord:
    steps = [StepRecord(**asdict(step)) for step in explanation.steps]
    return ExplanationRecord(steps=steps, total=Counts(**explanation.stats.counts(explanation.max_draft_len)))


def _diagnosis(name: str, judgement: Judgement | None) -> Diagnosis:
    if judgement is None:
        return Diagnosis(name=name, status="not_judged", number=None, limit=None, message=None, remedy=None)
    return Diagnosis(
        name=name,
        status="found" if judgement.is_fault else "ok",
        number=judgement.number,
        limit=judgement.limit,
        message=judgement.message,
        remedy=remedy_of(name) if judgement.is_fault else None,
    )


def show(judgements: Mapping[str, Judgement | None], output: Output, *, has_drafter: bool) -> None:
    """Show each check, and each finding with its remedy. Checks of the drafter are left out if there is no drafter."""
    of_drafters = set() if has_drafter else {one.__name__ for one in OF_DRAFTERS}
    found = {name: judgement.message for name, judgement in judgements.items() if judgement and judgement.is_fault}
    for judgement in judgements.values():
        if judgement is not None and not judgement.is_fault:
            output.result(f"ok     {judgement.message}")
    if unknown := [name for name, one in judgements.items() if one is None and name not in of_drafters]:
        output.result(f"not checked: {', '.join(map(_words, unknown))}")
    if of_drafters:
        output.result(f"no drafter is given: `{algorithm_flag(SuffixDrafter)}` has one looked at too")
    for name, message in found.items():
        output.result(f"FOUND  {_words(name)}: {message}")
        output.result(f"       {remedy_of(name)}")
        if output.quiet:
            output.text(name)
    num_judged = sum(judgement is not None for judgement in judgements.values())
    output.result(f"looked at: {num_judged}, found: {len(found)}")


def _words(name: str) -> str:
    """A diagnosis's name as words: `reuse never hits`."""
    return name.replace("_", " ")


_LOWER, _POOL, _CORPUS = (
    as_flag(NgramDrafter.settings()[name].flag or "") for name in ("min_matching_ngram_size", "pool", "corpus")
)


def _larger_batch(before: str, behind: str) -> Advice:
    larger = f"a larger `{as_flag('max_batch_size')}`{behind}"
    return Advice(f"{before}build with {larger}", f"{before}give {larger}")


REMEDIES: dict[str, str | Advice] = {
    "drafter_never_used": f"leave it out, or let it find more: a lower `{_LOWER}`, `{_POOL} public`, `{_CORPUS}`",
    "acceptance_below_profile": "tune on prompts like these: `specdec tune --engine-dir ENGINE --input-file PROMPTS "
    "--output PROFILE.json`",
    "acceptance_falls_with_context": "`--draft-len-mode auto` drafts less where less is accepted; a draft model should "
    "be trained for contexts as long as the target's",
    "drafts_longer_than_pays": "`--draft-len-mode auto`, or shorter drafts; with a best length of 0 leave the drafter "
    "out",
    "draft_tokenizer_differs": "take a draft model of the target's own family, and its tokenizer's files unchanged",
    "draft_chat_template_differs": "take a draft model that was trained with the target's chat template: it expects "
    "other words around each message",
    "draft_rope_differs": Advice(
        "change `config.json` of both models alike (`rope_parameters`), then run `specdec convert` and `specdec build` "
        "again",
        "change `config.json` of both models alike (`rope_parameters`)",
    ),
    "draft_model_is_target": "name a smaller model's engine with `--draft-engine-dir`",
    "speculation_changes_output": "look for what the drafter changes besides its drafts; if it is one of specdec's "
    "own, `specdec run --check-lossless` shows where: please report it",
    "output_not_repeatable": "test the memory and the processor; if they are sound, please report it",
    "cache_preempts": "raise `--max-tokens-in-paged-kv-cache`, or answer fewer requests at a time",
    "reuse_never_hits": "leave block reuse on (`--kv-cache-enable-block-reuse`), and give the cache room for a prompt "
    "that comes again: `--max-tokens-in-paged-kv-cache`",
    "state_slots_full": _larger_batch("", ", which the number of slots follows, or answer fewer requests at a time"),
    "state_hits_missed": _larger_batch(
        "lower `--state-checkpoint-interval`: states are kept so often along prompts; or ", ", if states are evicted"
    ),
    "steps_slower_than_built": anew(
        "see the other findings; if there are none, the processor is slower than then: too warm, saving power, shared, "
        "or another one. On another machine "
    ),
    "memory_slower_than_built": anew("stop other processes that use memory, or ", " on this machine"),
    "fewer_threads_than_built": anew(
        "raise OMP_NUM_THREADS and give the process its cores (`taskset`, the container's limit), or ", " with as many"
    ),
    "more_threads_than_cores": "lower OMP_NUM_THREADS to the cores, or allow more (`taskset`, the container's limit)",
    "busy_machine": "stop other processes, or reserve cores for this one (`taskset`)",
    "several_numa_nodes": "keep threads and memory on one node: `numactl --cpunodebind 0 --membind 0 specdec …`",
    "no_huge_pages": "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`, as root",
    "denormal_weights": Advice(
        "set them to 0 in the model, or look for what shrank them, and run `specdec convert` again",
        "set them to 0 in the model, or look for what shrank them",
    ),
}


def remedy_of(name: str) -> str:
    """The remedy of a finding: a user who named a model gets other advice than a user who named an engine."""
    return advice_at_hand(REMEDIES[name])


_NUM_PROMPTS = 4


@contextmanager
def _opened(
    choice: EngineChoice, input_file: Path | None, prompts: list[Prompt] | None
) -> Iterator[tuple[LLM, Speculation, list[Request]]]:
    """The engine, its drafter, and the requests, which are made from the shipped articles if no prompts are given."""
    bundle, speculation = choice.bundle or read_bundle(choice.engine_dir), choice.speculation
    is_auto = choice.mode == "leader" and bundle.has_costs
    speculation = speculation.in_mode(speculation.draft_len_mode or speculation.default_mode(is_leader=is_auto))
    with open_engine(choice) as llm:
        if prompts is None:
            requests = _own_requests(llm, choice.params, speculation)
        else:
            requests = _requests(llm, choice.params, without_padding(prompts, input_file, llm.end_ids))
        yield llm, speculation, requests


def diagnose(
    choice: EngineChoice,
    input_file: Path | None,
    prompts: list[Prompt] | None,
    report: Path | None,
    output: Output,
) -> None:
    """Measure, judge and show; exits with 1 if there is a finding."""
    with _opened(choice, input_file, prompts) as (llm, speculation, requests), output.phases() as phase:
        pair = examine_draft_model(llm, speculation)
        observed = measure(llm, speculation, _expected(choice.profile), pair, requests, phase)
    judgements = judge(observed)
    show(judgements, output, has_drafter=bool(speculation))
    document = doctor_document(replace(choice, speculation=speculation), len(requests), judgements, observed.steps)
    if report is not None:
        write_page(report, doctor_page(document.as_json()), output)
    output.document(document.as_json())
    if not document.is_healthy:
        raise typer.Exit(1)


def explain_steps(
    choice: EngineChoice,
    input_file: Path | None,
    prompts: list[Prompt] | None,
    output: Output,
) -> None:
    """Answer the first prompt, and show the reason for the length of each step's draft."""
    if not choice.speculation:
        raise UsageError("there is no drafter whose steps could be explained", hint="name one: `--drafters ngram`")
    with _opened(choice, input_file, prompts) as (llm, speculation, requests):
        explanation = explain(llm, speculation, requests[0])
    show_steps(explanation, output)
    document = doctor_document(replace(choice, speculation=speculation), 1, {}, [], explanation)
    output.document(document.as_json())


def show_steps(explanation: Explanation, output: Output) -> None:
    """Print a line for each step, and the sums."""
    for number, step in enumerate(explanation.steps, 1):
        offers = ", ".join(f"{one.drafter} {one.num_tokens}" for one in step.offers) or "no offer"
        promise = "" if step.promised is None else f", promises {step.promised:.2f}"
        price = "" if step.price is None else f", needs {step.price:.2f}"
        counts = f"sent {step.num_sent}, accepted {step.num_accepted}, tokens {step.num_new_tokens}"
        output.result(f"{number:>4}  {offers}{promise}{price}: {step.reason}; {counts}")
    stats = explanation.stats
    output.result(
        f"{stats.num_steps} steps: {stats.num_draft_tokens} draft tokens sent, {stats.num_accepted_draft_tokens} "
        f"accepted, {stats.num_generated_tokens} tokens"
    )


def _expected(profile: Path | None) -> ExpectedAcceptance | None:
    rate = None if profile is None else read_profile(profile).figures.draft_acceptance_rate
    return None if profile is None or rate is None else ExpectedAcceptance(profile, rate)


def _requests(llm: LLM, params: SamplingParams, prompts: list[Prompt]) -> list[Request]:
    template = llm.request_of(params)
    return [template.with_prompt(i, llm.encode(prompt.content_by(llm))[0]) for i, prompt in enumerate(prompts)]


def _own_requests(llm: LLM, params: SamplingParams, speculation: Speculation) -> list[Request]:
    """Requests made from the shipped articles, each cut to its last tokens that fit the engines and the K/V cache."""
    if llm.tokenizer is None:
        raise SpecDecError(
            "the engine has no tokenizer to read the shipped articles with", hint="give prompts of token ids"
        )
    bundles = [llm.bundle]
    bundles += [read_bundle(Path(one.draft_model)) for one in speculation if one.draft_model is not None]
    builds = [bundle.config.build_config for bundle in bundles]
    room = min(*(build.max_request_len for build in builds), llm.engine.num_cache_tokens - builds[0].max_draft_len)
    max_tokens = min(params.max_tokens or room, max(room // 2, 1))
    num_tokens = max(min(room - max_tokens, *(build.max_input_len for build in builds)), 1)
    samples = load_samples(
        DEMO, eval_task="summarize", dataset_dir=None, max_samples=_NUM_PROMPTS, seed=0, needs_reference=False
    )
    template = llm.request_of(replace(params, max_tokens=max_tokens))
    return [template.with_prompt(i, llm.encode(s.text, num_tokens)[0]) for i, s in enumerate(samples)]
