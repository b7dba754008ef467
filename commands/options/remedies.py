"""What to do about each of `doctor`'s diagnoses, by its name."""

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
    "memory_slower_than_built": "end what else reads memory, or `specdec build` again on this machine",
    "fewer_threads_than_built": "raise OMP_NUM_THREADS and give the process its cores (`taskset`, the container's "
    "limit), or `specdec build` again with as many",
    "more_threads_than_cores": "lower OMP_NUM_THREADS to the cores, or allow more (`taskset`, the container's limit)",
    "busy_machine": "end what else computes here, or give this process cores of its own (`taskset`)",
    "several_numa_nodes": "keep threads and memory on one node: `numactl --cpunodebind 0 --membind 0 specdec …`",
    "no_huge_pages": "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`, as root",
    "denormal_weights": "set them to 0 in the model, or look for what shrank them, and `specdec convert` again",
}
