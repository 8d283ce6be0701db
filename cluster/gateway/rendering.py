"""A conversation -> what the chat template gets. Templates that know no tools get them as words."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from cluster.gateway.chat import ChatPrompt, Message
from cluster.gateway.parsing.formats import Formats
from cluster.gateway.parsing.interface import Tool
from common.text import Text


class Rendering:
    """Of one model. Stateless; used on any thread."""

    def __init__(self, text: Text, formats: Formats) -> None:
        self._text = text
        self._formats = formats
        self._knows_tools = "tools" in text.template_variables

    def token_ids(self, prompt: ChatPrompt) -> list[int]:
        """Return a conversation's prompt.

        Raises:
            InvalidRequestError: there is no chat template, or it refuses these messages.
        """
        extra: dict[str, Any] = {
            **prompt.template_arguments,
            "add_generation_prompt": prompt.add_generation_prompt,
            "continue_final_message": prompt.continue_final_message,
        }
        if self._knows_tools:
            tools = [tool.to_json() for tool in prompt.tools] or None
            return self._text.render_chat(prompt.messages, tools=tools, **extra)
        return self._text.render_chat(list(self._in_words(prompt)), **extra)

    def _in_words(self, prompt: ChatPrompt) -> Iterator[Message]:
        messages = list(prompt.messages)
        if prompt.tools:
            offer = self._offer(prompt.tools)
            if messages[0]["role"] == "system":
                offer = f"{messages.pop(0)['content']}\n\n{offer}"
            yield {"role": "system", "content": offer}
        results: list[str] = []
        for message in messages:
            if message["role"] == "tool":
                results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
                continue
            if results:
                yield {"role": "user", "content": "\n".join(results)}
                results = []
            yield self._with_calls(message) if "tool_calls" in message else message
        if results:
            yield {"role": "user", "content": "\n".join(results)}

    def _with_calls(self, message: Message) -> Message:
        calls = [call["function"] for call in message["tool_calls"]]
        texts = [self._formats.tools.call_text(call["name"], _json(call["arguments"])) for call in calls]
        lines = [message["content"], *texts] if message["content"] else texts
        return {"role": message["role"], "content": "\n".join(lines)}

    def _offer(self, tools: Sequence[Tool]) -> str:
        listed = "\n".join(_json(tool.to_json()) for tool in tools)
        example = self._formats.tools.call_text("NAME", "{ARGUMENTS}")
        return (
            f"You may call functions. These are their JSON signatures:\n{listed}\n"
            f"To call one, write its name and a JSON object with its arguments like this, and nothing else:\n{example}"
        )


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
