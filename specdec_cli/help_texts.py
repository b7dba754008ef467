"""Help that is shown at once, made by `python -m scripts.tools.update_docs` (`commands.output.short_help`)."""

TEXTS = {
    "": """\
Usage: specdec COMMAND ...     (`specdec COMMAND --help` shows its flags)

Faster answers from the same model: a drafter guesses, the model checks.
Start with:
  specdec run demo "def area(w, h):" --spec-decode-algo AUTO
  specdec chat HuggingFaceTB/SmolLM2-135M-Instruct --quantization int8
  specdec serve ./model.gguf --spec-decode-algo AUTO

A model is `demo`, a directory, a GGUF file or a hub id. AUTO drafts where that
saves time; `specdec tune MODEL` finds what is fastest for your prompts.
Start
  run        answer prompts
  chat       talk with a model in the terminal
  serve      serve a model over HTTP, for OpenAI's and Anthropic's clients
  launch     run Claude Code, Codex or another agent on a model of yours
  batch      answer a file of requests; after a kill it resumes
Measure
  tune       find the drafter and the draft length that pay on your prompts
  drafters   which draft fits a model: each one's speed here, and its command
  summarize  quality and speed on a dataset, beside Hugging Face
  compare    two JSON documents side by side
  doctor     find what makes a model slow, and what to do about it
  predict    what drafts would save on another machine
  check      prove that answers are an engine's own, by their receipts
  regress    what another engine changes in old answers
  fingerprint  whether two engines or machines give the same bits
Make
  convert    a model becomes a checkpoint, quantized if you like
  build      a checkpoint becomes an engine; `run MODEL` does both by itself
  train      train a drafting head on the model's own answers
  corpus     make files of text that n-gram lookup searches
Look after
  list       models on this machine: formats, sizes, last use
  pull       download a model of the hub, such as OWNER/NAME:Q4_K_M
  rm         remove a model's downloaded files and its engines
  config     settings of variables and files, and where each comes from
  cache      list the engines, and remove the oldest
  verify     compare files with their checksums
  schema     print the JSON schema of a command's `--json` document
--version (-V); --debug shows tracebacks; --install-completion completes words
""",
    "run": """\
Usage: specdec run [MODEL] [PROMPT ...] [FLAGS]

Generate from prompts, speculating with a drafter if one is given.

  specdec run demo "def area(w, h):" --spec-decode-algo AUTO --check-lossless
  specdec run ./Llama-3.2-1B --quantization int4 - < README.md
Model
  MODEL                    directory, GGUF file, hub id, `demo`, or an engine
  --quantization FORMAT    weights in int8, int4 or fp8
  --kv-cache-dtype NAME    keys and values in int8 or fp8
  --max-seq-len N          most tokens of prompt and output (to 4,096)
Input
  PROMPT                   texts to continue; `-` reads standard input
  --input-file PATH        prompts in a .txt, .jsonl, .csv or .npy file
  --apply-chat-template    send prompts as a user's messages
Speculation
  --spec-decode-algo NAME  drafter: AUTO, NGRAM, SUFFIX, ...
  --draft-model-dir TEXT   a draft model or a trained head
  --ngram-config LIST      lookup: [max_draft_len, max_matching_ngram_size]
  --profile FILE           draft as `specdec tune` recommends, from a file
Sampling
  --max-output-len N       tokens to generate
  --stop-words TEXT        text that ends an output; repeatable
  --temperature X          0 is greedy
  --top-p X                sample among the best tokens of this probability
  --top-k N                sample among this many best tokens
  --random-seed N          seed of sampling
Output
  --streaming              print text as it is generated
  --check-lossless         compare with no drafter: the same tokens? faster?
  --stats NAME             `detailed` adds acceptance by position
  --show-tokens            mark the tokens that were drafted
  --report FILE.html       write a page with charts
  --json                   print one JSON document on stdout
  --quiet                  print the result only
  --help-all               show all flags
""",
    "chat": """\
Usage: specdec chat [MODEL] [FLAGS]

Talk with a model that was trained for conversations, and watch it speculate.

  specdec chat ./Llama-3.2-1B-Instruct --spec-decode-algo AUTO
  specdec chat ./model.gguf --system "You are brief." --show-tokens
Model
  MODEL                    directory, GGUF file, hub id, `demo`, or an engine
  --quantization FORMAT    weights in int8, int4 or fp8
  --kv-cache-dtype NAME    keys and values in int8 or fp8
  --max-seq-len N          most tokens of prompt and output (to 4,096)
Input
  --system TEXT            system message
Speculation
  --spec-decode-algo NAME  drafter: AUTO, NGRAM, SUFFIX, ...
  --draft-model-dir TEXT   a draft model or a trained head
  --ngram-config LIST      lookup: [max_draft_len, max_matching_ngram_size]
  --profile FILE           draft as `specdec tune` recommends, from a file
Sampling
  --max-output-len N       tokens to generate
  --stop-words TEXT        text that ends an output; repeatable
  --temperature X          0 is greedy
  --top-p X                sample among the best tokens of this probability
  --top-k N                sample among this many best tokens
  --random-seed N          seed of sampling
Output
  --show-tokens            mark the tokens that were drafted
  --help-all               show all flags
""",
    "serve": """\
Usage: specdec serve [MODEL] [FLAGS]

Serve a model over HTTP, as OpenAI's clients expect it, with speculation in a
running batch.

  specdec serve demo --spec-decode-algo AUTO
  specdec serve ./Llama-3.2-1B-Instruct --kv-cache-dtype int8 --max-seq-len 16384 --port 8000
Model
  MODEL                    directory, GGUF file, hub id, `demo`, or an engine
  --quantization FORMAT    weights in int8, int4 or fp8
  --kv-cache-dtype NAME    keys and values in int8 or fp8
  --max-seq-len N          most tokens of prompt and output (to 4,096)
Server
  --host TEXT              address to listen on
  --port N                 port to listen on
  --api-key TEXT           key that clients must send
  --served-model-name TEXT name of the model for clients; repeatable
  --max-queue-len N        most requests that may wait
Speculation
  --spec-decode-algo NAME  drafter: AUTO, NGRAM, SUFFIX, ...
  --draft-model-dir TEXT   a draft model or a trained head
  --ngram-config LIST      lookup: [max_draft_len, max_matching_ngram_size]
  --profile FILE           draft as `specdec tune` recommends, from a file
  --help-all               show all flags
""",
    "batch": """\
Usage: specdec batch [MODEL] [FLAGS]

Answer a file of requests, with speculation in a running batch, on this machine
or with Ray on many.

  specdec batch demo -i requests.jsonl -o results.jsonl --spec-decode-algo AUTO
  specdec batch engine -i requests.jsonl -o results.jsonl --ray local --num-workers 2
Model
  MODEL                    directory, GGUF file, hub id, `demo`, or an engine
  --quantization FORMAT    weights in int8, int4 or fp8
  --kv-cache-dtype NAME    keys and values in int8 or fp8
  --max-seq-len N          most tokens of prompt and output (to 4,096)
Input
  -i, --input-file PATH    requests, one per line, in OpenAI's batch format
  --served-model-name TEXT name of the model for clients; repeatable
Cluster
  --ray ADDRESS            have Ray's workers answer
  --num-workers N          workers, each with an engine of its own
Speculation
  --spec-decode-algo NAME  drafter: AUTO, NGRAM, SUFFIX, ...
  --draft-model-dir TEXT   a draft model or a trained head
  --ngram-config LIST      lookup: [max_draft_len, max_matching_ngram_size]
  --profile FILE           draft as `specdec tune` recommends, from a file
Sampling
  --max-output-len N       tokens to generate
  --temperature X          0 is greedy
  --top-k N                sample among this many best tokens
  --top-p X                sample among the best tokens of this probability
  --random-seed N          seed for requests that have none
Output
  -o, --output-file PATH   results, one line per request, in OpenAI's format
  --json                   print one JSON document on stdout
  --quiet                  print the result only
  --help-all               show all flags
""",
    "doctor": """\
Usage: specdec doctor [MODEL] [FLAGS]

Look for what makes an engine slow or speculation useless, and say what to do
about it.

  specdec doctor demo --spec-decode-algo AUTO --input-file prompts.jsonl
  specdec doctor engine --profile tuned.json
Model
  MODEL                    directory, GGUF file, hub id, `demo`, or an engine
  --quantization FORMAT    weights in int8, int4 or fp8
  --kv-cache-dtype NAME    keys and values in int8 or fp8
  --max-seq-len N          most tokens of prompt and output (to 4,096)
Input
  --input-file PATH        prompts in a .txt, .jsonl, .csv or .npy file
Speculation
  --spec-decode-algo NAME  drafter: AUTO, NGRAM, SUFFIX, ...
  --draft-model-dir TEXT   a draft model or a trained head
  --ngram-config LIST      lookup: [max_draft_len, max_matching_ngram_size]
  --profile FILE           draft as `specdec tune` recommends, from a file
Sampling
  --max-output-len N       tokens to generate
Output
  --report FILE.html       write a page with charts
  --json                   print one JSON document on stdout
  --quiet                  print the result only
  --help-all               show all flags
""",
    "tune": """\
Usage: specdec tune [MODEL] [FLAGS]

Find the drafter and the draft length that save most time, if any does.

  specdec tune demo --input-file prompts.jsonl --save
  specdec tune --traces traces.jsonl --ngram-pool public
Model
  MODEL                    directory, GGUF file, hub id, `demo`, or an engine
  --quantization FORMAT    weights in int8, int4 or fp8
  --kv-cache-dtype NAME    keys and values in int8 or fp8
  --max-seq-len N          most tokens of prompt and output (to 4,096)
Input
  --traces PATH            recorded prompts and outputs, by `--output-traces`
  --input-file PATH        prompts in a .txt, .jsonl, .csv or .npy file
Runtime
  --batch-size N           requests answered together
Speculation
  --draft-model-dir TEXT   a draft model or a trained head
  --ngram-config LIST      lookup: [max_draft_len, max_matching_ngram_size]
Sampling
  --max-output-len N       tokens to generate
Output
  --output PROFILE.json    write the recommendation, for `--profile`
  --save                   make the recommendation the model's default
  --report FILE.html       write a page with charts
  --json                   print one JSON document on stdout
  --quiet                  print the result only
  --help-all               show all flags
""",
    "summarize": """\
Usage: specdec summarize [MODEL] [FLAGS]

Measure quality and speed on a dataset: ROUGE, acceptance, latency and
throughput, by category.

  specdec summarize demo --spec-decode-algo AUTO --check-lossless --check-accuracy
  specdec summarize engine --test-engine --test-hf --hf-model-dir demo --dataset my.jsonl
Model
  MODEL                    directory, GGUF file, hub id, `demo`, or an engine
  --quantization FORMAT    weights in int8, int4 or fp8
  --kv-cache-dtype NAME    keys and values in int8 or fp8
  --max-seq-len N          most tokens of prompt and output (to 4,096)
Input
  --hf-model-dir TEXT      model that `--test-hf` runs
  --dataset TEXT           `demo`, a hub id, or a .jsonl, .csv or .parquet file
Cluster
  --ray ADDRESS            have Ray's workers answer
  --num-workers N          workers, each with an engine of its own
Runtime
  --test-engine            run the engine
  --test-hf                run Hugging Face
  --batch-size N           samples answered together
  --max-ite N              batches to run
Speculation
  --spec-decode-algo NAME  drafter: AUTO, NGRAM, SUFFIX, ...
  --draft-model-dir TEXT   a draft model or a trained head
  --ngram-config LIST      lookup: [max_draft_len, max_matching_ngram_size]
  --profile FILE           draft as `specdec tune` recommends, from a file
Sampling
  --output-len N           tokens to generate
  --stop-words TEXT        text that ends an output; repeatable
  --random-seed N          order of the dataset, and seed of sampling
  --temperature X          0 is greedy
  --top-p X                sample among the best tokens of this probability
  --top-k N                sample among this many best tokens
Output
  --check-accuracy         exit 1 if ROUGE-1 is below the threshold
  --check-lossless         compare with no drafter: the same tokens? faster?
  --stats NAME             `detailed` adds acceptance by position
  --report FILE.html       write a page with charts
  --json                   print one JSON document on stdout
  --quiet                  print the result only
  --help-all               show all flags
""",
}
