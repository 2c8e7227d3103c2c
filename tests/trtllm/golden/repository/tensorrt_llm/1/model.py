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
