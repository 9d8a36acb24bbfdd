"""Serve the inference server of the trainer: socket, guard, and serving without training."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lachesis.base.errors import ModelNotFoundError, PortInUseError
from lachesis.base.http_guard import HttpGuard
from lachesis.config.run_config import RunConfig, make_template_kwargs

if TYPE_CHECKING:
    from starlette.types import ASGIApp
    from transformers import PreTrainedTokenizerBase

# Maximum size of a sampling request.
MAX_REQUEST_BYTES = 20_000_000


async def serve_without_training(
    config: RunConfig,
    sock: socket.socket,
    tokenizer: PreTrainedTokenizerBase,
    stop: asyncio.Event,
    weights: str | None,
) -> None:
    """Serve a model until `stop` is set.

    Args:
        config: The configuration, which names the base model.
        sock: The socket to serve on.
        tokenizer: The model's tokenizer.
        stop: Ends the server.
        weights: The sampler weights to serve, as a path of the Tinker server; None for the base
            model.
    """
    from lachesis.inference_server.app import create_app
    from lachesis.trainer.trained_model import Policy
    from lachesis.trainer.trainer_state import TrainerState

    policy = await Policy.for_sampling(config, weights)
    app = create_app(policy, tokenizer, config, TrainerState(phase="serving"))
    guarded_app = guard_app(app, config, "the token was printed when this server started")
    async with serve_in_background(guarded_app, sock):
        await stop.wait()
    await policy.close("success")


@contextlib.contextmanager
def bind_inference_socket(config: RunConfig) -> Iterator[socket.socket]:
    """Yield the inference server's socket; a port in use fails before anything is loaded."""
    address = urlsplit(config.openai.base_url)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    # The explicit protocol lets asyncio recognise TCP and send small responses at once.
    with socket.socket(proto=socket.IPPROTO_TCP) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            raise PortInUseError(
                f"the inference server cannot listen on {host}:{port}: {error.strerror}"
            ) from error
        yield sock


def guard_app(
    app: ASGIApp,
    config: RunConfig,
    token_hint: str = "the inference server of a run serves its own environments only",
) -> HttpGuard:
    """Require the token in $LACHESIS_INFERENCE_TOKEN for sampling, which costs money in the cloud.

    The routes that describe the server need no token. `token_hint` explains a refusal.
    """
    host = urlsplit(config.openai.base_url).hostname or "127.0.0.1"
    token = os.environ.get("LACHESIS_INFERENCE_TOKEN")
    public_paths = ("/health", "/base/health", "/wandb_info", "/base/wandb_info")
    return HttpGuard(
        app,
        host=host,
        token=token,
        open_paths=public_paths,
        max_body_bytes=MAX_REQUEST_BYTES,
        token_hint=token_hint,
    )


@contextlib.asynccontextmanager
async def serve_in_background(app: ASGIApp, sock: socket.socket) -> Any:
    """Serve `app` on `sock` during the block, without uvicorn's signal handlers."""
    import uvicorn

    from lachesis.base.http_server import ReceiveDeadlineProtocol, SignalFreeServer

    server = SignalFreeServer(
        uvicorn.Config(
            app,
            http=ReceiveDeadlineProtocol,
            log_level="warning",
            timeout_keep_alive=120,
            timeout_graceful_shutdown=1,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


def load_tokenizer(config: RunConfig) -> Any:
    """Load the model's tokenizer, whose chat template has the run's settings.

    Raises:
        ModelNotFoundError: It cannot be loaded.
        ConfigError: Its chat template cannot switch thinking as the run asks for.
    """
    name = config.openai.model_name
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"the tokenizer of {name} cannot be loaded: {str(error).splitlines()[0]}"
        ) from error
    template = tokenizer.chat_template
    kwargs = make_template_kwargs(template if isinstance(template, str) else None, config)
    # Whoever renders a conversation in this process gets the run's settings.
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **kwargs)
    return tokenizer
