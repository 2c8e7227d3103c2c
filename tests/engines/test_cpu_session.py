"""What every CPU graph is opened with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from trtspec.engines.cpu_session import open_session


def test_its_threads_give_the_cores_away_after_a_run(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "g.onnx")
    session = open_session(tmp_path / "g.onnx", 3)
    options = session.get_session_options()
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
    assert options.intra_op_num_threads == 3
    assert session.run(None, {"x": np.array([1, 2], np.float32)})[0].tolist() == [-1, -2]
