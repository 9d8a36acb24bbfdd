"""What is kept of an agent's session."""

import os
import threading

import pytest

from lachesis.agent_tools.draft import edit_draft, select_environment, show_draft
from lachesis.agent_tools.session import AgentSession


def test_two_agents_do_not_disturb_each_other_and_a_restarted_one_goes_on(home):
    one, other = AgentSession("one"), AgentSession("other")
    select_environment(one, "arithmetic")
    select_environment(other, "arithmetic")
    edit_draft(one, "group_size", 8)
    assert show_draft(AgentSession("one"))["configurable_fields"][0]["current_value"] == 8
    assert show_draft(AgentSession("other"))["configurable_fields"][0]["current_value"] == 16


def test_two_edits_at_once_are_both_kept(home):
    select_environment(AgentSession("one"), "arithmetic")
    edits = {
        "group_size": 8,
        "batch_size": 64,
        "total_steps": 7,
        "largest": 5,
        "seed": 3,
        "data_seed": 4,
    }
    threads = [
        threading.Thread(target=edit_draft, args=(AgentSession("one"), *edit))
        for edit in edits.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = {
        name.split(".")[1]: value
        for name, value in AgentSession("one").session_file.read().draft.settings.items()
    }  # type: ignore[union-attr]
    assert kept == edits


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"starts": 7}', b"\xff\xfe\x00"])
def test_a_damaged_state_is_told_kept_aside_and_never_overwritten(desk, ask, content):
    select_environment(desk, "arithmetic")
    desk.session_file.file.write_bytes(content)
    answer = ask("rl_edit_config", field="group_size", value=8)
    assert answer["code"] == "storage"
    (aside,) = desk.session_file.file.parent.glob("*.damaged-*")
    assert aside.read_bytes() == content
    assert str(aside) in answer["error"]
    assert ask("rl_get_current_config")["code"] == "run_state"
    select_environment(desk, "arithmetic")
    assert aside.read_bytes() == content


def test_state_belongs_to_its_owner_alone(desk):
    select_environment(desk, "arithmetic")
    assert os.stat(desk.session_file.file).st_mode & 0o077 == 0
    assert os.stat(desk.session_file.file.parent).st_mode & 0o077 == 0
