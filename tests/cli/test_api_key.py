"""The API key of a server: where it may come from, which source wins, and that nothing shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pypto_serving.cli import main

VARIABLE = "PYPTO_SERVING_API_KEY"
NOT_ONE_LINE = "not one line of characters that can be printed, but must be"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Run `check` for the null model."""
    code = main(["check", "--backend", "null", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_key_is_never_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "key").write_text("very-secret\n")
    key_file = str(tmp_path / "key")
    for argv, source in ((["--api-key", "very-secret"], ""), (["--api-key-file", key_file], f"-file {key_file}")):
        code, out, err = run(capsys, *argv)
        assert code == 0
        assert f"given by --api-key{source}\n" in out
        assert "very-secret" not in out + err


def test_api_key_file_must_hold_a_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    key_file, config = tmp_path / "key", tmp_path / "c.yaml"
    config.write_text(f"api-key-file: {key_file}")
    for text, problem in (("\n# none\n", "empty, but must be text on one line, not empty"), ("a\nb\x7f", NOT_ONE_LINE)):
        key_file.write_text(text)
        code, _, err = run(capsys, "--api-key-file", str(key_file))
        assert (code, err) == (2, f"error: --api-key-file {key_file} is {problem}\n")
        code, _, err = run(capsys, "--config", str(config))
        assert (code, err) == (2, f"error: api-key-file {key_file} in c.yaml is {problem}\n")
    assert run(capsys, "--config", str(config), "--api-key", "k")[0] == 0


def test_an_unknown_option_of_a_file_is_told_of_api_key_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text("zzz: 1\n")
    assert "api-key-file" in run(capsys, "--config", str(tmp_path / "c.yaml"))[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("api-key: 12345", "api-key in c.yaml is not text, but must be; put it in quotes"),
        ("api-key: [12345]", "api-key in c.yaml is not text, but must be; put it in quotes"),
        ('api-key: "12345\\n6"', "api-key in c.yaml is not one line of characters that can be printed, but must be"),
    ],
)
def test_a_refused_key_is_not_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    assert run(capsys, "--config", str(tmp_path / "c.yaml")) == (2, "", f"error: {message}\n")


def reason(out: str) -> str:
    """The line of the setting, without its name."""
    return next(line.split(maxsplit=1)[1] for line in out.splitlines() if line.split()[:1] == ["api-key"])


def test_flags_win_over_the_file_and_the_file_over_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("k3y-of-a-file\n")
    (tmp_path / "c.yaml").write_text("api-key: k3y-of-the-configuration")
    config, flags = ("--config", str(tmp_path / "c.yaml")), ("--api-key-file", str(tmp_path / "key"))
    assert reason(run(capsys)[1]).split() == ["none", "default:", "open"]
    monkeypatch.setenv(VARIABLE, "k3y-of-the-environment")
    for argv, source in (
        ((), VARIABLE),
        (config, "in c.yaml"),
        ((*config, *flags), f"by --api-key-file {tmp_path / 'key'}"),
        (("--api-key", "k3y-flag"), "by --api-key"),
    ):
        code, out, err = run(capsys, *argv)
        assert (code, err) == (0, "")
        assert reason(out).startswith("set ") and reason(out).endswith(source)
        assert "k3y" not in out


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("", "is empty, but must be text on one line, not empty"),
        ("secret\nx", "is not one line of characters that can be printed, but must be"),
    ],
)
def test_a_refused_key_of_the_environment_is_named_and_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str, wrong: str
) -> None:
    """An empty one is no server without a key: somebody meant to set it."""
    monkeypatch.setenv(VARIABLE, value)
    assert run(capsys) == (2, "", f"error: {VARIABLE} {wrong}\n")


def test_to_clients_an_empty_variable_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "check"])
def test_help_names_every_source(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "--api-key-file" in out and VARIABLE in out


WARNING = "--host is {} and there is no API key, so whoever reaches this machine may use the server: give --api-key, or"


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this package logged: threads of other tests' exporters may log meanwhile."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("pypto_serving")]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "::ffff:1.2.3.4", "some.name"])
def test_an_open_address_without_a_key_is_a_warning(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, host: str
) -> None:
    assert run(capsys, "--host", host)[0] == 0
    assert ours(caplog) == [f"{WARNING.format(host)} set {VARIABLE}"]
    caplog.clear()
    assert run(capsys, "--host", host, "--api-key", "k")[0] == 0
    assert ours(caplog) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "::ffff:127.0.0.1"])
def test_an_address_of_this_machine_only_is_fine(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, host: str
) -> None:
    assert run(capsys, "--host", host)[0] == 0
    assert ours(caplog) == []


def test_there_may_be_several_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys, config = tmp_path / "keys", tmp_path / "c.yaml"
    keys.write_text("# of the team\nfirst-k3y\n\n  second-k3y  \n#old-k3y\n")
    for text in (f"api-key-file: {keys}", "api-key: [first-k3y, second-k3y]"):
        config.write_text(text)
        for argv in (
            ("--api-key", "first-k3y", "--api-key", "second-k3y"),
            ("--api-key-file", str(keys)),
            ("--config", str(config)),
        ):
            code, out, err = run(capsys, *argv)
            assert (code, err) == (0, "") and reason(out).startswith("2 keys")
            assert "k3y" not in out


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_key_among_others_is_refused(capsys: pytest.CaptureFixture[str], value: str) -> None:
    code, _, err = run(capsys, "--api-key", "k3y", "--api-key", value)
    assert (code, err) == (2, "error: --api-key is empty, but must be text on one line, not empty\n")
