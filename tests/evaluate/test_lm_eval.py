"""lm-evaluation-harness on a folded cache, on tasks whose data is local."""

import gc
import json
import subprocess
import sys

import pytest
import torch

import kvfold
from kvfold.errors import BudgetError, KvfoldError, UnsupportedModelError
from tests.tiny import VOCAB, tiny_model

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra lm-eval)")
tokenizers = pytest.importorskip("tokenizers")

import lm_eval  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from kvfold.evaluate.lm_eval import FoldedLM  # noqa: E402
from kvfold.hf import CACHE_KEYWORD  # noqa: E402

METHOD = kvfold.RDKV(keep=0.3)


@pytest.fixture(scope="module")
def tokenizer():
    vocab = {"<pad>": 0, "<eos>": 1, "<bos>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
    fast.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}w7 {{ m['content'] }} w8 {% endif %}{% endfor %}"
    )
    return fast


def words(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{i}" for i in torch.randint(3, VOCAB, (tokens,), generator=generator).tolist())


def ids_of(text):
    return [int(word[1:]) for word in text.split()]


@pytest.fixture
def folded(tokenizer):
    return FoldedLM(pretrained=tiny_model("llama"), tokenizer=tokenizer, method=METHOD, batch_size=3)


@pytest.fixture
def plain(tokenizer):
    return HFLM(pretrained=tiny_model("llama"), tokenizer=tokenizer, batch_size=3)


def ask(kind, *arguments):
    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


@torch.no_grad()
def direct(prompt, continuation, method=METHOD, unseen=1):
    """Log-likelihood token by token from a folded cache, and whether each token is the preferred one."""
    model = tiny_model("llama")
    cache = kvfold.fold(model, torch.tensor([prompt[:-unseen]]), method)
    total, greedy = 0.0, True
    for token in prompt[-unseen:-1]:
        model(input_ids=torch.tensor([[token]]), **{CACHE_KEYWORD: cache})
    last = prompt[-1]
    for token in continuation:
        logits = model(input_ids=torch.tensor([[last]]), **{CACHE_KEYWORD: cache}).logits[0, -1].double()
        total += float(logits[token] - logits.exp().sum().log())
        greedy &= int(logits.argmax()) == token
        last = token
    return total, greedy


def test_loglikelihood_is_of_the_folded_cache(folded, plain):
    contexts = [words(90, 0), words(70, 1)]
    continuations = [" w5", " w9 w10 w11", " w20 w21"]
    requests = ask(
        "loglikelihood", *((context, continuation) for context in contexts for continuation in continuations)
    )
    found = folded.loglikelihood(requests, disable_tqdm=True)
    exact = plain.loglikelihood(requests, disable_tqdm=True)
    for request, (logprob, greedy), (full, _) in zip(requests, found, exact):
        wanted, wanted_greedy = direct(ids_of(request.args[0]), ids_of(request.args[1]))
        assert logprob == pytest.approx(wanted, abs=1e-3)
        assert greedy == wanted_greedy
        # One-token continuations too are read from the folded cache.
        assert abs(logprob - full) > 1e-3
    assert folded.folded == len(contexts)  # each once
    assert folded.folded_bytes / folded.full_bytes <= 0.3


def test_the_preferred_continuation_is_greedy(folded):
    prompt = words(60, 3)
    model = tiny_model("llama")
    cache = kvfold.fold(model, torch.tensor([ids_of(prompt)[:-1]]), METHOD)
    with torch.no_grad():
        best = int(
            model(torch.tensor([ids_of(prompt)[-1:]]), **{CACHE_KEYWORD: cache}).logits[0, -1].argmax()
        )
    other = best + 1 if best + 1 < VOCAB else best - 1
    found = folded.loglikelihood(
        ask("loglikelihood", (prompt, f" w{best}"), (prompt, f" w{other}")), disable_tqdm=True
    )
    assert [greedy for _, greedy in found] == [True, False]


def test_full_method_gives_what_lm_eval_gives_without_folding(tokenizer, plain):
    full = FoldedLM(
        pretrained=tiny_model("llama"), tokenizer=tokenizer, method="full", batch_size=2, block=24
    )
    pairs = ask("loglikelihood", (words(40, 4), " w5 w6"), (words(50, 5), " w7"), ("", " w9 w4"))
    for one, other in zip(full.loglikelihood(pairs), plain.loglikelihood(pairs)):
        assert one[0] == pytest.approx(other[0], abs=1e-3)
        assert one[1] == other[1]
    texts = ask("loglikelihood_rolling", (words(150, 6),), (words(10, 7),))
    assert full.loglikelihood_rolling(texts) == pytest.approx(plain.loglikelihood_rolling(texts), abs=1e-2)
    prompts = ask(
        "generate_until",
        *((words(n, n), {"until": ["w3"], "max_gen_toks": 12, "do_sample": False}) for n in (30, 45, 37)),
    )
    assert full.generate_until(prompts) == plain.generate_until(prompts)


def test_rolling_scores_each_block_after_a_fold_of_what_comes_before(tokenizer):
    folded = FoldedLM(pretrained=tiny_model("llama"), tokenizer=tokenizer, method=METHOD, block=40)
    text = words(100, 8)
    ids = [2, *ids_of(text)]  # lm-eval begins with the beginning-of-text token
    (found,) = folded.loglikelihood_rolling(ask("loglikelihood_rolling", (text,)), disable_tqdm=True)
    with torch.no_grad():
        first = tiny_model("llama")(torch.tensor([ids[:40]])).logits[0].double().log_softmax(-1)
    wanted = float(first.gather(1, torch.tensor(ids[1:41])[:, None]).sum())
    wanted += direct(ids[:41], ids[41:81])[0] + direct(ids[:81], ids[81:])[0]
    assert found == pytest.approx(wanted, abs=1e-2)


def test_too_long_contexts_lose_their_beginning(tokenizer):
    folded = FoldedLM(pretrained=tiny_model("llama"), tokenizer=tokenizer, method=METHOD, max_length=64)
    prompt = words(100, 9)
    ((found, _),) = folded.loglikelihood(ask("loglikelihood", (prompt, " w5 w6 w7")), disable_tqdm=True)
    assert found == pytest.approx(direct(ids_of(prompt)[-62:], [5, 6, 7])[0], abs=1e-3)


@pytest.mark.parametrize("unseen", [1, 6])
def test_generation_reads_the_folded_cache_also_in_a_padded_batch(tokenizer, unseen):
    folded = FoldedLM(
        pretrained=tiny_model("llama"), tokenizer=tokenizer, method=METHOD, batch_size=3, unseen=unseen
    )
    prompts = [words(n, n) for n in (80, 61, 72)]
    settings = {"until": [], "max_gen_toks": 8, "do_sample": False}
    found = folded.generate_until(ask("generate_until", *((prompt, dict(settings)) for prompt in prompts)))
    model = tiny_model("llama")
    for prompt, answer in zip(prompts, found):
        ids = ids_of(prompt)
        cache = kvfold.fold(model, torch.tensor([ids[:-unseen]]), METHOD)
        step, made = ids[-unseen:], []
        with torch.no_grad():
            while len(made) < 8:
                for token in step:
                    logits = model(torch.tensor([[token]]), **{CACHE_KEYWORD: cache}).logits
                made.append(int(logits[0, -1].argmax()))
                step = made[-1:]
        if 1 in made:  # the end token
            made = made[: made.index(1)]
        assert ids_of(answer) == [token for token in made if token > 2]
    assert folded.folded == 3


def test_prompts_too_short_for_the_budget(tokenizer):
    tight = {"pretrained": tiny_model("llama"), "tokenizer": tokenizer, "method": "rdkv", "keep": 0.02}
    request = ask("loglikelihood", (words(34, 0), " w5"))
    refused = FoldedLM(**{**tight, "keep": 0.1})
    for call, requests in (
        (refused.loglikelihood, [*ask("loglikelihood", (words(90, 1), " w5")), *request]),
        (refused.generate_until, ask("generate_until", *((words(n, n), {"until": []}) for n in (90, 34)))),
    ):
        with pytest.raises(BudgetError, match="short=full"):
            call(requests)
    assert refused.folded == 0  # before the long one, too, was read
    lenient = FoldedLM(**tight, short="full")
    plain = HFLM(pretrained=tiny_model("llama"), tokenizer=tokenizer)
    found, exact = (model.loglikelihood(request, disable_tqdm=True) for model in (lenient, plain))
    assert found[0][0] == pytest.approx(exact[0][0], abs=1e-4)
    assert (lenient.folded, lenient.unfolded) == (0, 1)
    assert lenient.get_model_info()["kvfold"]["prompts_unfolded"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "nosuch"}, "unknown method"),
        ({"method": "rdkv", "keeep": 0.1}, "did you mean keep"),
        ({"method": "rdkv", "keep": "much"}, "keep"),
        ({"method": "rdkv", "keep": 0.1, "unseen": 0}, "unseen"),
        ({"method": "rdkv", "keep": 0.1, "short": "maybe"}, "short"),
    ],
)
def test_bad_options(tokenizer, options, message):
    with pytest.raises(KvfoldError, match=message):
        FoldedLM(pretrained=tiny_model("llama"), tokenizer=tokenizer, **options)


def test_an_unsupported_model_is_refused(tokenizer):
    from transformers import BloomConfig, BloomForCausalLM

    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedModelError, match="Bloom"):
        FoldedLM(pretrained=bloom, tokenizer=tokenizer, method=METHOD)


TASKS = {
    "choice.yaml": """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: ["w5", "w9 w10", "w11"]
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
""",
    "open.yaml": """
task: tiny_open
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "w5"
generation_kwargs: {until: ["w3"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "rolling.yaml": """
task: tiny_rolling
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
""",
}


@pytest.fixture
def local_tasks(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "rows.jsonl"
    rows = [{"text": words(80 + 5 * i, 20 + i), "label": i % 3} for i in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        (tmp_path / name).write_text(text.replace("DATA", str(data)))
    return tmp_path, rows


def test_simple_evaluate_with_the_registered_name(local_tasks, tokenizer):
    folder, rows = local_tasks
    tiny_model("llama").save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    results = lm_eval.simple_evaluate(
        model="kvfold",
        model_args={"pretrained": str(folder / "model"), "method": "rdkv", "keep": 0.3, "device": "cpu", "dtype": "float32"},
        tasks=["tiny_choice", "tiny_open", "tiny_rolling"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )  # fmt: skip
    for row, sample in zip(rows, results["samples"]["tiny_choice"]):
        found = [logprob for ((logprob, _),) in sample["resps"]]
        choices = ([5], [9, 10], [11])
        assert found == pytest.approx(
            [direct(ids_of(row["text"]), choice)[0] for choice in choices], abs=1e-3
        )
    assert results["results"]["tiny_rolling"]["word_perplexity,none"] > 1
    info = results["config"]["kvfold"]
    assert info["method"] == "rdkv" and info["keep"] == 0.3
    # A context for each question and each prompt; the texts are one block.
    assert info["prompts_folded"] == 8 and info["prompts_unfolded"] == 4
    assert 0.1 < info["bytes_kept"] <= 0.3
    gc.collect()


def test_chat_template(local_tasks, tokenizer):
    folder, rows = local_tasks
    folded = FoldedLM(pretrained=tiny_model("llama"), tokenizer=tokenizer, method=METHOD)
    results = lm_eval.simple_evaluate(
        model=folded,
        tasks=["tiny_choice"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=True,
        limit=1,
        bootstrap_iters=0,
    )
    ((found, _),) = results["samples"]["tiny_choice"][0]["resps"][0]
    assert found == pytest.approx(direct([7, *ids_of(rows[0]["text"]), 8], [5])[0], abs=1e-3)


@pytest.mark.slow  # lm_eval's command line reads the thousands of tasks that ship with it
def test_command_line(local_tasks, tokenizer):
    folder, _ = local_tasks
    tiny_model("llama").save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    done = subprocess.run(
        [
            sys.executable, "-m", "kvfold.evaluate.lm_eval", "run", "--model", "kvfold", "--model_args",
            f"pretrained={folder / 'model'},method=snapkv,keep=0.4,bits=4,window=8,dtype=float32", "--tasks", "tiny_open",
            "--include_path", str(folder), "--device", "cpu", "--output_path", str(folder / "out"),
        ],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = (folder / "out").rglob("results_*.json")
    config = json.loads(written.read_text())["config"]["kvfold"]
    assert (config["method"], config["bits"], config["prompts_folded"]) == ("snapkv", 4, 4)


def test_later_versions_of_lm_eval_find_it_as_a_plugin():
    from importlib.metadata import entry_points

    found = entry_points(group="lm_eval.models")
    if "kvfold" not in found.names:
        pytest.skip("kvfold was installed before it declared the entry point: install it again")
    assert found["kvfold"].load() is FoldedLM
