"""An agent has an environment checked, which takes longer than a call may."""

import psutil


def test_rl_check_environment(ask, random_model, tmp_path, monkeypatch):
    """One that was just begun is sound, what is wrong with another is told, and a check whose
    process dies has failed.
    """
    mine = tmp_path / "mine"
    mine.mkdir()
    monkeypatch.setenv("LACHESIS_ENVIRONMENTS", str(mine))
    assert ask("rl_check_environment", environment="my_task")["code"] == "unknown_environment"
    assert ask("rl_check_environment")["code"] == "arguments"
    assert ask("rl_check_environment", check_id="../x")["code"] == "unknown_run"
    taken = ask("rl_check_environment", environment="arithmetic", new=True)
    assert taken["code"] == "storage"
    assert "there is an environment arithmetic already" in taken["error"]
    assert not list(mine.iterdir()), "nothing was written"

    with monkeypatch.context() as brief:
        # a quick machine would be done with the check
        brief.setattr("lachesis.agent_tools.environment_checks.MAX_WAIT_S", 0.1)
        answer = ask("rl_check_environment", environment="my_task", new=True, model=random_model)
        same = ask("rl_check_environment", environment="my_task", model=random_model)
    assert same["check_id"] == answer["check_id"]
    while answer["status"] == "running":
        assert "ok" not in answer
        answer = ask("rl_check_environment", check_id=answer["check_id"])
    assert answer["ok"], answer
    assert answer["environment_file"] == str(mine / "my_task.py")
    names = [
        "import",
        "config",
        "dataset",
        "model-free check",
        "rollout",
        "tokens",
        "round trip",
        "stop tokens",
        "truncation",
    ]
    assert [check["name"] for check in answer["checks"]] == names
    assert ask("rl_check_environment", environment="my_task", new=True)["code"] == "storage", (
        "it already exists"
    )

    text = (mine / "my_task.py").read_text()
    (mine / "my_task.py").write_text(
        text.replace("def load_dataset(self)", "def load_dataset(self, more)")
    )
    answer = ask("rl_check_environment", environment="my_task", model=random_model)
    while answer["status"] == "running":
        answer = ask("rl_check_environment", check_id=answer["check_id"])
    assert not answer["ok"]
    assert "load_dataset" in answer["message"]

    monkeypatch.setattr("lachesis.agent_tools.environment_checks.MAX_WAIT_S", 0.1)
    (mine / "my_task.py").write_text(text + "\n# another version\n")
    answer = ask("rl_check_environment", environment="my_task", model=random_model)
    assert answer["status"] == "running"
    (process,) = [
        one
        for one in psutil.process_iter(["cmdline"])
        if answer["check_id"] in (one.info["cmdline"] or ())
    ]
    process.kill()
    process.wait(10)
    answer = ask("rl_check_environment", check_id=answer["check_id"])
    assert (answer["status"], answer["ok"]) == ("failed", False)
    assert "the process of the check was ended" in answer["message"]
