"""URLs of stores, and the passwords in them."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from pydantic import SecretStr

from proxy.config import Settings
from proxy.configfile import ConfigError
from proxy.server.files import read_files
from proxy.store.address import check_url, has_password, with_password

PASSWORD = "p:w@/?#% ü"  # what means something else in a URL


@pytest.mark.parametrize(
    ("url", "with_it"),
    [
        ("redis://h:1/0", "redis://:PASSWORD@h:1/0"),
        ("rediss://proxy@h:1?ssl_ca_certs=x", "rediss://proxy:PASSWORD@h:1?ssl_ca_certs=x"),
        ("redis+sentinel://a:1,b:2/name", "redis+sentinel://:PASSWORD@a:1,b:2/name"),
        ("unix:///run/redis.sock", "unix://:PASSWORD@/run/redis.sock"),
    ],
)
def test_a_password_is_put_into_a_url_whatever_characters_it_has(url: str, with_it: str) -> None:
    assert with_password(url, "PASSWORD") == with_it
    made = with_password(url, PASSWORD)
    assert check_url(made) == made
    assert (has_password(url), has_password(made)) == (False, True)
    assert unquote(urlsplit(made).password or "") == PASSWORD
    assert urlsplit(made).path == urlsplit(url).path


def settings(tmp_path: Path, text: str) -> Settings:
    (tmp_path / "password").write_text(text)
    return Settings(redis=SecretStr("redis://proxy@h:1"), redis_password_file=tmp_path / "password")


def test_a_file_has_the_password(tmp_path: Path) -> None:
    held = settings(tmp_path, "s3cret\n")
    files = read_files(held)
    assert files.store_url == "redis://proxy:s3cret@h:1"
    assert "s3cret" not in f"{files}{held}"
    assert read_files(Settings(redis=SecretStr("redis://h:1"))).store_url == "redis://h:1"
    assert read_files(Settings()).store_url is None


@pytest.mark.parametrize("text", ["", "two words"])
def test_a_file_without_one_password_is_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="expected one password and nothing else"):
        read_files(settings(tmp_path, text))


def test_a_password_of_nothing_or_two_of_them_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="redis_password_file needs redis"):
        Settings(redis_password_file=tmp_path / "password")
    with pytest.raises(ValueError, match="one of them"):
        Settings(redis=SecretStr("redis://:a@h:1"), redis_password_file=tmp_path / "password")
