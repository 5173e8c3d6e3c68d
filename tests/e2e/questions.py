"""Questions to the bundled model over HTTP."""

from __future__ import annotations

import asyncio

import httpx
from bundled_model.arithmetic import is_correct, sample_questions

from tests.e2e.server import Server

Message = dict[str, str]


def ask_all(server: Server, chats: list[list[Message]]) -> list[str]:
    """Greedy replies to all chats, many at once."""

    async def main() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            gate = asyncio.Semaphore(48)

            async def one(messages: list[Message]) -> str:
                async with gate:
                    body = {"messages": messages, "temperature": 0, "max_tokens": 40}
                    reply = await client.post("/v1/chat/completions", json=body)
                    reply.raise_for_status()
                    return str(reply.json()["choices"][0]["message"]["content"])

            return list(await asyncio.gather(*map(one, chats)))

    return asyncio.run(main())


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def share_correct(server: Server, earlier: list[Message], count: int) -> float:
    problems = sample_questions(count, seed=1)
    replies = ask_all(server, [[*earlier, user(question)] for question, _ in problems])
    return sum(is_correct(reply, result) for reply, (_, result) in zip(replies, problems, strict=True)) / count
