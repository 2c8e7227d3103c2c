"""Tokenizers built on the spot: one BOS, templates as transformers renders them, streamed text equal to
decoded text.
"""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from trtspec.checkpoints.tokenizer import TextTokenizer
from trtspec.errors import SetupError

BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level():
    """Every byte, a few merges, added tokens special and not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "d"), ("l", "l"), ("Ð", "ĸ"), ("ð", "Ł"), ("ĺ", "Ģ")]
    vocab = {c: i for i, c in enumerate([*alphabet, *("".join(m) for m in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|turn|>"])
    backend.add_tokens([AddedToken("<tool> é"), AddedToken("  ")])
    return backend


def sentencepiece(decoder=None):
    """Llama 2's layout: ▁ for spaces, byte tokens, one leading space stripped."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁▁",
        "Ж",
        "▁Жb",
    ]
    backend = Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    backend.decoder = decoder or decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def adding_bos(backend):
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def folder(path, backend, *, files=None, **config):
    backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in (files or {}).items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


USER = [{"role": "user", "content": "hello"}]


# -- one BOS


@pytest.mark.parametrize("adds", [False, True], ids=["tokenizer adds none", "tokenizer adds it too"])
def test_a_chat_has_one_bos_though_the_template_renders_it_too(tmp_path, adds):
    backend = adding_bos(byte_level()) if adds else byte_level()
    tokenizer = TextTokenizer.load(folder(tmp_path, backend, chat_template=BOS_TEMPLATE))
    ids = tokenizer.chat(USER)
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1
    assert tokenizer.decode(ids) == "[user]hello[assistant]"


def test_a_chat_gets_the_bos_its_template_forgot_if_the_tokenizer_adds_one(tmp_path):
    bare = BOS_TEMPLATE.replace("{{ bos_token }}", "")
    tokenizer = TextTokenizer.load(folder(tmp_path, adding_bos(byte_level()), chat_template=bare))
    assert tokenizer.chat(USER)[:2] == [tokenizer.bos_id, tokenizer.encode("[")[1]]


def test_a_template_that_renders_bos_twice_is_reduced_to_one(tmp_path):
    tokenizer = TextTokenizer.load(folder(tmp_path, byte_level(), chat_template="<s>" + BOS_TEMPLATE))
    assert tokenizer.chat(USER).count(tokenizer.bos_id) == 1


def test_a_raw_prompt_keeps_the_tokenizers_own_bos_once(tmp_path):
    tokenizer = TextTokenizer.load(folder(tmp_path, adding_bos(byte_level())))
    for text in ("hello", "<s>hello"):
        ids = tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_id
        assert ids.count(tokenizer.bos_id) == 1
        assert tokenizer.decode(ids) == "hello"


def test_a_raw_prompt_of_a_model_without_bos_gets_none(tmp_path):
    tokenizer = TextTokenizer.load(folder(tmp_path, byte_level(), bos_token=None))
    assert tokenizer.bos_id is None
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert len(tokenizer.encode("h")) == 1


@pytest.mark.parametrize("setting", [True, False])
@pytest.mark.parametrize("saved", [True, False])
def test_an_explicit_setting_wins_over_the_saved_post_processor(tmp_path, setting, saved):
    backend = adding_bos(byte_level()) if saved else byte_level()
    tokenizer = TextTokenizer.load(folder(tmp_path, backend, add_bos_token=setting))
    assert (tokenizer.encode("hello")[0] == tokenizer.bos_id) == setting


# -- stop ids and special ids


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [7, 9]}, "config.json": {"eos_token_id": 3}}, (7, 9)),
        ({"generation_config.json": {"eos_token_id": 7}}, (7,)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": [3]}}, (3,)),
        ({"config.json": {"text_config": {"eos_token_id": 4}}}, (4,)),
        ({}, None),
    ],
)
def test_stop_ids_come_from_the_generation_config_first(tmp_path, files, expected):
    tokenizer = TextTokenizer.load(folder(tmp_path, byte_level(), files=files))
    assert tokenizer.stop_ids == (expected or (tokenizer.encode("</s>")[0],))


def test_control_tokens_are_special_and_added_words_are_not(tmp_path):
    tokenizer = TextTokenizer.load(folder(tmp_path, byte_level()))
    ids = {text: tokenizer.encode(text)[0] for text in ("<s>", "</s>", "<|turn|>", "<tool> é")}
    assert tokenizer.special_ids == {ids["<s>"], ids["</s>"], ids["<|turn|>"]}
    assert tokenizer.vocab_size == max(ids.values()) + 2


def test_a_saved_truncation_does_not_cut_prompts(tmp_path):
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    tokenizer = TextTokenizer.load(folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert len(tokenizer.encode("h")) == 1


# -- templates


def render(path, messages=USER, **args):
    tokenizer = TextTokenizer.load(path)
    return tokenizer.decode(tokenizer.chat(messages, **args))


def test_the_template_file_wins_over_the_config(tmp_path):
    path = folder(tmp_path, byte_level(), chat_template="config", files={"chat_template.jinja": "file"})
    assert render(path) == "file"


def test_named_templates_and_tools(tmp_path):
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"},
    ]
    path = folder(tmp_path, byte_level(), chat_template=named)
    assert render(path) == "plain"
    assert render(path, tools=[{"name": "<é>"}]) == '[{"name": "<é>"}]'


def test_additional_templates_next_to_the_file(tmp_path):
    files = {"chat_template.jinja": "plain", "additional_chat_templates/tool_use.jinja": "tools"}
    path = folder(tmp_path, byte_level(), files=files)
    assert (render(path), render(path, tools=[{}])) == ("plain", "tools")


def test_what_templates_use(tmp_path):
    template = (
        "{%- for m in messages -%}\n    {%- if loop.index > 1 %}{% break %}{% endif -%}\n"
        "{% generation %}{{ m.content | trim }}{% endgeneration %}{%- endfor -%}"
        "|{{ strftime_now('%Y') | length }}|{{ {'b': 1, 'a': '<'} | tojson(indent=1) }}|{{ thinking }}"
    )
    path = folder(tmp_path, byte_level(), chat_template=template)
    messages = [{"role": "user", "content": " x "}, {"role": "user", "content": "never"}]
    assert render(path, messages, thinking=False) == 'x|4|{\n "b": 1,\n "a": "<"\n}|False'


def test_a_template_can_refuse_and_cannot_reach_out(tmp_path):
    path = folder(tmp_path, byte_level(), chat_template="{{ raise_exception('system role not supported') }}")
    with pytest.raises(ValueError, match="system role not supported"):
        TextTokenizer.load(path).chat(USER)
    for attack in (
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
    ):
        path = folder(tmp_path, byte_level(), chat_template=attack)
        with pytest.raises(ValueError, match="refuses"):
            TextTokenizer.load(path).chat(USER)


def test_no_template_is_said_so(tmp_path):
    with pytest.raises(ValueError, match="no default chat template"):
        TextTokenizer.load(folder(tmp_path, byte_level())).chat(USER)


# -- decoding


def streamed(tokenizer, ids):
    text = tokenizer.stream()
    return "".join([*(text.push(i) for i in ids), text.finish()])


BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece()
GEMMA = sentencepiece(
    decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
)


def opened(backend, tmp):
    return TextTokenizer.load(folder(tmp, backend))


@pytest.fixture(
    scope="module", params=[BYTE_LEVEL, SENTENCEPIECE, GEMMA], ids=["byte-level", "llama", "gemma"]
)
def vocabulary(request, tmp_path_factory):
    return opened(request.param, tmp_path_factory.mktemp("tokenizer"))


@given(data=st.data())
def test_streamed_text_equals_decoded_text_for_any_ids(vocabulary, data):
    some = st.integers(0, vocabulary.vocab_size + 2)  # and ids nothing knows
    ids = data.draw(st.lists(some | st.sampled_from(vocabulary.encode("Ж 😀 a")), max_size=30))
    assert streamed(vocabulary, ids) == vocabulary.decode(ids)


@given(text=st.text(max_size=20))
def test_text_comes_back_through_ids_and_stream(vocabulary, text):
    ids = vocabulary.encode(text)
    assert streamed(vocabulary, ids) == vocabulary.decode(ids)
    if vocabulary._decoding[0] == "bytes" and not any(mark in text for mark in ("<s>", "</s>", "<|turn|>")):
        assert vocabulary.decode(ids) == text


def test_an_unknown_kind_of_decoder_still_streams(tmp_path):
    tokenizer = opened(sentencepiece(decoders.Metaspace()), tmp_path)
    a, space_a, b = (tokenizer._backend.token_to_id(t) for t in ("a", "▁a", "b"))
    assert tokenizer._decoding[0] == "window"
    assert (
        streamed(tokenizer, [space_a, b, space_a, a]) == "ab aa" == tokenizer.decode([space_a, b, space_a, a])
    )


# -- opening


def test_folders_without_a_tokenizer_say_what_to_do(tmp_path):
    with pytest.raises(SetupError, match="save_pretrained"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SetupError, match="not a tokenizer"):
        TextTokenizer.load(tmp_path)


def test_opening_one_imports_no_model_library(tmp_path):
    path = folder(tmp_path, byte_level(), chat_template=BOS_TEMPLATE)
    code = (
        "import sys, pathlib\nfrom trtspec.checkpoints.tokenizer import TextTokenizer\n"
        "assert 'tokenizers' not in sys.modules and 'jinja2' not in sys.modules\n"
        f"TextTokenizer.load(pathlib.Path({str(path)!r})).chat({USER!r})\n"
        "print([m for m in ('torch', 'transformers', 'onnxruntime') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
