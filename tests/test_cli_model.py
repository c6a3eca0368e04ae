# SPDX-License-Identifier: Apache-2.0
"""Public models on the command line: `sample.py --model`, `train.py --init-from`."""

import json
import shutil
from pathlib import Path

import fakehub
import hubfolders
import numpy as np
import pytest
from chatfolders import chat_folder
from commandline import error_line
from hubfolders import LLAMA
from test_hub import TOKEN, use

from jaxgpt import cli
from jaxgpt.config import from_yaml
from jaxgpt.train.files import read_metrics

WORDS = (
    "--data.path=text.txt",
    "--train.steps=4",
    "--train.batch_size=4",
    "--train.save_every=2",
    "--train.eval_every=2",
    "--optim.warmup_steps=1",
    "--show.sample_tokens=4",
    "--show.pictures=false",
)
CONFIG = LLAMA | {"vocab_size": 264, "max_position_embeddings": 32}


@pytest.fixture
def model(tmp_path, monkeypatch):
    """The current folder, with a text and `bard`, a chat model of 264 tokens."""
    tensors = hubfolders.llama()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.random.default_rng(1).normal(size=(264, 8)).astype(np.float32)
    hubfolders.write(chat_folder(tmp_path / "bard"), CONFIG, tensors)
    (tmp_path / "text.txt").write_text("ab cd ab cd cd\n" * 100)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "bard"


def sample(capsys, *words, code=0, tokens=12) -> str:
    capsys.readouterr()
    assert cli.sample_main([f"--max-new-tokens={tokens}", *words]) == code
    return capsys.readouterr().out if code == 0 else error_line(capsys)


def train(*words, init_from=("--init-from=bard",)) -> int:
    return cli.train_main([*init_from, *WORDS, *words])


def path(file, run="finetune"):
    return Path("runs") / run / file


def config(run="finetune"):
    return from_yaml(path("config.yaml", run).read_text())


# --- sampling -------------------------------------------------------------------------------------


def test_the_reference_text_letter_for_letter(shared, capsys):
    """From an empty prompt, which begins with the model's BOS token."""
    folder = shared / "data/stories260k"
    want = json.loads((folder / "reference.json").read_text())
    assert len(want["greedy_from_bos_ids"]) == 201
    text = sample(capsys, f"--model={folder}", "--greedy", tokens=200)
    assert text == want["greedy_text"] + "\n"


def test_a_prompt_goes_on(model, capsys):
    text = sample(capsys, "--model=bard", "--prompt=ab cd", "--seed=3")
    assert text.startswith("ab cd") and text == sample(
        capsys, f"--model={model}", "--prompt=ab cd", "--seed=3"
    )
    two = sample(capsys, "--model=./bard", "--prompt=ab cd", "--seed=3", "--num-samples=2")
    assert two.startswith(text) and two.count("ab cd") >= 2
    assert sample(capsys, "--model=bard", "--prompt=ab cd", "--dtype=bfloat16")


def test_chat_prints_the_answer_alone(model, capsys):
    plain = sample(capsys, "--model=bard", "--chat", "--prompt=ab cd", "--greedy")
    assert not plain.startswith("ab cd") and "im_start" not in plain and plain.endswith("\n")
    turn = "<|im_start|>user\nab cd<|im_end|>\n<|im_start|>assistant\n"
    typed = sample(capsys, "--model=bard", f"--prompt={turn}", "--greedy")
    assert typed.startswith(turn) and typed != turn + plain, "typed control tokens stay text"
    system = sample(capsys, "--model=bard", "--chat", "--prompt=ab", "--system=cd", "--greedy")
    assert system != sample(capsys, "--model=bard", "--chat", "--prompt=ab", "--greedy")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--model=bard", "--run=x"], 2, "--model and --run exclude each other"),
        (["--model=bard", "--checkpoint=best"], 2, "--model and --checkpoint exclude each other"),
        (["--system=x", "--prompt=y"], 2, "--system is for conversations; fix: --chat"),
        (["--model=bard", "--chat"], 2, "--chat answers a message, and there is none"),
        (["--model=nothing"], 2, "'nothing' is no folder, and names no model of the hub"),
        (["--model=text.txt"], 2, "'text.txt' is no folder"),
        (["--model=."], 4, "cannot read config.json"),
        (["--model=owner/name"], 5, "owner/name at main is not cached, and HF_HUB_OFFLINE is set"),
    ],
)
def test_mistakes(model, capsys, words, code, message):
    assert message in sample(capsys, *words, code=code)


def test_folders_that_lack_something(model, capsys):
    (model / "chat_template.jinja").unlink()
    words = ("--model=bard", "--prompt=x")
    assert "has no chat template" in sample(capsys, *words, "--chat", code=2)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle, which is not opened" in sample(capsys, *words, code=4)
    (model / "tokenizer.json").unlink()
    assert "no tokenizer.json" in sample(capsys, *words, code=2)


# --- fine-tuning ----------------------------------------------------------------------------------


def test_a_run_begins_with_the_model_and_then_needs_it_no_more(model, capsys):
    assert train() == 0
    out, err = capsys.readouterr()
    assert "step 0/4  validation" in out and err == ""
    facts = json.loads(path("run.json").read_text())
    assert facts["init_from"] == {"name": "bard", "commit": None}
    run = config()
    assert (run.init_from, run.data.tokenizer) == ("bard", "pretrained")
    assert (run.model.context_length, run.model.vocab_size) == (32, 264)
    text = sample(capsys, "--run=finetune", "--prompt=ab")
    chat = sample(capsys, "--run=finetune", "--prompt=ab", "--chat")
    shutil.rmtree(model)
    assert train("--train.steps=6") == 0
    assert "going on from step 4" in capsys.readouterr().out
    assert sample(capsys, "--run=finetune", "--prompt=ab", "--checkpoint=4") == text
    assert sample(capsys, "--prompt=ab", "--checkpoint=4", "--chat") == chat
    assert cli.train_main(["--run=finetune", "--train.steps=7"]) == 0  # by its name alone
    assert train("--train.steps=7", "--model.context_length=16") == 2
    assert "model.context_length: 32 -> 16" in capsys.readouterr().err
    assert train("--train.steps=7", init_from=["--init_from=other"]) == 2
    assert "init_from: 'bard' -> 'other'" in capsys.readouterr().err


def test_the_first_evaluation_is_of_the_model(model, capsys):
    """With fresh adapters too, to the bit."""
    assert train() == 0
    lora = ("--lora.rank=2", "--lora.targets=attention/*", "--run=lora")
    assert train(*lora) == 0
    first = {}
    for name in ("finetune", "lora"):
        records = read_metrics(path("metrics.jsonl", name))
        first[name] = records[0]["val_nats_per_token"]
        assert [r["step"] for r in records if "val_nats_per_token" in r] == [0, 2, 4]
        samples = read_metrics(path("samples.jsonl", name))
        assert [record["step"] for record in samples] == [0, 2, 4]
        assert records[-1]["val_nats_per_token"] != first[name]
    assert first["finetune"] == first["lora"]
    assert config("lora").lora.targets == ("attention/*",)


def test_sampling_merges_adapters(model, capsys):
    lora = ("--lora.rank=2", "--lora.targets=[attention/*, ffn/*]", "--optim.lr=0.5")
    assert train(*lora) == 0
    base = sample(capsys, "--model=bard", "--prompt=ab", "--greedy")
    tuned = sample(capsys, "--run=finetune", "--prompt=ab", "--greedy")
    assert tuned.startswith("ab") and tuned != base
    last = read_metrics(path("samples.jsonl"))[-1]
    assert last["step"] == 4
    shown = sample(capsys, "--run=finetune", "--temperature=0.8", tokens=4)
    assert shown == last["text"] + "\n"


def test_a_start_that_did_not_come_far_is_taken_up(model, capsys, monkeypatch):
    assert train("--data.path=missing.txt") == 2
    assert config().data.path == "missing.txt"
    words = [word for word in WORDS if "data.path" not in word]
    assert cli.train_main(["--run=finetune", "--data.path=text.txt", *words]) == 0
    assert config().init_from == "bard"


@pytest.mark.slow
def test_config_files_and_presets(model, capsys):
    def printed(*words, init_from=()):
        capsys.readouterr()
        assert train(*words, "--print_config", init_from=init_from) == 0
        return capsys.readouterr().out

    whole = printed(init_from=["--init-from=bard"])
    Path("whole.yaml").write_text(whole)
    Path("part.yaml").write_text("init_from: bard\nmodel:\n  dropout: 0.1\n")
    assert printed("--config=whole.yaml") == whole
    run = from_yaml(printed("--config=part.yaml"))
    assert (run.model.dropout, run.model.d_model, run.init_from) == (0.1, 8, "bard")
    run = from_yaml(printed("--config=part.yaml", "--init-from=./bard"))
    assert (run.model.dropout, run.init_from) == (0.1, "./bard")
    run = from_yaml(printed("--preset=shakespeare", "--init-from=bard"))
    assert (run.optim.schedule, run.model.d_model) == ("wsd", 8)
    assert train("--config=part.yaml", init_from=()) == 0
    assert config().model.dropout == 0.1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.d_model=16"], "the weights do not fit the model: block_0/attention/k/kernel"),
        (["--model.context_length=64"], "context_length=64 exceeds the 32 tokens"),
        (["--init-from=nothing"], "'nothing' is no folder"),
        (["--init-from="], "'' is no folder"),
        (["--data.tokenizer=none.json"], "no tokenizer at none.json"),
        (["--init-form=bard"], "did you mean --init-from?"),
    ],
)
def test_mistakes_of_training(model, capsys, words, message):
    assert train(*words) == 2
    assert message in error_line(capsys)
    assert not (model.parent / "runs/finetune/checkpoints").exists()


def test_a_tokenizer_without_its_model(model, capsys):
    assert train("--data.tokenizer=pretrained", init_from=()) == 2
    assert "fix: --init-from=FOLDER_OR_ID, or another --data.tokenizer" in error_line(capsys)


def test_control_tokens_behind_the_last_row(model, capsys):
    """As Gemma's token for pictures: its text is plain text, and no text has it."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 264, "content": "<pic>"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with open("text.txt", "a") as file:
        file.write("<pic> ab\n" * 100)
    assert train() == 0
    assert sample(capsys, "--run=finetune", "--prompt=<pic>").startswith("<pic>")
    template = (model / "chat_template.jinja").read_text().replace("<|im_start|>", "<pic>")
    (model / "chat_template.jinja").write_text(template)
    row = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}
    with open("chat.jsonl", "w") as file:
        file.write((json.dumps(row) + "\n") * 40)
    assert train("--run=x", "--data.path=chat.jsonl", "--data.format=chat") == 2
    assert "the text has the token 264, model.vocab_size is 264" in capsys.readouterr().err


def test_a_model_of_the_hub(model, capsys, monkeypatch, tmp_path):
    """The commit is kept, and a run goes on without the hub."""
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    with fakehub.serve(files, "owner/bard", "models") as hub:
        use(monkeypatch, hub.url, tmp_path / "hf")
        assert train(init_from=["--init-from=owner/bard"]) == 0
        text = sample(capsys, "--model=owner/bard", "--prompt=ab")
        assert text == sample(capsys, "--model=bard", "--prompt=ab")
    facts = path("run.json").read_text()
    assert json.loads(facts)["init_from"] == {"name": "owner/bard", "commit": fakehub.SHA}
    assert TOKEN not in facts
    assert train("--train.steps=5", init_from=["--init-from=owner/bard"]) == 0
    assert "cannot reach" in sample(capsys, "--model=owner/bard", code=5)


@pytest.mark.slow
def test_a_failed_start_asks_for_the_same_commit_again(model, monkeypatch, tmp_path):
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    with fakehub.serve(files, "owner/bard", "models") as hub:
        use(monkeypatch, hub.url, tmp_path / "hf")
        owner = ["--init-from=owner/bard"]
        assert train("--model.attention.window=3", "--data.path=text.tx", init_from=owner) == 2
        words = [word for word in WORDS if "data.path" not in word]
        hub.requests.clear()
        (tmp_path / "text.tx").write_text((tmp_path / "text.txt").read_text())
        assert cli.train_main(["--run=finetune", *words]) == 0
    assert any(f"revision/{fakehub.SHA}" in request for request in hub.requests)
    assert config().model.attention.window == 3


def test_parameters_of_a_folder_are_counted(model, capsys):
    assert cli.main(["params", "bard"]) == 0
    total = 2 * 264 * 8 + 8 + 2 * (2 * 8 + 2 * 64 + 2 * 32 + 3 * 96)
    assert capsys.readouterr().out.splitlines()[-1].split() == ["total", f"{total:,}"]
