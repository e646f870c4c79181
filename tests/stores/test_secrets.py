"""Messages and logs never contain passwords, signatures or tokens."""

import http.server
import logging
import threading
import traceback
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

import zerostart
from zerostart.checkpoint.source import download, open_catalog
from zerostart.checkpoint.storage import object_store
from zerostart.checkpoint.storage.upload import StoreDirectory
from zerostart.distributed.world import current_world
from zerostart.errors import PeerError, ReadError, ZerostartError
from zerostart.integrations.diffusers import PipelineRequest
from zerostart.loading.request import Request
from zerostart.refit.wire import Server
from zerostart.state.saving.hub import push
from zerostart.training.config.configuration import ModelConfig

#: Secrets to search for: a password, its base64 form in a header, a signature and tokens.
CANARIES = ("PASSCANARY", "bWU6UEFTU0NBTkFSWQ", "SIGNCANARY", "SESSIONCANARY", "hf_HUBCANARY")


class Echo(http.server.BaseHTTPRequestHandler):
    """Refuse requests, and repeat them in body and header."""

    status, location = 500, ""
    requests: ClassVar[list[str]] = []

    def answer(self) -> None:
        Echo.requests.append(self.path)
        body = f"{self.requestline}\n{self.headers}".encode()
        body = b"<Error><Code>NotNow</Code><Message>" + body + b"</Message></Error>"
        self.send_response(Echo.status)
        self.send_header("X-Error-Message", f"{self.path} {self.headers.get('authorization')}")
        self.send_header("Content-Length", str(len(body)))
        if Echo.location:
            self.send_header("Location", Echo.location)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = do_PROPFIND = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(object_store, "RETRIES", 0)
    monkeypatch.setattr(Echo, "requests", [])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def full_text(error: BaseException) -> str:
    return f"{error} {error!r} {''.join(traceback.format_exception(error))}"


def check_no_secrets(text: str) -> None:
    assert not [canary for canary in CANARIES if canary.lower() in text.lower()], text


@pytest.mark.parametrize("status", [400, 403, 404, 409, 412, 500])
def test_stores_that_repeat_the_request(
    address: str, status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Echo, "status", status)
    monkeypatch.setenv("AWS_ENDPOINT", f"http://{address}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "SESSIONCANARY")
    url = f"http://me:PASSCANARY@{address}/model.safetensors?X-Amz-Signature=SIGNCANARY"
    for call in (
        lambda: open_catalog(url),
        lambda: zerostart.load(url, engine="fsdp2", progress=False),
        lambda: zerostart.verify(url),
        lambda: open_catalog("s3://bucket/model.safetensors"),
        lambda: StoreDirectory.at("s3://bucket/model").put("a.json", b"{}"),
    ):
        with pytest.raises(ZerostartError) as caught:
            call()
        check_no_secrets(full_text(caught.value))
    check_no_secrets(caplog.text)


def test_reason_of_a_refusal_is_reported(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, "status", 403)
    with pytest.raises(ReadError, match=r"403 Forbidden: NotNow; give credentials"):
        open_catalog(f"http://{address}/model.safetensors?signature=any")  # the reason is read by GET


def test_hub_that_repeats_the_request(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(Echo, "status", 403)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://{address}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_HUBCANARY" + "x" * 25)
    for call in (
        lambda: download("some/model"),
        lambda: push(tmp_path, "some/model", "", current_world()),
    ):
        with pytest.raises(ZerostartError) as caught:
            call()
        check_no_secrets(full_text(caught.value))
    assert Echo.requests


def test_inference_server_that_repeats_the_request(address: str) -> None:
    with pytest.raises(PeerError) as caught:
        Server(f"http://{address}").call("x?token=" + CANARIES[2])  # not in the source line
    check_no_secrets(full_text(caught.value))


def test_redirects_of_inference_servers_are_not_followed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Echo, "status", 302)
    monkeypatch.setattr(Echo, "location", f"http://{address}/elsewhere")
    for body in (None, {}):
        with pytest.raises(PeerError, match="answers 302"):
            Server(f"http://{address}").call("path", body)
    assert Echo.requests == ["/path", "/path"]


def test_representations_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    url = "https://me:PASSCANARY@server/model?sig=SIGNCANARY"
    check_no_secrets(f"{Request(source=url)!r} {PipelineRequest(source=url)!r} {ModelConfig(source=url)!r}")
    assert "https://server/model" in repr(Request(source=url))
    logging.getLogger("zerostart").warning("%s: tried again", url)
    check_no_secrets(caplog.text)
    check_no_secrets(full_text(ZerostartError(f"{url}: no")))
