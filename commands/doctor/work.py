"""Work of `doctor`: prompts that fit, symptoms, diagnoses, and an exit code."""

from dataclasses import replace
from pathlib import Path

from commands.doctor.command import DoctorInputs, DoctorOptions
from commands.doctor.report import REMEDIES, doctor_document, show
from commands.inputs.dataset import DEMO, load_samples
from commands.inputs.prompts import Prompt, without_padding
from commands.options.engine_choice import EngineChoice
from commands.output import Output
from runtime.bundle import read_bundle
from runtime.diagnosis.diagnose import judge
from runtime.diagnosis.observations import ExpectedAcceptance
from runtime.diagnosis.observe import examine_draft_model, measure
from runtime.drafters.speculation import Speculation
from runtime.errors import SpecDecError
from runtime.llm import LLM
from runtime.params import SamplingParams
from runtime.request import Request
from runtime.tuning.profile import read_profile

_NUM_PROMPTS = 4


def diagnose(
    choice: EngineChoice,
    inputs: DoctorInputs,
    options: DoctorOptions,
    prompts: list[Prompt] | None,
    output: Output,
) -> None:
    """Measure, judge and show; SpecDecError (exit code 1) if there is a finding. Without prompts its own are asked."""
    bundle, speculation = choice.bundle or read_bundle(choice.engine_dir), choice.speculation
    is_auto = choice.mode == "leader" and bundle.has_costs
    speculation = speculation.in_mode(speculation.draft_len_mode or speculation.default_mode(is_leader=is_auto))
    kv_cache = choice.kv_cache.config()
    with LLM(
        bundle, tokenizer=choice.tokenizer_dir, mode=choice.mode, kv_cache=kv_cache, device_ids=choice.device_ids
    ) as llm:
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=options.max_output_len)
        if prompts is None:
            requests = _own_requests(llm, params, speculation)
        else:
            requests = _requests(llm, params, without_padding(prompts, inputs.input_file, llm.end_ids))
        with output.phases() as phase:
            pair = examine_draft_model(llm, speculation)
            symptoms = measure(llm, speculation, _expected(choice.profile), pair, requests, phase)
    judgements = judge(symptoms)
    show(judgements, output)
    output.document(doctor_document(replace(choice, speculation=speculation), options, len(requests), judgements))
    found = [(name, judgement) for name, judgement in judgements.items() if judgement and judgement.is_fault]
    if found:
        name, judgement = found[0]
        what = "1 finding" if len(found) == 1 else f"{len(found)} findings, the first"
        raise SpecDecError(f"{what}: {name}: {judgement.message}", hint=REMEDIES[name])


def _expected(profile: Path | None) -> ExpectedAcceptance | None:
    rate = None if profile is None else read_profile(profile).figures.draft_acceptance_rate
    return None if profile is None or rate is None else ExpectedAcceptance(profile, rate)


def _requests(llm: LLM, params: SamplingParams, prompts: list[Prompt]) -> list[Request]:
    template, requests = llm.request_of(params), []
    for i, prompt in enumerate(prompts):
        content = prompt.content if prompt.messages is None else llm.chat_template.encode(prompt.messages)
        requests.append(template.with_prompt(i, llm.encode(content)[0]))
    return requests


def _own_requests(llm: LLM, params: SamplingParams, speculation: Speculation) -> list[Request]:
    """Requests made of the shipped articles, each cut to its last tokens that fit the engine, the draft engine and the
    K/V cache.
    """
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
