"""What prompts a data set yields, and what it refuses."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models

from pypto_serving.bench.datasets import (
    FileData,
    PrefixRepetitionData,
    Prompt,
    PromptVocabulary,
    RandomData,
    as_completion,
    as_messages,
)
from pypto_serving.errors import ConfigError

VOCABULARY = PromptVocabulary.of_size(1000)


@pytest.fixture
def tokenizer_dir(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_random_prompts_have_the_asked_lengths_and_share_the_prefix():
    data = RandomData(input_len=20, output_len=10, range_ratio=0.5, prefix_len=4)
    prompts = data.prompts(200, 0, VOCABULARY)
    assert {p.input_len for p in prompts} <= set(range(14, 35)) and len({p.input_len for p in prompts}) > 10
    assert {p.output_len for p in prompts} <= set(range(5, 16))
    assert all(len(p.content) == p.input_len for p in prompts)
    assert len({tuple(p.content[:4]) for p in prompts}) == 1
    assert len({tuple(p.content[4:]) for p in prompts}) == 200


def test_random_prompts_depend_on_seed_and_index_only():
    data = RandomData(input_len=8)
    assert data.prompts(3, 5, VOCABULARY) == data.prompts(9, 5, VOCABULARY)[:3]
    assert data.prompts(3, 5, VOCABULARY) != data.prompts(3, 6, VOCABULARY)


def test_random_lengths_never_reach_zero():
    prompts = RandomData(input_len=1, output_len=1, range_ratio=0.9).prompts(50, 0, VOCABULARY)
    assert min(p.input_len for p in prompts) == min(p.output_len for p in prompts) == 1


def test_prefixes_repeat_in_turn():
    data = PrefixRepetitionData(prefix_len=6, suffix_len=3, num_prefixes=2, output_len=5)
    prompts = data.prompts(6, 0, VOCABULARY)
    prefixes = [tuple(p.content[:6]) for p in prompts]
    assert prefixes[0::2] == [prefixes[0]] * 3 and prefixes[1::2] == [prefixes[1]] * 3
    assert prefixes[0] != prefixes[1]
    assert len({tuple(p.content[6:]) for p in prompts}) == 6
    assert all((p.input_len, p.output_len) == (9, 5) for p in prompts)


def test_more_prefixes_than_prompts_are_refused():
    with pytest.raises(ConfigError, match="--num-prompts 3 is below --prefix-repetition-num-prefixes 10"):
        PrefixRepetitionData().prompts(3, 0, VOCABULARY)


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (RandomData, {"input_len": 0}, "--random-input-len must be at least 1, got 0"),
        (RandomData, {"output_len": -1}, "--random-output-len must be at least 1, got -1"),
        (RandomData, {"prefix_len": -1}, "--random-prefix-len must be at least 0, got -1"),
        (RandomData, {"range_ratio": 1.5}, r"--random-range-ratio must be in \[0, 1\), got 1.5"),
        (RandomData, {"range_ratio": float("nan")}, "--random-range-ratio .* got nan"),
        (PrefixRepetitionData, {"prefix_len": 0}, "--prefix-repetition-prefix-len must be at least 1"),
        (PrefixRepetitionData, {"suffix_len": -1}, "--prefix-repetition-suffix-len must be at least 0"),
        (PrefixRepetitionData, {"num_prefixes": 0}, "--prefix-repetition-num-prefixes must be at least 1"),
        (PrefixRepetitionData, {"output_len": 0}, "--prefix-repetition-output-len must be at least 1"),
    ],
)
def test_senseless_lengths_are_refused(data, arguments, message):
    with pytest.raises(ConfigError, match=message):
        data(**arguments)


def write_rows(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_file_rows(tmp_path):
    path = write_rows(
        tmp_path / "rows.jsonl",
        {"prompt": "hello", "output_tokens": 3},
        {"prompt_token_ids": [1, 2], "max_tokens": 4},
        {"messages": [{"role": "user", "content": "hi"}]},
    )
    assert FileData(path=path, output_len=9).rows() == [
        Prompt("hello", None, 3),
        Prompt([1, 2], 2, 4),
        Prompt([{"role": "user", "content": "hi"}], None, 9),
    ]


def test_file_prompts_are_shuffled_by_seed_and_repeat(tmp_path):
    data = FileData(path=write_rows(tmp_path / "rows.jsonl", *({"prompt": str(i)} for i in range(10))))
    prompts = data.prompts(25, 1, None)
    assert prompts == data.prompts(25, 1, None) and prompts[:10] != data.prompts(10, 2, None)
    assert prompts[:5] == prompts[10:15] == prompts[20:]
    assert sorted(p.content for p in prompts[:10]) == [str(i) for i in range(10)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{oops", "line 1: JSON is malformed"),
        ('{"prompt": "a"}\n{"prompt": 3}', r"line 2: Expected `str"),
        ('{"text": "a"}', "line 1: needs exactly one non-empty prompt, messages or prompt_token_ids"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "line 1: needs exactly one"),
        ('{"prompt": "a", "output_tokens": 0}', "line 1: output_tokens must be at least 1, got 0"),
    ],
)
def test_bad_files_are_refused_with_the_line(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        FileData(path=path).rows()


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        FileData(path=tmp_path / "none.jsonl").rows()


def test_vocabulary_of_a_tokenizer_leaves_special_tokens_out(tokenizer_dir):
    assert PromptVocabulary.of_tokenizer(tokenizer_dir).ids.tolist() == [0, 1, 2]
    assert PromptVocabulary.of_tokenizer(tokenizer_dir / "tokenizer.json").ids.tolist() == [0, 1, 2]


def test_bad_tokenizers_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        PromptVocabulary.of_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot read"):
        PromptVocabulary.of_tokenizer(tmp_path)


def test_chat_needs_text(tokenizer_dir):
    tokenizer = PromptVocabulary.of_tokenizer(tokenizer_dir).tokenizer
    ids, text = Prompt([0, 1], 2, 5), Prompt("hi", None, 5)
    assert as_messages(text, None).content == [{"role": "user", "content": "hi"}]
    decoded = as_messages(ids, tokenizer)
    assert decoded == Prompt([{"role": "user", "content": "a b"}], None, 5)
    with pytest.raises(ConfigError, match="give --tokenizer DIR"):
        as_messages(ids, None)


def test_completions_refuse_messages():
    assert as_completion(Prompt([1], 1, 1)) == Prompt([1], 1, 1)
    with pytest.raises(ConfigError, match="--backend openai-chat"):
        as_completion(Prompt([{"role": "user", "content": "hi"}], None, 1))
