"""The engine's last line is the whole cause, however many lines the error has."""

from lachesis.base.errors import ModelNotFoundError
from lachesis.engine import __main__ as engine


def test_an_error_of_several_lines_keeps_its_code_on_the_last_line(monkeypatch, capsys):
    def fail(_):
        raise ModelNotFoundError("the model cannot be loaded:\n  its file\n  is damaged")

    monkeypatch.setattr(engine, "serve", fail)
    monkeypatch.setattr("sys.argv", ["engine", "--model", "m", "--port", "1"])
    assert engine.main() == 1
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line == "model_not_found: the model cannot be loaded: its file is damaged"
