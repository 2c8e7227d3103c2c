"""Choose method and draft length for a config, a model folder or a bare config.json, and say why.

Builds nothing. A bare model is planned as an exploration, from the options below; a config has its own
settings, which --set overrides.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.commands import Context, Outcome
from trtspec.errors import ConfigError

if TYPE_CHECKING:
    from trtspec.plan import Plan
    from trtspec.plan.measured import Measured
    from trtspec.plan.probe import ProbeResult

HELP = "choose method and draft length for a config or a bare model, and say why"

_BARE_OPTIONS = ("device", "backend", "method", "tensor_parallel", "batch_sizes", "context", "quantization")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from trtspec.doctor import BACKENDS

    parser.add_argument(
        "config", help="a YAML config; or a model folder, config.json, hub id or package:NAME"
    )
    parser.add_argument(
        "--explain", action="store_true", help="show the curve, the candidates and what decided"
    )
    parser.add_argument("--plot", type=_picture, metavar="FILE", help="draw the curve (png, svg or pdf)")
    parser.add_argument(
        "--measured", type=Path, metavar="RUN", help="use acceptance and step times of this run"
    )
    parser.add_argument(
        "--probe", type=Path, metavar="BUILD", help="first time the engine of this build on this machine"
    )
    parser.add_argument(
        "--save-probe", type=Path, metavar="FILE", help="write the probe's times, for --measured FILE later"
    )
    config = parser.add_argument_group("with a config")
    config.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", help="override a field; repeatable"
    )
    bare = parser.add_argument_group("with a bare model")
    bare.add_argument("--device", help="hardware to plan for; default: h200-sxm")
    bare.add_argument(
        "--backend", choices=BACKENDS, help="default: tensorrt_llm on a GPU, onnxruntime on a CPU"
    )
    bare.add_argument("--method", help="default: auto, which ranks all of them")
    bare.add_argument("--quantization", help="default: none")
    bare.add_argument(
        "--tensor-parallel", type=_positive, metavar="N", help="default: the smallest that fits"
    )
    bare.add_argument("--batch-sizes", type=_positive, nargs="+", metavar="B", help="default: 1 8 32")
    bare.add_argument("--context", type=_positive, metavar="TOKENS", help="default: 4096")


def run(arguments: argparse.Namespace, _context: Context) -> Outcome:
    from trtspec.plan.explain import explain

    given = {name: value for name in _BARE_OPTIONS if (value := getattr(arguments, name)) is not None}
    is_config = Path(arguments.config).suffix in (".yaml", ".yml")
    plan = _of_config(arguments, given) if is_config else _of_bare_model(arguments, given)
    lines = [explain(plan)] if arguments.explain else list(_brief(plan))
    if arguments.plot:
        _draw(plan, arguments.plot)
        lines.append(f"{arguments.plot}: written")
    return Outcome(plan.as_json(), "\n".join(lines))


def _brief(plan: Plan) -> Iterator[str]:
    from trtspec.plan.explain import summary

    yield summary(plan)
    steps = [f"up to batch {batch}: D = {length}" for batch, length in plan.schedule.as_json().items()]
    if len(steps) > 1:
        yield f"schedule: {', '.join(steps)}"
    yield from (f"warning: {text}" for text in plan.warnings)
    yield "--explain shows the curve, the candidates and what would change the decision"


def _draw(plan: Plan, path: Path) -> None:
    from trtspec.plan.plot import plot_plan

    try:
        plot_plan(plan, path)
    except OSError as error:
        hint = "name a file in a folder that exists and that you may write"
        raise ConfigError(f"--plot: {error.strerror}", where=str(path), hint=hint) from error


def _picture(text: str) -> Path:
    """A file name whose suffix names a format that can be drawn."""
    if (path := Path(text)).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text}: the name must end in .png, .svg or .pdf")
    return path


def _of_config(arguments: argparse.Namespace, given: Mapping[str, Any]) -> Plan:
    from trtspec.config import load_config
    from trtspec.models import find_configs
    from trtspec.pipeline import plan_config
    from trtspec.store import default_root

    if given:
        option = "--" + next(iter(given)).replace("_", "-")
        raise ConfigError(
            f"{option} is for bare models", where="command line", hint="use --set with a config"
        )
    config = load_config(arguments.config, arguments.set)
    with find_configs(config, default_root()) as configs:
        return plan_config(config, configs, _measured(arguments))


def _of_bare_model(arguments: argparse.Namespace, given: Mapping[str, Any]) -> Plan:
    from trtspec.checkpoints.facts import read_facts
    from trtspec.models import find_config
    from trtspec.plan import plan_bare
    from trtspec.store import default_root

    if arguments.method:
        _known_method(arguments.method)
    if arguments.set:
        hint = "use --device, --method and the others, or write a config: trtspec init"
        raise ConfigError("--set is for configs, and this is a bare model", where="command line", hint=hint)
    with find_config(arguments.config, default_root()) as config:
        return plan_bare(read_facts(config), measured=_measured(arguments), **given)


def _known_method(method: str) -> None:
    from trtspec.drafters.catalog import DRAFTERS

    known = ["auto", "none", *(spec.method for spec in DRAFTERS)]
    if method not in known:
        near = difflib.get_close_matches(method, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"methods: {', '.join(known)}"
        raise ConfigError(f"--method: there is no method {method!r}", where="command line", hint=hint)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return value


def _measured(arguments: argparse.Namespace) -> Measured | None:
    """What --measured and --probe say: acceptance from the run, step times from the probe where there is one."""
    from trtspec.plan.measured import Measured, read_measured

    measured = read_measured(arguments.measured) if arguments.measured else None
    if not arguments.probe:
        if arguments.save_probe:
            raise ConfigError("--save-probe without --probe", where="command line", hint="add --probe BUILD")
        return measured
    probe = _probe(arguments.probe)
    if arguments.save_probe:
        from trtspec.files import pretty_json, write_atomic

        write_atomic(arguments.save_probe, pretty_json(probe.as_json()))
    timed = Measured(f"probe of {arguments.probe}", steps=probe.table)
    return replace(measured, steps=probe.table, includes_drafting=False) if measured else timed


def _probe(build: Path) -> ProbeResult:
    """Time the engine of a build with the threads it will have."""
    from trtspec.engines.opening import open_engine
    from trtspec.plan.probe import ProbeResult, machine_name, probe_engine, probe_memory_bandwidth

    threads = len(os.sched_getaffinity(0))
    engine = open_engine(build / "engine", max_batch=1, threads=threads)
    try:
        table = probe_engine(engine)
    finally:
        engine.close()
    return ProbeResult(machine_name(), threads, probe_memory_bandwidth(threads), table)
