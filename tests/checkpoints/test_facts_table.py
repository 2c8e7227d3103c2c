"""Every published configuration of the shared collection gives the answer that its README tabulates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trtspec.checkpoints.facts import ArchitectureFacts, read_facts
from trtspec.checkpoints.heads import HeadFacts, inspect_model, read_head

COLLECTION = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "model_configs"


def _rows(section: str) -> list[dict[str, str]]:
    """The rows of a README table as name → cell."""
    if not (COLLECTION / "README.md").is_file():
        return []
    text = (COLLECTION / "README.md").read_text(encoding="utf-8")
    body = text.split(f"## {section}", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in body.splitlines() if line.startswith("|")]
    names = [cell.strip() for cell in lines[0].strip("|").split("|")]
    return [dict(zip(names, (cell.strip() for cell in line.strip("|").split("|")))) for line in lines[2:]]


TARGETS, HEADS = _rows("Target models"), _rows("Draft heads and drafters")
pytestmark = pytest.mark.skipif(not TARGETS, reason="the shared configurations are not beside this checkout")
# In the table the sliding layers' ratio stands; the full layers' larger one binds, as the row's note says.
BINDING = {"nvidia--Gemma-4-31B-IT-NVFP4": (8, 15, [8, 8, 8, 4])}
PARAMETERS = {
    "meta-llama--Meta-Llama-3.1-8B": 8_030_261_248,
    "meta-llama--Meta-Llama-3.1-70B": 70_553_706_496,
    "meta-llama--Meta-Llama-3.1-405B": 405_853_388_800,
    "meta-llama--Llama-3.2-1B-Instruct": 1_235_814_400,
    "HuggingFaceTB--SmolLM2-135M": 134_515_008,
    "Qwen--Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen--Qwen3-8B": 8_190_735_360,
    "Qwen--Qwen3-0.6B": 596_049_920,
    "Qwen--Qwen3-30B-A3B": 30_532_122_624,
    "mistralai--Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai--Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "ibm-granite--granite-3.0-2b-instruct": 2_533_531_648,
    "google--gemma-3-270m": 268_098_176,
}
# Totals and active parameters as their makers round them, in billions.
ROUNDED = {
    "deepseek-ai--DeepSeek-V3": (671, 37),
    "deepseek-ai--DeepSeek-V2-Lite": (15.7, 2.4),
    "moonshotai--Kimi-K2-Instruct": (1026, 32),
    "Qwen--Qwen3-235B-A22B": (235, 22),
    "Qwen--Qwen3-Coder-480B-A35B-Instruct": (480, 35),
    "openai--gpt-oss-120b": (116.8, 5.1),
    "openai--gpt-oss-20b": (20.9, 3.6),
    "MiniMaxAI--MiniMax-M2.5": (229, 10),
    "zai-org--GLM-4.7": (353, 32),
    "mistralai--Mixtral-8x22B-v0.1": (141, 39),
}


def _read(name: str) -> ArchitectureFacts:
    return read_facts(COLLECTION / f"{name}.json")


def test_no_file_is_left_out_of_the_table() -> None:
    named = {row["model"] for row in TARGETS} | {row["head"] for row in HEADS}
    assert named == {path.stem for path in COLLECTION.glob("*.json")}


@pytest.mark.parametrize("row", TARGETS, ids=lambda row: row["model"])
def test_group_and_draft_length(row: dict[str, str]) -> None:
    name = row["model"]
    facts = _read(name)
    result = facts.as_json()
    group = int(re.match(r"\d+", row["G"]).group())
    length = int(re.search(r"(\d+)$", row["D=128/G-1"]).group())
    ranks = [None if cell == "-" else int(cell) for cell in row["G per rank at TP 1/2/4/8"].split(" / ")]
    group, length, ranks = BINDING.get(name, (group, length, ranks))
    assert result["group"] == group
    assert result["tile_draft_length"]["128"] == length
    assert list(result["tensor_parallel"].values()) == ranks
    assert result["tile_exact"] == (128 % group == 0)
    assert result["model_type"] == (None if row["type"] == "None" else row["type"])
    assert result["vocab_size"] == (None if row["vocab"] == "None" else int(row["vocab"]))
    assert any("not a power of two" in w for w in facts.warnings) == bool(group & (group - 1))


@pytest.mark.parametrize("row", TARGETS, ids=lambda row: row["model"])
def test_layer_kinds(row: dict[str, str]) -> None:
    facts = _read(row["model"])
    counts: dict[str, int] = {}
    for shape in facts.attention:
        counts[shape.kind] = counts.get(shape.kind, 0) + shape.layers
    assert sum(counts.values()) == facts.layers
    named = {kind: int(count) for kind, count in re.findall(r"([a-z_]+) (\d+)", row["layers"])}
    if "window" in named:
        assert any(shape.window == named["window"] for shape in facts.attention)
        return
    kinds = {
        "full_attention": "full",
        "attention": "full",
        "sliding_attention": "sliding",
        "linear_attention": "linear",
    }
    kinds |= {"mamba": "linear", "moe": "none", "mlp": "none"}
    expected: dict[str, int] = {}
    for kind, count in named.items():
        expected[kinds[kind]] = expected.get(kinds[kind], 0) + count
    if expected:
        assert counts == expected
    elif "chunked attention" in row["what breaks / notes"]:
        assert counts == {"sliding": 36, "full": 12}  # the class default: every fourth layer is full
    else:
        assert set(counts) == {"mla"} if "MLA" in row["G"] else {"full"}


@pytest.mark.parametrize("row", TARGETS, ids=lambda row: row["model"])
def test_mtp_layers(row: dict[str, str]) -> None:
    found = re.search(r"=(\d+)", row["MTP keys"])
    assert _read(row["model"]).mtp_layers == (int(found.group(1)) if found else 0)


@pytest.mark.parametrize("row", TARGETS, ids=lambda row: row["model"])
def test_what_breaks_is_said(row: dict[str, str]) -> None:
    note, warnings = row["what breaks / notes"], " ".join(_read(row["model"]).warnings)
    for noted, said in (
        ("needs state rollback", "roll back"),
        ("all query heads share one latent KV", "share one latent KV"),
        ("formula gives D=0", "a warning, not a refusal"),
        ("sparse/indexer attention", "sparse attention"),
        ("differs from hidden", "differ from the hidden size"),
    ):
        if noted in note:
            assert said in warnings


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items(), ids=PARAMETERS)
def test_parameters_to_the_last_one(name: str, parameters: int) -> None:
    assert _read(name).parameters == parameters


@pytest.mark.parametrize(("name", "rounded"), ROUNDED.items(), ids=ROUNDED)
def test_total_and_active_parameters_of_mixtures(name: str, rounded: tuple[float, float]) -> None:
    facts = _read(name)
    assert facts.parameters == pytest.approx(rounded[0] * 1e9, rel=0.01)
    assert facts.weights.active_parameters == pytest.approx(rounded[1] * 1e9, rel=0.08)


@pytest.mark.parametrize(
    "name", ["Qwen--Qwen3-Next-80B-A3B-Instruct", "zai-org--GLM-4.5", "google--gemma-2-9b"]
)
def test_trimmed_files_say_what_they_lack(name: str) -> None:
    facts = _read(name)
    assert facts.parameters is None
    assert facts.weights is None
    assert any("does not state" in w for w in facts.warnings)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen--Qwen3.5-35B-A3B",
        "meta-llama--Llama-4-Maverick-17B-128E-Instruct",
        "deepseek-ai--DeepSeek-V4-Flash",
    ],
)
def test_sizes_that_rest_on_a_class_default_are_not_given_as_facts(name: str) -> None:
    facts = _read(name)
    assert facts.parameters is None
    assert facts.weights is not None
    assert facts.weights.assumed


def test_bytes_follow_the_quantization_module_by_module() -> None:
    kimi = _read("moonshotai--Kimi-K2.5")  # 4-bit routed experts, the rest excluded by regular expressions
    experts, attention = kimi.weights.of("expert"), kimi.weights.of("attention")
    assert experts.bytes / experts.parameters == pytest.approx(0.5 + 2 / 32)
    assert attention.bytes / attention.parameters == 2.0
    gemma = _read("nvidia--Gemma-4-31B-IT-NVFP4")  # attention excluded layer by layer, FP8 cache
    assert gemma.weights.of("attention").bytes == 2.0 * gemma.weights.of("attention").parameters
    assert gemma.weights.of("ffn").bytes / gemma.weights.of("ffn").parameters == pytest.approx(0.5625)
    assert gemma.kv_dtype == "fp8"
    gpt_oss = _read("openai--gpt-oss-120b")  # MXFP4 experts only
    assert gpt_oss.weights.bytes == pytest.approx(65.2e9, rel=0.01)
    deepseek = _read("deepseek-ai--DeepSeek-R1")
    assert deepseek.weights.bytes == pytest.approx(672e9, rel=0.01)


def test_cache_of_latent_attention_is_the_latent() -> None:
    assert _read("deepseek-ai--DeepSeek-V3").as_json()["kv_bytes_per_token"] == 61 * (512 + 64) * 2


@pytest.mark.parametrize("row", HEADS, ids=lambda row: row["head"])
def test_heads(row: dict[str, str]) -> None:
    path = COLLECTION / f"{row['head']}.json"
    found = inspect_model(path)
    result = found.as_json()
    head = found if isinstance(found, HeadFacts) else read_head(path)
    number = re.compile(r"\d+")
    assert head.hidden_size == (None if row["hidden"] == "None" else int(row["hidden"]))
    if row["G"] not in ("-", "None"):
        assert result["group"] == int(row["G"])
        assert result["layers"] == int(row["layers"])
        assert result["attention"][0]["heads"] == int(row["H"])
        assert result["attention"][0]["kv_heads"] == int(number.findall(row["KV"])[-1])
    draft = row["draft vocab / medusa"]
    if "medusa" in draft:
        assert (head.heads, head.medusa_layers) == tuple(map(int, number.findall(draft)))
        assert head.method == "medusa"
    else:
        assert head.draft_vocab_size == (None if draft == "-" else int(draft))
    ids = tuple(map(int, number.findall(row["aux or target layer ids"])))
    assert head.captured == (ids or None)
    if row["max_pos"] != "None":
        assert result["max_position_embeddings"] == int(row["max_pos"])


METHODS = {
    "eagle3": "eagle3",
    "peagle": "p_eagle",
    "dflash": "dflash",
    "dspark": "dspark",
    "medusa": "medusa",
}


@pytest.mark.parametrize("row", HEADS, ids=lambda row: row["head"])
def test_head_methods(row: dict[str, str]) -> None:
    """EAGLE-1 heads look like a one-layer Llama: that is said, not guessed, unless the layout names it."""
    name = row["head"].lower()
    method = next((value for part, value in METHODS.items() if part in name), None)
    head = read_head(COLLECTION / f"{row['head']}.json")
    if method is None:
        assert head.method == ("eagle" if row["note"] == "nested layout" else None)
        assert head.method or any("does not tell" in w for w in head.warnings)
    else:
        assert head.method == method
