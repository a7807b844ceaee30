"""The routes `/tokenize` and `/detokenize`, compatible with vLLM."""

import asyncio
from typing import Any

from fastapi import APIRouter

from minigen.errors import PromptError
from minigen.llm import LLM
from minigen.server.errors import ApiError
from minigen.server.models import ModelHost
from minigen.server.openai import examples
from minigen.server.openai.routes import chat_prompt
from minigen.server.openai.schema import DetokenizeRequest, TokenizeRequest


def token_router(host: ModelHost) -> APIRouter:
    """Create the routes for the tokenizers of a host's models."""
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", responses=examples.TOKENIZE)
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        """Return the token ids of a prompt, or of a conversation."""
        async with host.lease(request.model) as served:
            return await asyncio.to_thread(_tokenized, served.llm, request)

    @router.post("/detokenize", responses=examples.DETOKENIZE)
    async def detokenize(request: DetokenizeRequest) -> dict[str, Any]:
        """Return the text of token ids, including special tokens."""
        async with host.lease(request.model) as served:
            return await asyncio.to_thread(_detokenized, served.llm, request)

    return router


def _tokenized(llm: LLM, request: TokenizeRequest) -> dict[str, Any]:
    if (request.prompt is None) == (request.messages is None):
        raise ApiError("Send either prompt or messages, not both or none.", param="prompt")
    if request.prompt is None:
        if request.add_special_tokens:
            raise ApiError(
                "add_special_tokens needs a prompt: a chat template adds its own special tokens.",
                param="add_special_tokens",
            )
        tokens = chat_prompt(llm, request)
    else:
        tokens = llm.tokenizer.encode(request.prompt, request.add_special_tokens is not False)
    texts = None
    if request.return_token_strs:
        texts = [llm.tokenizer.token_bytes(each).decode(errors="replace") for each in tokens]
    return {
        "count": len(tokens),
        "max_model_len": llm.config.max_positions,
        "tokens": tokens,
        "token_strs": texts,
    }


def _detokenized(llm: LLM, request: DetokenizeRequest) -> dict[str, Any]:
    unknown = [each for each in request.tokens if each >= llm.config.vocab_size]
    if unknown:
        raise PromptError(
            f"tokens contains the id {unknown[0]}; this model's vocabulary has the ids 0 to "
            f"{llm.config.vocab_size - 1}."
        )
    return {"prompt": llm.tokenizer.decode(request.tokens, skip_special_tokens=False)}
