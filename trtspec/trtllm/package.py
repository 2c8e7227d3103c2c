"""TensorRT-LLM's settings as files: what `trtllm-serve --config` reads, and a Triton repository.

<into>/trtllm-serve.yaml    settings with their reasons
<into>/settings.json        the same, and the commands, for programs
<into>/README.md            how to start either server

The Triton model is the one the container ships, unmodified: its file here finds and runs it on the model.yaml
beside it, so the repository is right for every TensorRT-LLM that the container may bring.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from trtspec.errors import StageFailed
from trtspec.files import pretty_json
from trtspec.package.contract import INPUTS, LLMAPI, OUTPUTS
from trtspec.package.lint import check_gpu_device_ids, lint_repository
from trtspec.package.settings import MODEL_YAML
from trtspec.trtllm.contract import triton_image
from trtspec.trtllm.derive import MOUNT, Settings, settings_text

SETTINGS_YAML, SETTINGS_JSON = "trtllm-serve.yaml", "settings.json"
CANCELLATION_MS = 50
_NODE_GPUS = 8  # of an HGX or DGX machine

STOCK_MODEL_PY = '''\
"""Triton's llmapi model as the container ships it, run on the model.yaml beside this file.

TRTSPEC_LLMAPI_FOLDER names another folder with its model.py and helpers.py.
"""

import importlib.util
import os
import sys
from pathlib import Path

_SHIPPED = Path(os.environ.get("TRTSPEC_LLMAPI_FOLDER", "/app/all_models/llmapi/tensorrt_llm/1"))
os.environ.setdefault("LLM_CONFIG_PATH", str(Path(__file__).resolve().with_name("model.yaml")))
sys.path.insert(0, str(_SHIPPED))  # for the helpers beside it

_spec = importlib.util.spec_from_file_location("llmapi_model", _SHIPPED / "model.py")
if _spec is None or not (_SHIPPED / "model.py").is_file():
    raise RuntimeError(f"there is no llmapi model in {_SHIPPED}: is this a trtllm-python-py3 container?")
_module = importlib.util.module_from_spec(_spec)
sys.modules["llmapi_model"] = _module
_spec.loader.exec_module(_module)

TritonPythonModel = _module.TritonPythonModel
'''


@dataclass(frozen=True, slots=True)
class Launch:
    """The commands that start a server on a build folder, its working directory. triton: None without an image."""

    trtllm_serve: str
    triton: str | None


def write_settings(settings: Settings, model_name: str, instances: int, http_port: int, into: Path) -> Launch:
    """Write the three files of the settings; returns the commands that use them."""
    launch = _launch(settings, instances, http_port)
    (into / SETTINGS_YAML).write_text(settings_text(settings, leave_out=("model",)), "utf-8")
    record = {**asdict(settings), "notes": list(settings.notes), "launch": asdict(launch)}
    (into / SETTINGS_JSON).write_text(pretty_json(record), "utf-8")
    (into / "README.md").write_text(_readme(settings, launch), "utf-8")
    return launch


def write_repository(settings: Settings, model_name: str, instances: int, into: Path) -> None:
    """Write `into/<model_name>` and lint it. Raises StageFailed when what was written breaks a rule."""
    model = into / model_name
    (model / "1").mkdir(parents=True)
    ranks = settings.values["tensor_parallel_size"] * settings.values["pipeline_parallel_size"]
    (model / "config.pbtxt").write_text(stock_config(model_name, instances, ranks), "utf-8")
    (model / "1" / "model.py").write_text(STOCK_MODEL_PY, "utf-8")
    policy = (
        "# Read by the llmapi model: batching is TensorRT-LLM's own, and a stream is many responses.\n"
        f"triton_config:\n  max_batch_size: 0\n  decoupled: true\n  cancellation_check_period_ms: {CANCELLATION_MS}\n"
    )
    (model / "1" / MODEL_YAML).write_text(settings_text(settings, extra=policy), "utf-8")
    if findings := lint_repository(into):
        raise StageFailed(
            "the packaged repository breaks its own rules:\n  " + "\n  ".join(map(str, findings)),
            where=str(model),
        )


def gpu_device_ids(instances: int, ranks: int) -> str | None:
    """GPUs of each instance, "0,1;2,3"; None for one instance, which takes the first."""
    if instances == 1:
        return None
    text = ";".join(",".join(str(gpu) for gpu in range(i * ranks, (i + 1) * ranks)) for i in range(instances))
    if problem := check_gpu_device_ids(text, instances, ranks):
        raise StageFailed(problem, where="config.pbtxt")
    return text


def stock_config(model_name: str, instances: int, ranks: int) -> str:
    """`config.pbtxt` of the stock model. Batch size and decoupling are in model.yaml, where it reads them."""
    inputs = ",\n".join(
        f'  {{ name: "{t.name}" data_type: {t.data_type} dims: [ {t.dims} ]'
        f"{'' if t.name == 'text_input' else ' optional: true'} }}"
        for t in INPUTS
        if t.origin == LLMAPI
    )
    outputs = ",\n".join(
        f'  {{ name: "{t.name}" data_type: {t.data_type} dims: [ {t.dims} ] }}'
        for t in OUTPUTS
        if t.origin == LLMAPI
    )
    gpus = gpu_device_ids(instances, ranks)
    parameters = (
        f'parameters {{ key: "gpu_device_ids" value {{ string_value: "{gpus}" }} }}\n' if gpus else ""
    )
    return (
        f'name: "{model_name}"\n'
        'backend: "python"\n'
        f"instance_group [ {{ count: {instances} kind: KIND_CPU }} ]\n"
        f"{parameters}"
        f"input [\n{inputs}\n]\n"
        f"output [\n{outputs}\n]\n"
    )


def _launch(settings: Settings, instances: int, http_port: int) -> Launch:
    serve = (
        f"trtllm-serve {MOUNT}/target --backend pytorch --port {http_port} "
        f"--config {MOUNT}/trtllm/{SETTINGS_YAML}"
    )
    triton = f"tritonserver --model-repository {MOUNT}/repository --http-port {http_port}"
    ranks = settings.values["tensor_parallel_size"] * settings.values["pipeline_parallel_size"]
    # Several instances start ranks of their own, for which they must not be under MPI; across nodes srun starts MPI.
    if instances == 1 and ranks <= _NODE_GPUS:
        triton = f"mpirun -n 1 --allow-run-as-root {triton}"
    image = triton_image(settings.version)
    return Launch(
        _in_container(f"nvcr.io/nvidia/tensorrt-llm/release:{settings.version}", ranks, serve),
        _in_container(image, ranks, triton) if image else None,
    )


def _in_container(image: str, ranks: int, command: str) -> str:
    """The command on this machine or, where its ranks take several, Slurm's with one rank per GPU."""
    if ranks <= _NODE_GPUS:
        return f"docker run --rm --gpus all --ipc host --network host -v $PWD:{MOUNT} {image} {command}"
    return (
        f"srun --nodes={-(-ranks // _NODE_GPUS)} --ntasks={ranks} --ntasks-per-node={_NODE_GPUS} --mpi=pmix "
        f"--container-image={image.replace('/', '#', 1)} "  # pyxis wants # behind the registry
        f"--container-mounts=$PWD:{MOUNT} trtllm-llmapi-launch {command}"
    )


def _readme(settings: Settings, launch: Launch) -> str:
    lines = [
        f"# TensorRT-LLM {settings.version}",
        "",
        f"`{SETTINGS_YAML}` says above every key why it has its value. Run these in the build folder; they mount it at",
        f"`{MOUNT}`. Nothing is compiled ahead: weights load, and kernels are tuned, when a server starts.",
        "",
        "OpenAI-compatible server:",
        "",
        "```",
        launch.trtllm_serve,
        "```",
        "",
    ]
    if launch.triton:
        lines += ["Triton Inference Server:", "", "```", launch.triton, "```"]
    else:
        lines += [
            f"No Triton image with TensorRT-LLM {settings.version} is known; any that carries it will do."
        ]
    if launch.trtllm_serve.startswith("srun"):
        lines += [
            "",
            f"These are for nodes of {_NODE_GPUS} GPUs under Slurm with pyxis; on Kubernetes the chart in deploy/ does",
            "the same. Unconfirmed: neither has run yet.",
        ]
    lines += [
        "",
        f"In a container that has trtspec beside TensorRT-LLM, `trtspec serve {MOUNT} --openai` runs",
        "`trtllm/repository`: Triton with trtspec's own model, and OpenAI's API before it. Clients get what trtspec's",
        "other backends give them: deltas, the chat template, each request's acceptance, and a 400 for what this",
        "version would ignore.",
    ]
    if settings.notes:
        lines += ["", "To know:", "", *(f"- {note}" for note in settings.notes)]
    return "\n".join(lines) + "\n"
