"""Measure a speculative deployment: prompts, targets, metrics, the record of a run and its report.

data.py            prompts from SPEED-Bench, Spec-Bench and a user's own files
targets.py         what is measured: a runtime in this process, or a Triton server
run.py             one evaluation: speculative and baseline side by side
lossless.py        whether both gave the same output
record.py          run.json, the raw record every number can be recounted from
metrics.py         each metric with its unit, formula and source
summary.py         the numbers of one run, and what the planner can use of it
specdec_bench.py   the same run in the files of ModelOpt's specdec_bench
report/            terminal and one-file HTML report
"""
