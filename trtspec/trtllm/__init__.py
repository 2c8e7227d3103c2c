"""TensorRT-LLM: its settings by version as data, checks of a user's files, packages of a plan, and serving them.

contract.yaml   every key, type, default, rename and forbidden combination, with versions and sources
contract.py     that table as one version sees it
check.py        a file against it: what is wrong, where, and what to write instead
derive.py       from a plan to settings, each with its reason
package.py      those settings as files: `trtllm-serve --config`, and a Triton repository around the stock model
repository.py   a Triton repository around trtspec's own model
runtime.py      TensorRT-LLM behind that model
requests.py     one request as a version takes it, and what it would ignore
"""
