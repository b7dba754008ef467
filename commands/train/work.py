"""Work of `train` once its flags are checked: answers the prompts, computes hidden states, trains, and measures the
result.
"""

import json
import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.table import Table

from commands.inputs.prompts import Prompt, without_padding
from commands.output.documents.records import document_head
from commands.output.output import Output, number
from commands.train.document import AcceptedLength, TrainDocument, TrainSettings
from commands.train.flags import (
    FURTHER_LEARNING_RATE,
    NEW_LEARNING_RATE,
    NUM_DEPTHS,
    NUM_UNROLLED_STEPS,
    TrainInputs,
    TrainOptions,
    TrainResults,
)
from runtime.builder.engine_cache import ModelEngines
from runtime.builder.profile import engine_digest, model_digest
from runtime.checkpoint.resolve import read_model_config, resolve_model
from runtime.core.params import greedy_params
from runtime.core.request import Request
from runtime.drafters.heads.head_config import HeadConfig, num_layers_of, states_of_heads
from runtime.drafters.heads.mtp_head import check_mtp_is_of, check_mtp_is_trained
from runtime.engine.engine import KVCacheConfig
from runtime.llm import LLM
from runtime.loop.compatibility import check_head_tokenizer
from runtime.model.pretrained import parse_pretrained_config
from runtime.text.trace_lines import Trace, check_trace_lines
from runtime.text.traces import read_traces, trace_line
from runtime.training.new_head import read_states_of
from runtime.training.parallel_model import ParallelRun, check_has_no_states
from runtime.training.training_run import (
    MIN_OUTPUT_LEN,
    Accepted,
    Target,
    Texts,
    TrainingRun,
    TrainingSettings,
    check_num_traces,
    split_traces,
)
from runtime.util.digests import digest, file_digest
from runtime.util.errors import SpecDecError
from runtime.util.files import new_directory

ANSWERS = "answers.jsonl"
_ROUND = 8  # batches of answers that are kept at once


@dataclass(frozen=True)
class Trained:
    """A finished training, and what was measured on its held-out texts."""

    run: TrainingRun
    before: Accepted
    after: Accepted
    num_left_out: int


def start_training(
    inputs: TrainInputs,
    options: TrainOptions,
    results: TrainResults,
    given: HeadConfig | Path | None,
    prompts: list[Prompt],
    output: Output,
) -> None:
    num_given = len(prompts) + sum(check_trace_lines(path)[0] for path in inputs.traces or [])
    check_num_traces(num_given, options.max_text_len)  # not found out when all prompts were answered
    directory, made_directory = results.working_dir, not results.working_dir.exists()
    if isinstance(given, HeadConfig) and given.kind == "mtp":  # not found out when all answers were given
        check_mtp_is_trained(given)
        check_mtp_is_of(given, resolve_model(inputs.target))
    if isinstance(given, Path):
        check_has_no_states(parse_pretrained_config(read_model_config(given), str(given)), given)
    try:
        with ExitStack() as stack:
            llm = _open_target(stack, inputs, results, given, output)
            directory.mkdir(parents=True, exist_ok=True)
            traces = _traces(llm, inputs, prompts, directory, output)
            held_out = None
            if inputs.held_out_traces is not None:
                held_out = read_traces(inputs.held_out_traces, llm.tokenizer, llm.bundle.config.vocab_size)
            max_len = min(options.max_text_len, llm.bundle.config.build_config.max_request_len)
            texts, num_left_out = split_traces(traces, max_len, held_out)
            if num_left_out:
                output.warning(
                    f"left out, because fewer than {MIN_OUTPUT_LEN} tokens of their outputs are within {max_len}: "
                    f"{num_left_out} texts"
                )
            run = _open_run(llm, inputs, options, directory, texts, given)
            trained = Trained(run, *_train(run, output), num_left_out)
            with new_directory(results.output_dir, replace=False) as written:
                if isinstance(run, ParallelRun):
                    run.write_model(written, llm.identity.tokenizer_dir)
                else:
                    run.write(written, Path(inputs.target).expanduser().name, best_length(trained.after))
        if results.work_dir is None:
            shutil.rmtree(directory)
    except SpecDecError:
        if made_directory and not (directory / ANSWERS).exists():
            shutil.rmtree(directory, ignore_errors=True)
        raise
    except KeyboardInterrupt:
        if made_directory:
            with suppress(OSError):  # it has answers, hidden states or a checkpoint, or was not made
                directory.rmdir()
        if not directory.exists():
            raise
        output.warning(f"interrupted: {directory} keeps the work so far, and the same command goes on from it")
        raise typer.Exit(130) from None
    _show(trained, inputs, options, results, output)


def _open_target(
    stack: ExitStack, inputs: TrainInputs, results: TrainResults, given: HeadConfig | Path | None, output: Output
) -> LLM:
    """The target's engine, which computes the hidden states that the head reads, as it does when the head drafts."""
    config = read_model_config(resolve_model(inputs.target))
    heads = [given] if isinstance(given, HeadConfig) else []
    states = read_states_of(num_layers_of(config)) if given is None else states_of_heads(heads, config)
    options = results.engines.options
    options["use_cache"] = not results.engines.no_cache
    engine_dir = ModelEngines(stack, options, output.phases).of_target(inputs.target, (), states)
    llm = stack.enter_context(LLM(engine_dir, kv_cache=KVCacheConfig(block_reuse=False)))
    if isinstance(given, HeadConfig):
        given.check_target(llm.bundle.config.pretrained_config, llm.bundle.config.vocab_size)
    if given is not None:
        directory, what = (given.directory, "head") if isinstance(given, HeadConfig) else (given, "small model")
        check_head_tokenizer(directory, llm.identity.tokenizer_dir, lambda: llm.tokenizer, what)
    return llm


def _traces(llm: LLM, inputs: TrainInputs, prompts: list[Prompt], directory: Path, output: Output) -> list[Trace]:
    vocab_size = llm.bundle.config.vocab_size
    traces = [one for path in inputs.traces or [] for one in read_traces(path, llm.tokenizer, vocab_size)]
    return [*traces, *_answers(llm, inputs, prompts, directory, output)]


def _answers(llm: LLM, inputs: TrainInputs, prompts: list[Prompt], directory: Path, output: Output) -> list[Trace]:
    """Greedy answers to the prompts. Answers that an earlier start has given are read from the working directory.
    SpecDecError if they answer other prompts.
    """
    if not prompts:
        return []
    template = llm.request_of(greedy_params(inputs.max_output_len))
    prompts = without_padding(prompts, inputs.input_file, template.end_ids)
    longest = llm.bundle.config.build_config.max_request_len
    requests = list[Request]()
    for prompt in prompts:
        messages = prompt.conversation(apply_chat_template=inputs.apply_chat_template)
        tokens = llm.encode(prompt.content if messages is None else llm.chat_template.encode(messages))[0]
        room = longest - len(tokens)
        if room >= 1:
            request = template.with_prompt(len(requests), tokens)
            requests.append(replace(request, max_new_tokens=min(request.max_new_tokens, room)))
    if len(requests) < len(prompts):
        output.warning(f"left out, because they do not fit the engine: {len(prompts) - len(requests)} prompts")
    kept = directory / ANSWERS
    answered = _kept_answers(kept)
    is_same = len(answered) <= len(requests) and all(
        one.prompt_tokens == request.prompt_tokens for one, request in zip(answered, requests, strict=False)
    )
    if not is_same:
        raise SpecDecError(
            f"the training in {directory} was begun with other prompts than: {inputs.input_file}",
            hint="go on with the same, or remove the directory to begin anew",
        )
    session, at_once = llm.session(), _ROUND * llm.engine.max_batch_size
    with output.progress("answering", len(requests), len(answered)) as advance:
        while len(answered) < len(requests):
            asked = requests[len(answered) : len(answered) + at_once]
            sequences = session.run(asked).sequences
            with kept.open("a", encoding="utf-8") as file:
                file.write("".join(trace_line(sequence, None) for sequence in sequences))
            answered += [Trace(s.request.prompt_tokens, tuple(s.output_tokens)) for s in sequences]
            advance(len(asked), said=f"{sum(len(one.output_tokens) for one in answered):,} tokens")
    return answered


def _kept_answers(path: Path) -> list[Trace]:
    """The answers of an earlier start; a last line that is incomplete is cut off."""
    if not path.is_file():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        path.write_bytes(whole)
    rows = map(json.loads, whole.splitlines())
    return [Trace(tuple(row["prompt_ids"]), tuple(row["output_ids"])) for row in rows]


def _open_run(
    llm: LLM, inputs: TrainInputs, options: TrainOptions, directory: Path, texts: Texts, given: HeadConfig | Path | None
) -> TrainingRun:
    identity = {
        "target": digest([llm.bundle.directory.name, engine_digest(llm.bundle.config)])[:12],
        "head": _digest_of(given) if isinstance(given, HeadConfig) else given and model_digest(str(given))[:12],
        "texts": digest([repr((t.prompt_tokens, t.output_tokens)) for t in texts.all])[:12],
        "held-out texts": len(texts.held_out),
    }
    settings = TrainingSettings(
        options.draft_vocab_size,
        options.num_epochs,
        options.learning_rate or (NEW_LEARNING_RATE if given is None else FURTHER_LEARNING_RATE),
        options.num_unrolled_steps or _usual_steps(given),
        options.batch_tokens,
        options.random_seed,
        options.learn_prompts,
    )
    target = Target(llm.engine, resolve_model(inputs.target), llm.end_ids)
    kind = ParallelRun if isinstance(given, Path) else TrainingRun
    return kind(directory, settings, identity, texts, target, given)


def _usual_steps(given: HeadConfig | Path | None) -> int:
    """Default of `--num-unrolled-steps`."""
    if isinstance(given, Path):
        return NUM_DEPTHS
    return given.num_layers if given is not None and given.is_chain else NUM_UNROLLED_STEPS


def _digest_of(head: HeadConfig) -> str:
    whole = head.directory / "model.safetensors"
    return file_digest(whole if whole.is_file() else head.directory / "model.safetensors.index.json")[:12]


def _train(run: TrainingRun, output: Output) -> tuple[Accepted, Accepted]:
    """Train, and measure the held-out texts before and after."""
    states = run.states
    with output.progress("hidden states", sum(states.lengths), sum(states.lengths[: states.num_texts])) as advance:
        run.compute_states(lambda count, said: advance(count, "tokens"))
    num_held_out = len(run.texts.held_out)
    with output.progress("measuring", num_held_out) as advance:
        before = run.measure_before(advance)
    schedule = run.trainer.schedule
    with output.progress("training", schedule.num_steps, run.trainer.step) as advance:
        run.train(advance)
    with output.progress("measuring", num_held_out) as advance:
        return before, run.measure(advance)


def best_length(accepted: Accepted) -> int:
    """The longest draft whose last token adds at least 0.1 to the tokens of a step."""
    found = accepted.tokens_per_step
    gains = [after - before for before, after in zip([1.0, *found], found, strict=False)]
    return max([i + 1 for i, gain in enumerate(gains) if gain >= 0.1], default=1)


def _show(trained: Trained, inputs: TrainInputs, options: TrainOptions, results: TrainResults, output: Output) -> None:
    run, before, after = trained.run, trained.before, trained.after
    texts, is_model = run.texts, isinstance(run, ParallelRun)
    num_ids = run.head.vocab_size if is_model else run.head.config.draft_vocab_size
    num_tokens = sum(run.states.lengths[: len(texts.learned)])
    table = Table(title=f"Held-out texts: {len(texts.held_out)}, {after.num_tokens:,} tokens", title_justify="left")
    for column in ("draft", "tokens/step before", "after"):
        table.add_column(column, justify="right")
    lengths = _lengths(before, after)
    for one in lengths:
        cells = (number(one.tokens_per_step_before, 2), number(one.tokens_per_step_after, 2))
        table.add_row(str(one.draft_len), *cells)
    output.result(table)
    output.result(
        f"{len(texts.learned):,} texts of {num_tokens:,} tokens, {run.trainer.step:,} steps; the "
        f"{'model' if is_model else 'head'} drafts {num_ids:,} ids: {results.output_dir}"
    )
    is_mtp = not is_model and run.head.config.kind == "mtp"
    named = "--drafters mtp " if is_mtp else ""  # others are known by their config
    flags = f"--model-dir {inputs.target} {named}--draft-model-dir {results.output_dir}"
    output.result(f"to use it: specdec run {flags} …")
    if output.quiet:
        output.text(str(results.output_dir))
    used = replace(
        options,
        learning_rate=run.settings.learning_rate,
        num_unrolled_steps=run.settings.num_unrolled,
        draft_vocab_size=num_ids,
    )
    settings = TrainSettings(
        model_dir=inputs.target,
        draft_model_dir=None if inputs.draft_model_dir is None else str(inputs.draft_model_dir),
        parallel=inputs.parallel,
        **vars(used),
    )
    document = TrainDocument(
        **document_head("train"),
        settings=settings,
        output_dir=str(results.output_dir),
        num_texts=len(texts.learned),
        num_held_out_texts=len(texts.held_out),
        num_left_out_texts=trained.num_left_out,
        num_tokens=num_tokens,
        num_optimizer_steps=run.trainer.step,
        num_held_out_tokens=after.num_tokens,
        held_out_tokens_per_step=lengths,
    )
    output.document(document.as_json())


def _lengths(before: Accepted, after: Accepted) -> list[AcceptedLength]:
    pairs = zip(before.num_steps, after.num_steps, strict=True)
    return [
        AcceptedLength(
            draft_len=i + 1,
            num_steps_before=was,
            num_steps_after=now,
            tokens_per_step_before=before.num_tokens / was,
            tokens_per_step_after=after.num_tokens / now,
        )
        for i, (was, now) in enumerate(pairs)
    ]
