"""The commands, as a user runs them: in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tilewright.devices.cpu.onednn import capi


def run(*arguments, cwd, code=0):
    told = subprocess.run([sys.executable, "-W", "error", "-m", "tilewright.cli", *arguments], cwd=cwd, capture_output=True, text=True)
    assert told.returncode == code, told.stdout + told.stderr
    return told


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder of two classes that a net can tell apart: stripes across and stripes down."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for k, name in enumerate(("across", "down")):
        (root / name).mkdir()
        for i in range(40):
            a = rng.integers(0, 60, (16, 16, 3), dtype=np.uint8)
            (a if k == 0 else a.transpose(1, 0, 2))[::4] += 180
            Image.fromarray(a).save(root / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def trained(pictures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    told = run(
        "train", "--data", f"folder:{pictures}", "--size", "16", "--epochs", "6", "--batch", "16", "--no-augment", "--out", "w.safetensors",
        "--checkpoint", "run.ckpt", "--log", "log.jsonl", "--json", cwd=folder,
    )  # fmt: skip
    return folder, json.loads(told.stdout)


def test_train(trained):
    folder, told = trained
    assert (folder / "w.safetensors").exists()
    assert len(told["history"]) == 6
    assert told["history"][-1]["val_accuracy"] > 0.9
    assert any(k["op"] == "conv2d" for k in told["kernels"])
    assert len((folder / "log.jsonl").read_text().splitlines()) >= 6


def test_resume(trained, pictures):
    folder, _ = trained
    told = run(
        "train", "--data", f"folder:{pictures}", "--size", "16", "--epochs", "7", "--batch", "16", "--no-augment", "--out", "w2.safetensors",
        "--checkpoint", "run.ckpt", "--resume", "--json", cwd=folder,
    )  # fmt: skip
    assert len(json.loads(told.stdout)["history"]) == 7


def test_eval_and_predict(trained, pictures):
    folder, told = trained
    score = json.loads(run("eval", "w.safetensors", "--data", f"folder:{pictures}", "--json", cwd=folder).stdout)
    assert score["accuracy"] == told["history"][-1]["val_accuracy"]
    files = [str(pictures / "across" / "0.png"), str(pictures / "down" / "0.png")]
    answers = json.loads(run("predict", "w.safetensors", *files, "--json", cwd=folder).stdout)
    assert [a["classes"][0]["class"] for a in answers] == ["across", "down"]
    assert "across" in run("predict", "w.safetensors", files[0], cwd=folder).stdout


def test_devices(tmp_path):
    told = json.loads(run("devices", "--json", cwd=tmp_path).stdout)
    assert told[0]["name"] == "cpu"
    assert "missing" in told[1]
    assert "cpu" in run("devices", cwd=tmp_path).stdout


def test_summary(tmp_path):
    told = json.loads(run("summary", "mobilenet_v2", "--json", cwd=tmp_path).stdout)
    assert told["parameters"] == 3504872
    assert 0.55e9 < told["flops"] < 0.65e9  # 300 million multiply-adds (Sandler et al., table 4)
    assert "resnet" not in run("summary", "lenet", "--input", "1x1x28x28", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "none.safetensors", "x.png"], "none.safetensors: could not be read"),
        (["train", "--data", "nothing"], "data 'nothing' is not known"),
        (["train", "--model", "nothing", "--data", "digits"], "model 'nothing' is not known"),
        (["train", "--data", "folder:missing"], "missing: no such folder"),
        (["train", "--device", "tpu"], "device 'tpu' is not known"),
        (["summary", "lenet", "--input", "3,3"], "must be sizes joined by x"),
    ],
)
def test_errors_are_one_clear_line(arguments, message, tmp_path):
    told = run(*arguments, cwd=tmp_path, code=2)
    assert message in told.stderr
    assert "Traceback" not in told.stderr


def test_a_picture_that_is_none(trained):
    folder, _ = trained
    (folder / "bad.png").write_bytes(b"not a picture")
    assert "bad.png: cannot be read as an image" in run("predict", "w.safetensors", "bad.png", cwd=folder, code=2).stderr


def test_ctrl_c_saves_and_says_so(tmp_path, pictures):
    import os
    import signal
    import time

    process = subprocess.Popen(
        [
            sys.executable, "-m", "tilewright.cli", "train", "--data", f"folder:{pictures}", "--size", "16", "--epochs", "100000", "--batch", "16",
            "--checkpoint", "run.ckpt",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    for _ in range(600):
        time.sleep(0.1)
        if os.path.exists(tmp_path / "run.ckpt"):
            break
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted in epoch" in told
    assert "the run is saved in run.ckpt, go on with --resume" in told
    assert "Traceback" not in told


SHAPES = """name,N,C,H,W,F,kh,kw,stride_h,stride_w,pad_top,pad_left,pad_bottom,pad_right,dil_h,dil_w,groups
a,1,8,10,10,16,3,3,1,1,1,1,1,1,1,1,1
b,1,16,10,10,16,3,3,2,1,1,0,1,2,1,1,16
"""


@pytest.mark.skipif(capi.available() is not None, reason="without oneDNN these convolutions have one kernel, so nothing is measured")
def test_tune_and_explain(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TILEWRIGHT_TUNE", "auto")
    (tmp_path / "shapes.csv").write_text(SHAPES)
    common = ("--seconds", "3", "--json")
    report = json.loads(run("tune", "shapes.csv", "--lock", "l.json", *common, cwd=tmp_path).stdout)
    assert report["problems"] == 6  # two shapes, three directions
    assert report["measured"] == report["locked"] == report["problems"]
    again = json.loads(run("tune", "shapes.csv", *common, cwd=tmp_path).stdout)
    assert again["measured"] == 0
    assert again["known"] == report["problems"]
    status = json.loads(run("tune", "status", "--json", cwd=tmp_path).stdout)
    assert status["problems"] == report["problems"]
    assert status["trials"]["ok"] > report["problems"]
    assert sum(status["trials"][s] for s in ("wrong", "failed", "timeout")) == 0
    entries = json.loads(run("explain", "shapes.csv", "--direction", "all", "--json", cwd=tmp_path).stdout)["calls"]
    assert len(entries) == report["problems"]
    for entry in entries:
        timed = [c["kernel"] for c in entry["candidates"] if c["status"] == "ok"]
        assert entry["chosen"]["kernel"] in timed
        assert all(c["reasons"] for c in entry["candidates"] if c["status"] == "rejected")
    monkeypatch.setenv("TILEWRIGHT_LOCK", "l.json")
    pinned = json.loads(run("explain", "shapes.csv", "--json", cwd=tmp_path).stdout)
    assert pinned["calls"][0]["chosen"]
    (tmp_path / "more.csv").write_text(SHAPES.replace("10,10,16", "11,11,16"))
    assert "l.json: pins no kernel for conv2d" in run("explain", "more.csv", cwd=tmp_path, code=2).stderr
    monkeypatch.delenv("TILEWRIGHT_LOCK")
    count = json.loads(run("tune", "export", "all.jsonl", "--json", cwd=tmp_path).stdout)["trials"]
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "other"))
    assert json.loads(run("tune", "import", "all.jsonl", "--json", cwd=tmp_path).stdout)["trials"] == count
    assert json.loads(run("tune", "shapes.csv", *common, cwd=tmp_path).stdout)["known"] == report["problems"]
    assert json.loads(run("tune", "prune", "--json", cwd=tmp_path).stdout)["removed"] == 0
    assert "name the file" in run("tune", "export", cwd=tmp_path, code=2).stderr
    (tmp_path / "bad.csv").write_text("N,C\n1,2\n")
    assert "bad.csv, line 2" in run("tune", "bad.csv", cwd=tmp_path, code=2).stderr
