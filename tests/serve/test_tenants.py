"""Files of keys, keys from flags and the environment, and what messages about them may show."""

from pathlib import Path

import pytest

from megatoken.errors import ConfigError, UsageError
from megatoken.serve.tenants import DEFAULT_TENANT, KEY_VARIABLE, load_keys


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text("\n".join(["keys:", *lines]))
    return path


def test_a_file_of_keys(tmp_path: Path) -> None:
    keys = load_keys((), write(tmp_path, "  - {name: chat, key: secret-1, weight: 4}", "  - {name: batch, key: s2}"))
    chat = keys.tenant_of("Bearer secret-1")
    assert chat is not None and (chat.name, chat.weight) == ("chat", 4.0)
    assert keys.tenant_of("bearer s2") is not None
    for wrong in (None, "", "secret-1", "Basic secret-1", "Bearer ", "Bearer secret-2"):
        assert keys.tenant_of(wrong) is None


def test_without_keys_every_client_is_served() -> None:
    assert load_keys((), None).tenant_of(None) is DEFAULT_TENANT


def test_several_keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "first, second")
    keys = load_keys((), None)
    assert keys.tenant_of("Bearer first") is not None and keys.tenant_of("Bearer second") is not None
    assert keys.tenant_of("Bearer first, second") is None
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(UsageError, match="an API key is empty"):
        load_keys((), None)
    monkeypatch.setenv(KEY_VARIABLE, "s\u00e9cret")
    with pytest.raises(UsageError, match="an API key has letters beyond ASCII"):
        load_keys((), None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("  - {name: a, key: x, requests_per_minut: 1}", "did you mean requests_per_minute?"),
        ("  - {name: a}", "key 'keys.0.key' is missing; add it"),
        ("  - {name: a, key: 8127364512}", "'keys.0.key': must be text that is not empty; put it in quotes"),
        ("  - {name: a, key: ''}", "'keys.0.key': must be text that is not empty; put it in quotes"),
        ("  - {name: a, key: s\u00e9cret}", "keys.0.key has letters beyond ASCII; give one of ASCII"),
        ("  - {name: a, key: one}\n  - {name: a, key: two}", "two keys have the same name"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_without_its_keys(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, line)
    with pytest.raises(ConfigError) as raised:
        load_keys((), path)
    assert str(raised.value).startswith(str(path)) and message in str(raised.value)
    assert "8127364512" not in str(raised.value)
