"""Reads streamed answers with the helpers of each client.

python read_streams.py URL KEY QUESTIONS: the questions as a JSON list.  Prints what
each client has read of each answer, as JSON.  It runs where the clients are installed.
"""

import json
import sys
from typing import Any

PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
FUNCTION: Any = {
    "type": "function",
    "function": {"name": "f", "parameters": PARAMETERS},
}


class Reader:
    """Asks a question of each client."""

    def __init__(self, url: str, key: str) -> None:
        import anthropic
        import ollama
        import openai

        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
        headers = {"Authorization": f"Bearer {key}"}
        self.ollama = ollama.Client(host=f"{url}/ollama", headers=headers)

    def openai_chat(self, question: str) -> dict[str, Any]:
        thoughts = ""
        with self.openai.chat.completions.stream(
            model="m1", messages=_asked(question), tools=[FUNCTION]
        ) as stream:
            for event in stream:
                if event.type == "chunk" and event.chunk.choices:
                    delta = event.chunk.choices[0].delta
                    thoughts += getattr(delta, "reasoning_content", None) or ""
            message = stream.get_final_completion().choices[0].message
        return {
            "text": message.content or "",
            "thoughts": thoughts,
            "calls": [
                [call.function.name, json.loads(call.function.arguments)]
                for call in message.tool_calls or ()
            ],
        }

    def openai_responses(self, question: str) -> dict[str, Any]:
        tool: Any = {"type": "function", **FUNCTION["function"], "strict": False}
        with self.openai.responses.stream(
            model="m1", input=question, tools=[tool]
        ) as stream:
            stream.until_done()
            response = stream.get_final_response()
        output: list[Any] = list(response.output)
        thoughts = [item for item in output if item.type == "reasoning"]
        return {
            "text": response.output_text,
            "thoughts": "".join(
                part.text for item in thoughts for part in item.content
            ),
            "calls": [
                [item.name, json.loads(item.arguments)]
                for item in output
                if item.type == "function_call"
            ],
        }

    def anthropic_messages(self, question: str) -> dict[str, Any]:
        with self.anthropic.messages.stream(
            model="m1",
            max_tokens=99,
            messages=_asked(question),
            thinking={"type": "enabled", "budget_tokens": 50},
            tools=[{"name": "f", "input_schema": PARAMETERS}],
        ) as stream:
            blocks: list[Any] = list(stream.get_final_message().content)
        return {
            "text": "".join(b.text for b in blocks if b.type == "text"),
            "thoughts": "".join(b.thinking for b in blocks if b.type == "thinking"),
            "calls": [[b.name, b.input] for b in blocks if b.type == "tool_use"],
        }

    def ollama_chat(self, question: str) -> dict[str, Any]:
        found: dict[str, Any] = {"text": "", "thoughts": "", "calls": []}
        for part in self.ollama.chat(
            "m1", _asked(question), tools=[FUNCTION], think=True, stream=True
        ):
            found["text"] += part.message.content or ""
            found["thoughts"] += part.message.thinking or ""
            for call in part.message.tool_calls or ():
                found["calls"].append(
                    [call.function.name, dict(call.function.arguments)]
                )
        return found


def _asked(question: str) -> Any:
    return [{"role": "user", "content": question}]


def main() -> None:
    url, key, questions = sys.argv[1:]
    reader = Reader(url, key)
    clients = {
        "openai, chat": reader.openai_chat,
        "openai, responses": reader.openai_responses,
        "anthropic": reader.anthropic_messages,
        "ollama": reader.ollama_chat,
    }
    read: dict[str, dict[str, Any]] = {name: {} for name in clients}
    for name, client in clients.items():
        for question in json.loads(questions):
            try:
                read[name][question] = {"error": "", **client(question)}
            except Exception as error:  # of any client: it is what was read
                nothing = {"text": "", "thoughts": "", "calls": []}
                read[name][question] = {**nothing, "error": str(error)}
    print(json.dumps(read))


if __name__ == "__main__":
    main()
