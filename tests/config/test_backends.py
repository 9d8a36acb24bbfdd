"""Which engines profile custom can train on, and what is refused before a launch."""

import json

import pytest

from lachesis.base.errors import ConfigError, FieldValueError, MissingDependencyError
from lachesis.config import backends
from lachesis.config.profiles import check_profile
from lachesis.config.run_config import build_run_config

URL = "http://10.0.0.7:8000"


def make_config(profile="custom", **tinker):
    return build_run_config({"environment": "arithmetic", "profile": profile, "tinker": tinker})


@pytest.mark.parametrize("backend", ["skyrl", URL, "https://gpu-box/tinker"])
def test_a_back_end_makes_an_engine_of_the_run(backend):
    config = make_config(backend=backend)
    assert config.has_own_engine
    assert not config.without_backend().has_own_engine
    assert not make_config().has_own_engine


@pytest.mark.parametrize(
    ("profile", "tinker", "message"),
    [
        ("custom", {"backend": "skyrll"}, "there is no back end 'skyrll'; allowed: skyrl, or"),
        ("embedded", {"backend": "skyrl"}, "tinker.backend is skyrl on profile embedded"),
        (
            "custom",
            {"backend": "skyrl", "grad_clip_norm": 1.0},
            "tinker.grad_clip_norm is 1.0, which skyrl ignores; allowed: 0.0",
        ),
        ("custom", {"backend": URL, "loss_fn": "gspo"}, "tinker.loss_fn is gspo, which no engine"),
    ],
)
def test_what_it_would_ignore_is_refused_by_name(profile, tinker, message):
    with pytest.raises((ConfigError, FieldValueError), match=message.replace("(", r"\(")):
        make_config(profile, **tinker)


def test_one_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("LACHESIS_HOME", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="`lachesis backend install skyrl` installs"):
        check_profile("custom", {}, backend="skyrl")
    check_profile("custom", {}, backend=URL)  # No key is needed.


@pytest.mark.parametrize(
    ("verdict", "clip", "problem"),
    [
        ("fits", 1.0, None),
        ("fits with limits: clipping", 0.0, None),
        ("fits with limits: clipping, seeds", 1.0, "tinker.grad_clip_norm is 1, which the server"),
        ("does not fit: snapshots", 0.0, "and does not fit: snapshots; `lachesis backend check"),
    ],
)
def test_a_check_decides_about_later_launches(tmp_path, monkeypatch, verdict, clip, problem):
    monkeypatch.setenv("LACHESIS_HOME", str(tmp_path))
    assert backends.find_check_problem(URL, clip) is None
    file = backends.get_check_file(URL)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"verdict": verdict, "checked_at": "2026-11-27"}))
    answer = backends.find_check_problem(URL, clip)
    if problem is None:
        assert answer is None
    else:
        assert problem in (answer or "")
