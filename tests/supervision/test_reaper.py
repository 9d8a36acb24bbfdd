"""A service's log goes on, and its reader lives, whatever the disk or a late message does."""

import builtins
import os

from lachesis.supervision.reaper import LogCopier
from lachesis.supervision.running_services import ServiceGroup


def test_a_log_that_cannot_be_begun_anew_is_written_on(tmp_path, monkeypatch):
    """Otherwise the thread would end, and the service would wait for its full pipe for ever."""
    log = tmp_path / "service.log"
    read_fd, write_fd = os.pipe()
    copier = LogCopier(read_fd, str(log), [], max_bytes=20)
    is_refused = True

    def open_if_allowed(*args, **options):
        if is_refused and args[0] == str(log):
            raise OSError(28, "No space left on device")
        return original(*args, **options)

    original = builtins.open
    monkeypatch.setattr(builtins, "open", open_if_allowed)
    copier.write(b"1234567\n")
    copier.write(b"abcdefg\n")
    assert (tmp_path / "service.log.1").read_bytes() == b"1234567\nabcdefg\n"
    is_refused = False
    copier.start()
    os.write(write_fd, b"again\n")
    os.close(write_fd)
    copier.join(5)
    assert log.read_bytes() == b"again\n"


def test_a_message_about_a_forgotten_service_is_ignored():
    """Its exit may be reported after the flow has forgotten it."""
    with ServiceGroup() as group:
        group._apply_reaper_message({"exited": "gone", "code": 0})
        group._apply_reaper_message({"started": "gone", "pid": 1})
        assert not group.has_service("gone")
