# SPDX-License-Identifier: BSD-3-Clause
"""The chat of trained_server: a template, answers, a tool and a schema, correct or faulty.

The model knows the answers to the checks' questions, and continues any other chat like a prompt.
"""

import json

import trained_server
from strix_validate.serving import chats, structures
from trained_server import IDS, KNOWN_SUCCESSORS, LOCK, RIGHT, WORDS, encode

#: The special tokens of the chat template. No other text contains their texts.
SPECIAL = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
with LOCK:
    for word in SPECIAL:
        IDS[word] = len(WORDS)
        WORDS.append(word)
END = IDS["<|end|>"]
ASSISTANT = IDS["<|assistant|>"]
CITY = "Paris, as anyone would say without a map."
CALL = json.dumps({"name": structures.TOOL, "arguments": {"harbour": "Bergen", "day": 2}})
PROSE = "It is mild today, with a light wind and a little rain."
JSON = json.dumps({"text": structures.UNICODE, "number": 5}, ensure_ascii=False)
THOUGHT = "The user wants the capital of France. I know what anyone would say."


def learn(question, answer):
    """Teach the model to continue the last tokens of a question with the answer."""
    tokens = [*encode(question)[-2:], ASSISTANT, *answer, END]
    for i in range(3, len(tokens)):
        KNOWN_SUCCESSORS[tuple(tokens[i - 3 : i])] = tokens[i]


learn(chats.QUESTION, encode(CITY))
learn(structures.ASK_TOOL[0]["content"], encode(PROSE))
learn(structures.ASK_SCHEMA[0]["content"], encode(PROSE))


def is_schema(schema):
    """Return whether a JSON schema and its properties have types that exist."""
    if schema["type"] not in ("object", "string", "integer"):
        return False
    return all(is_schema(part) for part in schema.get("properties", {}).values())


class Handler(trained_server.Handler):
    """A handler with /v1/chat/completions."""

    def apply_template(self, body, opened=True):
        fault = self.server.fault
        messages = list(body["messages"])
        if fault == "last-only":
            messages = messages[-1:]
        if fault == "no-system":
            messages = [m for m in messages if m["role"] != "system"]
        if fault == "no-history" and len(messages) > 2:
            messages = [m for m in messages if m["role"] == "system"] + messages[-1:]
        if fault == "reversed":
            messages = messages[::-1]
        tokens = []
        if body.get("tools") and self.server.style != "no-tools":
            tokens += [IDS["<|system|>"], *encode(json.dumps(body["tools"])), END]
        for message in messages:
            role = "user" if fault == "roles" else message["role"]
            content = "" if fault == "no-result" and role == "tool" else message["content"]
            if fault == "no-template":
                tokens += encode(f"{content}\n")
                continue
            tokens += [IDS[f"<|{role}|>"], *encode(content)]
            for call in message.get("tool_calls") or []:
                tokens += encode(json.dumps(call["function"]))
            tokens += [END] * (role == "assistant")
        return [*tokens, ASSISTANT] if opened and fault != "no-template" else tokens

    def chat(self, body):
        server = self.server
        fault = server.fault
        style = server.style
        if style == "no-chat":
            self.refuse("As of transformers v4.44, default chat template is no longer allowed")
            return
        if style == "no-system" and body["messages"][0]["role"] == "system":
            self.refuse("System role not supported")
            return
        schemas = [tool["function"]["parameters"] for tool in body.get("tools") or []]
        if body.get("response_format"):
            schemas.append(body["response_format"]["json_schema"]["schema"])
        if not all(is_schema(schema) for schema in schemas):
            self.refuse("invalid JSON schema")
            return
        choice = body.get("tool_choice", "auto" if body.get("tools") else "none")
        if style == "no-parser" and choice != "none":
            self.refuse(
                '"auto" tool choice requires --enable-auto-tool-choice and '
                "--tool-call-parser to be set"
            )
            return
        prompt = self.apply_template(body, fault != "not-opened")
        if len(prompt) + body["max_tokens"] > server.context:
            self.refuse("maximum context length")
            return
        tokens, logprobs = self.chat_tokens(body, prompt, choice)
        message, finish = self.message(body, tokens, choice)
        read = 0 if fault == "chat-no-prompt-count" else len(prompt)
        written = len(tokens) + (fault == "chat-usage")
        usage = {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        }
        with LOCK:
            server.read += len(prompt)
            server.generated += len(tokens)
        if body.get("stream"):
            self.stream_message(message, tokens, finish, usage)
            return
        entries = [{"token": WORDS[t], "logprob": x} for t, x in zip(tokens, logprobs, strict=True)]
        answer = {
            "message": message,
            "token_ids": tokens,
            "finish_reason": finish,
            "logprobs": {"content": entries},
        }
        if style == "no-ids":
            del answer["token_ids"]
        ids = {} if style == "no-ids" else {"prompt_token_ids": prompt}
        self.send_json({"choices": [answer], "usage": usage, **ids})

    def refuse(self, message):
        data = json.dumps({"error": {"message": message}}).encode()
        self.send_response(400)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def chat_tokens(self, body, prompt, choice):
        """Return an answer's tokens and log probabilities. A schema or tool forces tokens."""
        fault = self.server.fault
        number = body["max_tokens"]
        number += fault == "chat-one-more"
        if body.get("response_format") and fault != "schema-ignored":
            text = JSON.replace("5", "6") if fault == "schema-broken" else JSON
            forced = [*encode(text), END]
        elif isinstance(choice, dict) or (body.get("tools") and choice == "auto"):
            forced = [*encode(CALL), END]
        else:
            forced = None
        if forced:
            return forced[:number], [RIGHT] * len(forced[:number])
        read = [3, *prompt[::-1]] if fault == "chat-garbage" else prompt
        tokens, logprobs = self.generate(read, number)
        if END in tokens and not body.get("ignore_eos") and self.server.style != "thinks-on":
            number = tokens.index(END) + 1
        if fault == "early-end" and not body.get("ignore_eos"):
            return [END], [RIGHT]
        return tokens[:number], logprobs[:number]

    def message(self, body, tokens, choice):
        """Return an answer's message and finish_reason."""
        fault = self.server.fault
        ended = tokens[-1] == END
        text = self.decode(tokens[:-1] if ended else tokens)
        for stop in [] if fault == "chat-no-stop" else body.get("stop") or []:
            text = text.partition(stop)[0]
        message = {"role": "assistant", "content": text}
        finish = "stop" if ended else "length"
        if text == CALL and (choice != "none" or fault == "none-called") and body.get("tools"):
            as_text = {"calls-as-text": True, "auto-as-text": choice == "auto"}.get(fault)
            if as_text:
                message["content"] = f"<tool_call>\n{text}\n</tool_call>"
                return message, finish
            function = json.loads(CALL)
            arguments = json.dumps(function["arguments"])
            function["arguments"] = {
                "arguments-object": function["arguments"],
                "arguments-cut": arguments[:-2],
                "arguments-lost": "{}",
            }.get(fault, arguments)
            function["name"] = "other" if fault == "other-tool" else function["name"]
            message["content"] = None
            message["tool_calls"] = [{"id": "call0", "type": "function", "function": function}]
            named = isinstance(choice, dict) or fault == "call-finish"
            return message, "stop" if named else "tool_calls"
        if self.server.style == "thinks" and text and not body.get("ignore_eos"):
            message["reasoning"] = THOUGHT
            for stop in body.get("stop") or []:
                if stop in THOUGHT:
                    message |= {"content": None, "reasoning": THOUGHT.partition(stop)[0]}
        if self.server.style == "thinks-on" and not body.get("response_format"):
            message |= {"content": None, "reasoning": text}
        if fault in ("content-null", "in-reasoning"):
            message["content"] = None
        if fault == "content-empty":
            message["content"] = ""
        if fault == "in-reasoning":
            message["reasoning"] = text
        if fault == "chat-other-text":
            message["content"] = "London, I would say."
        if fault == "chat-echo":
            message["content"] = f"{body['messages'][-1]['content']} {text}"
        return message, finish

    def stream_message(self, message, tokens, finish, usage):
        fault = self.server.fault
        content = message["content"] or ""
        cut = max(1, len(content) // 2)
        parts = [content[:cut], content[cut:]] if fault != "chat-one-part" else [content]
        if fault == "chat-lost":
            parts.pop()
        if fault == "chat-letters" and not content.isascii():
            data = content.encode()
            place = next(i for i, byte in enumerate(data) if byte > 127) + 1
            parts = [part.decode(errors="replace") for part in (data[:place], data[place:])]
        thought = message.get("reasoning") or ""
        deltas = [{"reasoning": part} for part in (thought[:9], thought[9:]) if part]
        deltas += [{"content": part} for part in parts if part]
        for i, call in enumerate(message.get("tool_calls") or []):
            function = call["function"]
            text = function["arguments"]
            deltas.append({"tool_calls": [{"index": i, "function": {"name": function["name"]}}]})
            if fault != "chat-lost":
                deltas.append({"tool_calls": [{"index": i, "function": {"arguments": text}}]})
        events = [{"choices": [{"delta": {"role": "assistant"}, "token_ids": tokens}]}]
        events += [{"choices": [{"delta": delta}]} for delta in deltas]
        events += [{"choices": [{"delta": {}, "finish_reason": finish}]}]
        events += [{"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
        self.chunked("".join(lines).encode(), 99, broken=False)
