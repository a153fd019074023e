"""Secrets that are taken out of what is recorded, and settings that are left alone."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.redaction import MARK, redact

SECRET = "S3cr3tS3cr3tS3cr3t"
HEX = "0123456789abcdef" * 4


@dataclasses.dataclass
class Options:
    lr: float
    api_key: str


class Login(NamedTuple):
    user: str
    password: str


HOLDING = [
    # dictionaries, nested and typed
    {"api_key": SECRET},
    {"trainer": {"logger": {"wandb": {"apiKey": SECRET}}}},
    {"db": [{"host": "h"}, {"password": SECRET}]},
    {"credentials": {"user": SECRET, "pw": SECRET}},
    {"PGPASSWORD": SECRET},
    {"MY_APP_TOKEN": "S3cr3t"},
    {"token": "S3cr3t"},
    {"session": SECRET},
    {"ssh_key": SECRET},
    {"password": 12345678},
    Options(0.1, SECRET),
    Login("ada", SECRET),
    argparse.Namespace(lr=0.1, api_key=SECRET),
    # command lines
    ["train.py", "--api-key", SECRET, "--lr", "0.1"],
    ["train.py", f"--token={SECRET}"],
    ["train.py", "-password", SECRET],
    ["train.py", f"password={SECRET} with spaces S3cr3t"],
    ["train.py", f"+trainer.logger.api_key={SECRET}"],
    ["env", f"HF_TOKEN={SECRET}", "python"],
    {"argv": ["--secret", SECRET]},
    # texts
    f"train.py --api-key {SECRET} --lr 0.1",
    f"train.py --lr=0.1 --token='{SECRET}'",
    f"Command '['train.py', '--token', '{SECRET}']' returned non-zero exit status 1.",
    f"ValueError: bad options {{'lr': 1, 'api_key': '{SECRET}'}}",
    f'{{"password": "{SECRET}"}}',
    f"lr=0.1,api_key={SECRET}",
    f"Authorization: Bearer {SECRET}",
    f"curl -H 'authorization: Basic {SECRET}='",
    f"login failed, password: {SECRET}",
    # URLs
    f"postgresql://ada:{SECRET}@db.example/runs",
    f"redis://:{SECRET}@cache:6379/0",
    f"https://{SECRET}@github.com/me/repository",
    f"https://bucket.s3.amazonaws.com/a?X-Amz-Signature={SECRET}&X-Amz-Expires=60",
    f"https://account.blob.core.windows.net/c?sv=2024&sig={SECRET}",
    f"http://tracker:5000/?access_token={SECRET}",
    f"https://hooks.example/?x=1;key={SECRET}",
    {"slack_webhook": f"https://hooks.slack.com/services/{SECRET}"},
    Path(f"runs/token={SECRET}"),
]


def text_of(value):
    return value if isinstance(value, str) else json.dumps(value, default=str)


@pytest.mark.parametrize("value", HOLDING, ids=str)
def test_a_secret_is_gone(value):
    found = text_of(redact(value))
    assert "S3cr3t" not in found
    assert "12345678" not in found
    assert MARK in found


FORMATS = [
    "hf_" + "aB3" * 8,
    "ghp_" + "aB3" * 8,
    "github_pat_" + "aB3" * 8,
    "glpat-" + "aB3" * 8,
    "sk-proj-" + "aB3" * 8,
    "xoxb-123456789012-abcdef",
    "AKIA" + "A1B2" * 4,
    "AIza" + "aB3" * 11,
    "nvapi-" + "aB3" * 8,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("secret", FORMATS)
@pytest.mark.parametrize("place", ["{}", "see {} here", "--note={}", "https://host/{}/x"])
def test_the_formats_of_well_known_services_need_no_name(secret, place):
    assert redact(["train.py", place.format(secret)]) == ["train.py", place.format(MARK)]


def test_what_a_secret_variable_holds_is_gone_wherever_it_stands(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_DRIVER_KEY", HEX)
    monkeypatch.setenv("DB_PASSWORD", "correct-horse")
    monkeypatch.setenv("CACHE_KEY", "resnet")  # short: no secret, or one that nobody keeps
    assert redact([f"/tmp/{HEX}/x", "correct-horse", "resnet"]) == [
        f"/tmp/{MARK}/x",
        MARK,
        "resnet",
    ]


def test_a_variable_may_be_given_with_its_name():
    assert redact("anything", "WANDB_API_KEY") == MARK
    assert redact("INFO", "NCCL_DEBUG") == "INFO"


PLAIN = [
    {
        "lr": 0.1, "seed": 7, "recipe": "digits", "bf16": False, "data": None, "author": "ada",
        "optimizer": {"name": "adamw", "betas": [0.9, 0.999]}, "monitor": "val/accuracy",
    },
    {"max_tokens": 2048, "token_dim": 64, "pad_token_id": 0, "tokenizer": "gpt2"},
    {"pad_token": "[PAD]", "bos_token": "<s>", "eos_token": "end of text", "mask_token": "<mask>"},
    {"tokens": "data/tokens.bin", "key": "image", "label_key": "cls", "sort_key": "length"},
    {"token": "", "password": None, "use_auth": True, "api_key": False},
    {"key_padding": "same", "keys": ["image", "label"], "pass_rank": True, "passes": 2},
    {"digest": HEX, "revision": HEX[:40], "checkpoint": f"runs/{HEX}/weights.safetensors"},
    {"key_file": "driver.key", "started": "2026-11-21T07:52:00+00:00", "hostname": "gpu03"},
    ["/opt/bin/lockstep", "train", "digits", "-n", "2", "--max-tokens", "512", "--lr", "0.1"],
    ["train.py", "--tokenizer", "gpt2-medium-v2-0123456", "--monitor=val/loss", "seed=7"],
    "KeyError: 'token'",
    "rank 1 raised KeyError: 'lr' (train.py:31); its log: runs/train-2026-11-21-0821/rank-1.log",
    "SyntaxError: unexpected token: def",
    "https://host:8080/path?page=2#key",
    "git@github.com:pytorch/pytorch.git",
    "ssh://git@github.com/pytorch/pytorch",
    "a basic understanding of secret-free prose",
    "tcp://10.0.0.1:29500",
    "s3://bucket/data/train-00000-of-01024.tar",
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=str)
def test_a_setting_is_left_as_it_is(value):
    assert redact(value) == value


def test_numbers_tensors_and_other_objects_stay_objects():
    tensor = torch.ones(2)
    thing = object()
    found = redact({"tensor": tensor, "thing": thing, "path": Path("x"), "inf": float("inf")})
    assert found["tensor"] is tensor
    assert found["thing"] is thing
    assert found["path"] == Path("x")
    assert found["inf"] == float("inf")


def test_a_cycle_ends():
    options = {"lr": 1, "api_key": SECRET}
    options["self"] = options
    assert SECRET not in str(redact(options))


TEXT = st.text(st.characters(codec="utf-8"), max_size=40) | st.sampled_from([*map(str, HOLDING)])
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_redacting_twice_changes_nothing_more(value):
    once = redact(value)
    assert redact(once) == once
