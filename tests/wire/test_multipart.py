from email.message import EmailMessage

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.multipart import model_of_form, rename_model_of_form

TYPE = "multipart/form-data; boundary=x7"
SOUND = (
    b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n'
    b"\r\n\x00\xff\r\n--x\r\n"
)


def field(name: str, value: str) -> bytes:
    return f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}'.encode()


def form(*parts: bytes, boundary: bytes = b"x7") -> bytes:
    return b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + boundary + b"--\r\n"


@pytest.mark.parametrize(
    "body",
    [
        form(field("model", "whisper"), SOUND),
        form(SOUND, field("language", "en"), field("model", "whisper")),
        form(b"content-disposition:form-data;name=model\r\nContent-Type: text/plain\r\n\r\nwhisper"),
        form(field("a", "").replace(b'name="a"', b'name="a"; filename="\xc3\xbc.wav"'), field("model", "whisper")),
    ],
)
def test_the_model_of_a_form(body: bytes) -> None:
    assert model_of_form(body, TYPE) == "whisper"
    renamed = rename_model_of_form(body, TYPE, "whisper-large-v3")
    assert renamed == body.replace(b"whisper", b"whisper-large-v3")
    assert model_of_form(renamed, TYPE) == "whisper-large-v3"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (form(SOUND), TYPE),
        (form(field("model", "a"), field("model", "b")), TYPE),
        (form(field("model", "a"), b"Content-Disposition: form-data; name*=utf-8''model\r\n\r\nb"), TYPE),
        (form(field("model", "a"), b"\r\nnameless"), TYPE),
        (
            form(b'Content-Disposition: form-data; name="model"\r\nContent-Disposition: form-data; name="x"\r\n\r\nb'),
            TYPE,
        ),
        (form(field("model", "a"))[:-6], TYPE),
        (b"preamble\r\n" + form(field("model", "a")), TYPE),
        (form(field("model", "a")).replace(b"\r\n", b"\n"), TYPE),
        (form(field("model", "a" * 2000)), TYPE),
        (form(*[field("x", "y")] * 300, field("model", "a")), TYPE),
        (form(field("model", "a")), "multipart/form-data"),
        (form(field("model", "a")), "multipart/form-data; boundary=" + "y" * 71),
        (form(field("model", "a")), "multipart/form-data; boundary=other"),
        (form(b"X: " + b"y" * 9000 + b"\r\n" + field("model", "a")), TYPE),
        (b"", TYPE),
        (b"--x7--", TYPE),
    ],
)
def test_a_form_without_one_or_that_leaves_a_doubt(body: bytes, content_type: str) -> None:
    assert model_of_form(body, content_type) == ""
    assert rename_model_of_form(body, content_type, "m") == body


@given(st.binary(max_size=300), st.text(max_size=80))
def test_nothing_raises(body: bytes, content_type: str) -> None:
    model_of_form(body, content_type)
    model_of_form(form(body), TYPE)
    model_of_form(b"--x7\r\n" + body, TYPE)


@given(st.lists(st.binary(max_size=40).filter(lambda data: b"--x7" not in data), max_size=4), st.integers(0, 4))
def test_whatever_the_files_hold(files: list[bytes], place: int) -> None:
    head = b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    parts = [head + data for data in files]
    parts.insert(place, field("model", "m-1"))
    assert model_of_form(form(*parts), TYPE) == "m-1"


def test_what_the_standard_library_writes() -> None:
    message = EmailMessage()
    message["Content-Disposition"] = 'form-data; name="model"'
    message.set_payload("m")
    body = form(message.as_bytes().replace(b"\n", b"\r\n"))
    assert model_of_form(body, 'multipart/form-data; charset=utf-8; boundary="x7"') == "m"
