"""Files for HTTPS that cannot be used are refused before anything starts."""

from pathlib import Path

import pytest

from megatoken.errors import UsageError
from megatoken.serve.tls import tls_context


def test_no_files_no_https() -> None:
    assert tls_context(None, None) is None


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--tls-certificate .*nowhere.pem: cannot be read \(No such file"):
        tls_context(tmp_path / "nowhere.pem", tmp_path / "key.pem")


def test_files_that_are_no_certificate(tmp_path: Path) -> None:
    path = tmp_path / "text.pem"
    path.write_text("hello")
    with pytest.raises(UsageError, match=r"text.pem and .*text.pem are not a certificate chain and its private key"):
        tls_context(path, path)
