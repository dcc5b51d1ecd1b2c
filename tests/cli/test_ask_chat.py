"""kvfold ask and kvfold chat: answers from a saved cache, and what they refuse."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .conftest import TEXT, save_model


def expected_answer(folder, question: str, count: int) -> str:
    """What the model itself answers, greedily, given document and question in one prompt."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = f"{TEXT.strip()}\n\n{question}"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**prompt, max_new_tokens=count, do_sample=False)
    return tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def test_answers_are_the_models_own(kvfold, saved, model_folder):
    questions = ["What colour is the lamp?", "Who lit it?"]
    result = kvfold("ask", saved, *questions, "--json", "--max-new-tokens", "12")
    assert result.exit_code == 0, result.output
    answers = json.loads(result.stdout)
    assert [answer["question"] for answer in answers] == questions
    for answer in answers:
        # Each question is asked of the document alone, so the second does not see the first.
        assert answer["answer"] == expected_answer(model_folder, answer["question"], 12)
        assert 1 <= answer["tokens"] <= 12
        assert answer["tokens"] == 1 or answer["tokens_per_second"] > 0


def test_streams_for_humans(kvfold, saved):
    one = kvfold("ask", saved, "What colour is the lamp?", "--max-new-tokens", "8")
    two = kvfold("ask", saved, "What colour is the lamp?", "Who lit it?", "--max-new-tokens", "8")
    told = json.loads(
        kvfold("ask", saved, "What colour is the lamp?", "--max-new-tokens", "8", "--json").stdout
    )
    assert one.exit_code == two.exit_code == 0
    assert one.stdout.strip() == told[0]["answer"]
    assert two.stdout.startswith("> What colour is the lamp?\n")
    assert "> Who lit it?\n" in two.stdout


def test_a_model_without_a_chat_template(kvfold, document, base_folder):
    kvfold("fold", document, "--model", base_folder, "--method", "full")
    result = kvfold("ask", "lamp.kvf", "What colour?", "--json", "--max-new-tokens", "8")
    assert result.exit_code == 0, result.output
    assert "\n\n" not in json.loads(result.stdout)[0]["answer"]


def test_a_moved_model_is_named_again(kvfold, document, tmp_path):
    here = save_model(tmp_path / "here")
    kvfold("fold", document, "--model", here, "--method", "full")
    here.rename(tmp_path / "there")
    lost = kvfold("ask", "lamp.kvf", "What colour?")
    assert lost.exit_code == 2
    found = kvfold("ask", "lamp.kvf", "What colour?", "--model", tmp_path / "there", "--max-new-tokens", "2")
    assert found.exit_code == 0, found.output


def test_refuses_another_model(kvfold, saved, base_folder):
    result = kvfold("ask", saved, "What colour?", "--model", base_folder)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.kvf", "Why?"], "missing.kvf"),
        (["text.kvf", "Why?"], "text.kvf"),
        (["short.kvf", "Why?"], "short.kvf"),
        (["lamp.kvf", " "], "the question is empty"),
        (["lamp.kvf"], "QUESTION"),
        (["lamp.kvf", "Why?", "--max-new-tokens", "0"], "max-new-tokens"),
        (["lamp.kvf", "Why?", "--device", "tpu"], "choose from"),
        (["lamp.kvf", "word " * 100], "no room for the question"),
    ],
)
def test_bad_input(kvfold, saved, tmp_path, arguments, message):
    (tmp_path / "text.kvf").write_text(TEXT)
    (tmp_path / "short.kvf").write_bytes(saved.read_bytes()[:-100])
    (tmp_path / "lamp.kvf").write_bytes(saved.read_bytes())
    result = kvfold("ask", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_chat_remembers(kvfold, saved, model_folder):
    result = kvfold(
        "chat", saved, "--max-new-tokens", "6", stdin="What colour is it?\n\nWho lit it?\n/quit\nlost\n"
    )
    assert result.exit_code == 0, result.output
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model_folder),
        AutoTokenizer.from_pretrained(model_folder),
    )
    ids = tokenizer(f"<s>user\n{TEXT.strip()}", add_special_tokens=False)["input_ids"]
    expected = []
    for question in ("\n\nWhat colour is it?", "</s>\n<s>user\nWho lit it?"):
        ids = ids + tokenizer(f"{question}</s>\n<s>assistant\n", add_special_tokens=False)["input_ids"]
        out = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :].tolist()
        out = [token for token in out if token != model.config.eos_token_id]
        expected.append(tokenizer.decode(out, skip_special_tokens=True).strip())
        ids = ids + out
    assert result.stdout.strip() == "\n".join(expected).strip()


def test_chat_ends_with_its_input(kvfold, saved):
    result = kvfold("chat", saved, "--max-new-tokens", "2", stdin="What colour?")
    assert result.exit_code == 0, result.output
    assert kvfold("chat", saved, stdin="").stdout == ""


def test_chat_says_when_the_context_is_full(kvfold, saved):
    result = kvfold("chat", saved, "--max-new-tokens", "100", stdin="Tell me all of it.\n" * 9)
    assert result.exit_code == 2
    assert "start a new chat" in result.stderr
