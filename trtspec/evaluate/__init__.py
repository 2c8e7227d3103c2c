"""Measure a speculative deployment: prompts, targets, metrics, the record of a run and its report.

data.py            prompts from SPEED-Bench, Spec-Bench and a user's own files
random_tokens.py   … and prompts of random tokens
targets.py         what is measured: a runtime in this process
triton.py          … or a Triton server, over gRPC or HTTP
openai_target.py   … or an OpenAI-compatible URL; served_steps.py rebuilds verify steps from what it tells
sse.py             the HTTP client of these
run.py             one evaluation: speculative and baseline side by side; arms.py sends the requests
load.py            when they are sent: closed loop, or open loop with Poisson arrivals
journal.py         what an unfinished run has finished, so that it goes on after a kill
lossless.py        whether both gave the same output
record.py          run.json, the raw record every number can be recounted from
metrics.py         each metric with its unit, formula and source
summary.py         the numbers of one run, and what the planner can use of it
specdec_bench.py   the same run in the files of ModelOpt's specdec_bench
export.py          … as a table in CSV or parquet, and its prompts as AIPerf takes them
diagnose/          causes of low speed and low acceptance, named from a run
sweep/             many runs from one file, in this process or on a Ray cluster
report/            terminal and one-file HTML report
"""
