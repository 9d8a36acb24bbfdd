"""A model that cannot be loaded is refused in seconds, with the cause and with what helps."""

import json

import pytest

from lachesis.base.errors import ModelNotFoundError
from lachesis.models.find_model import is_cached, require_model
from lachesis.supervision.services.ports import reserve_free_ports
from tests.harness.http_answers import Reply, serve_answers

STATUSES = {
    "/open/model": 200,
    "/moved": 307,
    "/gated/model": 403,
    "/no/model": 401,
    "/old/model": 404,
    "/ill/model": 503,
}


def answer_as_hub(request):
    """Answer as the Hub does for the file config.json of a model."""
    name = request.path.removesuffix("/resolve/main/config.json")
    allowed = request.headers.get("Authorization") == "Bearer hf_right"
    return Reply(200 if name == "/gated/model" and allowed else STATUSES[name])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty home of Hugging Face's libraries; none of their variables is set."""
    for name in (
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "HF_TOKEN_PATH",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf"


@pytest.fixture
def hub(cache, monkeypatch):
    with serve_answers(answer_as_hub) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield url


def write_model(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["open/model", "moved", "ill/model"])
def test_what_the_hub_has_or_cannot_say_is_let_through(hub, name):
    require_model(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gated/model",
            r"the Hub \(http.*\) has no model gated/model, or you have no access to it \(HTTP 403\)"
            r": .* HF_TOKEN",
        ),
        ("no/model", "or you have no access to it"),
        ("old/model", "the Hub .* has no model old/model.* --model FOLDER"),
        ("no model", "'?no model'? is neither a folder nor a name on the Hugging Face Hub"),
        ("../etc/passwd", "is neither a folder nor a name"),
        ("", "is neither a folder nor a name"),
    ],
)
def test_what_the_hub_does_not_give_is_refused(hub, name, message):
    with pytest.raises(ModelNotFoundError, match=message):
        require_model(name)


def test_a_token_opens_what_is_gated(hub, cache, monkeypatch):
    write_model(cache).joinpath("token").write_text("hf_right\n")
    require_model("gated/model")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelNotFoundError):
        require_model("gated/model")


def test_without_a_network_the_error_says_how_to_get_it(cache, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{reserve_free_ports(1)[0]}")
    with pytest.raises(ModelNotFoundError) as caught:
        require_model("Qwen/DoesNotExist")
    text = str(caught.value)
    assert text.startswith("the model Qwen/DoesNotExist is not on this machine: ")
    assert "\n" not in text
    assert "cannot be reached" in text
    assert "`hf download Qwen/DoesNotExist --local-dir FOLDER`" in text
    assert "--model FOLDER" in text


def test_offline_the_hub_is_not_asked(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE is set"):
        require_model("open/model")


def test_the_cache_is_enough_when_it_is_whole(cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    place = cache / "hub" / "models--Qwen--Small"
    snapshot = write_model(place / "snapshots" / "abc", "config.json", "tokenizer.json")
    assert not is_cached("Qwen/Small", needs_weights=False), (
        "nothing says which snapshot is the newest"
    )
    write_model(place / "refs").joinpath("main").write_text("abc")
    assert is_cached("Qwen/Small", needs_weights=False)
    assert not is_cached("Qwen/Small")
    write_model(snapshot, "model-00001-of-00002.safetensors")
    assert not is_cached("Qwen/Small"), "a download that was cut before the list of its files"
    (snapshot / "model-00001-of-00002.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    write_model(snapshot, "model-1.safetensors")
    assert not is_cached("Qwen/Small"), "a download that was cut"
    write_model(snapshot, "model-2.safetensors")
    assert is_cached("Qwen/Small")
    require_model("Qwen/Small")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setenv("HF_HOME", "/nowhere")
    assert is_cached("Qwen/Small")


def test_a_folder_says_what_it_lacks(tmp_path):
    folder = tmp_path / "model"
    for missing, name in (
        ("config.json", "config.json"),
        ("a tokenizer", "tokenizer.json"),
        ("a file of weights", "model.safetensors"),
    ):
        with pytest.raises(ModelNotFoundError, match=rf"{folder} is incomplete: {missing}"):
            require_model(str(folder))
        write_model(folder, name)
    require_model(str(folder))
    write_model(folder, "model.safetensors.index.json")
    with pytest.raises(ModelNotFoundError, match=r"a readable model\.safetensors\.index\.json"):
        require_model(str(folder))
    require_model(str(folder), needs_weights=False)


def test_a_model_that_this_project_made_is_whole(random_model):
    require_model(random_model)


def test_settings_without_a_vocabulary_are_left_of_a_download_that_was_cut(cache):
    """In a folder they are a tokenizer of bytes, which needs no vocabulary."""
    place = cache / "hub" / "models--Qwen--Small"
    snapshot = write_model(place / "snapshots" / "abc", "config.json", "tokenizer_config.json")
    write_model(place / "refs").joinpath("main").write_text("abc")
    assert not is_cached("Qwen/Small", needs_weights=False)
    require_model(str(snapshot), needs_weights=False)
    write_model(snapshot, "tiktoken.model")
    assert is_cached("Qwen/Small", needs_weights=False)
