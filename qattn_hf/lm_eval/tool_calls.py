"""Tool calls in long conversations: do their arguments survive a packed cache (the task `qattn_tools`)?

A conversation begins with the schemas of four tools and with records that have arguments. Earlier turns call each tool
once and fill the context with results. The last turn asks for a call with arguments from a record at the beginning. A
call counts if its name and all its arguments are right. All texts are generated from a seed, in the model's chat
template, so any chat model can be tested.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from qattn_hf.assets import demo_tasks
from qattn_hf.errors import QAttnError
from qattn_hf.lm_eval.generated import LENGTHS, datasets_of, tokenizer_of

ANSWER = 96  # tokens of a length reserved for the call
CITIES = ("Antwerp", "Bergen", "Cologne", "Dublin", "Ghent", "Lyon", "Porto", "Riga", "Turin", "Utrecht")

Call = dict[str, Any]  # {"name": ..., "arguments": {...}}
Message = dict[str, str]


def _parcel(rng: random.Random) -> dict[str, Any]:
    letters = "".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=2))
    return {
        "order": f"{letters}-{rng.randint(10_000, 99_999)}",
        "weight_grams": rng.randint(100, 9_999),
        "city": rng.choice(CITIES),
    }


def _invoice(rng: random.Random) -> dict[str, Any]:
    return {
        "account": f"NL{rng.randint(10, 99)}BANK{rng.randint(10**9, 10**10 - 1)}",
        "amount_cents": rng.randint(1_000, 999_999),
        "currency": rng.choice(("EUR", "GBP", "USD")),
    }


def _room(rng: random.Random) -> dict[str, Any]:
    date = f"2027-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    return {"room": f"{rng.choice('ABCD')}{rng.randint(100, 999)}", "date": date, "hours": rng.randint(1, 9)}


def _ticket(rng: random.Random) -> dict[str, Any]:
    return {
        "machine": f"{rng.choice(('lathe', 'mill', 'press', 'robot'))}-{rng.randint(10, 99)}",
        "code": f"0x{rng.randrange(16**6):06x}",
        "priority": rng.choice(("low", "normal", "urgent")),
    }


# For each tool: the request for it, and a function that makes its arguments.
TOOLS: dict[str, tuple[str, Callable[[random.Random], dict[str, Any]]]] = {
    "send_parcel": ("Send the parcel of {}.", _parcel),
    "pay_invoice": ("Pay the invoice of {}.", _invoice),
    "book_room": ("Book the room of {}.", _room),
    "open_ticket": ("Open the ticket of {}.", _ticket),
}


def conversations(lengths: Sequence[int] = LENGTHS[:3], samples: int = 20, **metadata: Any) -> Any:
    """Make conversations as `input`, the requested call as `target` in JSON, and `length`.

    Args:
        lengths: tokens of a conversation and its answer.
        samples: conversations of each length.
        metadata: `tokenizer` or `pretrained` names the model's tokenizer.

    Raises:
        QAttnError: the task has no metric for a length, a length is too short for a conversation or too long for the
            model, or no tokenizer is named.
    """
    if strange := [length for length in lengths if length not in LENGTHS]:
        raise QAttnError(f"qattn_tools: {strange[0]}: lengths are of {LENGTHS}")
    tokenizer = tokenizer_of(metadata, "qattn_tools")
    if max(lengths) > tokenizer.model_max_length:  # lm-eval would cut off the records
        raise QAttnError(f"qattn_tools: {max(lengths)} tokens: the model takes {tokenizer.model_max_length}")
    rng = random.Random(0)
    return datasets_of(test=[conversation(rng, length, tokenizer) for length in lengths for _ in range(samples)])


def conversation(rng: random.Random, length: int, tokenizer: Any) -> dict[str, Any]:
    """Make one row of `conversations`. Earlier turns call each tool for one person, and the last turn for another."""
    people = rng.sample(demo_tasks.NAMES, 2 * len(TOOLS))
    earlier, later = (
        {name: (person, TOOLS[name][1](rng)) for name, person in zip(TOOLS, part, strict=True)}
        for part in (people[: len(TOOLS)], people[len(TOOLS) :])
    )
    records = [_record(*record) for calls in (earlier, later) for record in calls.values()]
    rng.shuffle(records)
    turns = rng.sample(list(TOOLS), len(TOOLS))
    asked = rng.choice(turns)
    results = [[_log_line(rng)] for _ in turns]

    def text() -> str:
        messages = [{"role": "system", "content": _instructions(records)}]
        request = ""
        for name, lines in zip(turns, results, strict=True):
            person, arguments = earlier[name]
            messages += [
                {"role": "user", "content": request + TOOLS[name][0].format(person)},
                {"role": "assistant", "content": call_text({"name": name, "arguments": arguments})},
            ]
            request = "Result:\n" + "".join(lines) + "\n"
        messages.append({"role": "user", "content": request + TOOLS[asked][0].format(later[asked][0])})
        return in_template(tokenizer, messages)

    _fill(rng, results, length - ANSWER, lambda: len(tokenizer(text(), add_special_tokens=False).input_ids))
    target = call_text({"name": asked, "arguments": later[asked][1]})
    return {"input": text(), "target": target, "length": length}


def _fill(rng: random.Random, results: list[list[str]], tokens: int, count: Callable[[], int]) -> None:
    """Add lines to the results in turn, until the whole text has about `tokens` tokens and no more.

    Raises:
        QAttnError: the text is longer even without added lines.
    """
    if (least := count()) > tokens:
        raise QAttnError(f"qattn_tools: a conversation has {least + ANSWER} tokens at least: take greater lengths")
    before, size = least, 1
    while size:
        added = [(results[i % len(results)], _log_line(rng)) for i in range(size)]
        for lines, line in added:
            lines.append(line)
        after = count()
        if after > tokens:
            for lines, _ in reversed(added):
                lines.pop()
            size //= 2
        else:
            each = max(1, (after - before) // size)
            before, size = after, max(1, (tokens - after) // each) if after < tokens else 0


def _record(person: str, arguments: dict[str, Any]) -> str:
    return f"{person}: " + ", ".join(f"{key} {json.dumps(value)}" for key, value in arguments.items())


def _log_line(rng: random.Random) -> str:
    hour, minute = rng.randint(0, 23), rng.randint(0, 59)
    return f"{hour:02}:{minute:02} {rng.choice(CITIES)} batch {rng.randint(100, 999)} done\n"


def _instructions(records: list[str]) -> str:
    schemas = "".join(json.dumps(_schema(name)) + "\n" for name in TOOLS)
    return (
        "Answer each request with one call of a tool: a JSON object with its name and its arguments, on one line.\n\n"
        f"Tools:\n{schemas}\nRecords:\n" + "\n".join(records)
    )


def _schema(name: str) -> dict[str, Any]:
    example = TOOLS[name][1](random.Random(0))
    types = {key: {"type": "integer" if isinstance(value, int) else "string"} for key, value in example.items()}
    return {"name": name, "parameters": {"type": "object", "properties": types, "required": list(types)}}


def call_text(call: Call) -> str:
    """Format a call as the model should write it."""
    return json.dumps(call)


def in_template(tokenizer: Any, messages: list[Message]) -> str:
    """Format messages as the model reads them, up to where its answer begins.

    Without a chat template each message is a line. If a template refuses the system role, its content is put in front
    of the user's. Thinking is switched off.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "
    from jinja2.exceptions import TemplateError

    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    try:
        found = tokenizer.apply_chat_template(messages, **options)
    except TemplateError:
        (system, user), others = messages[:2], messages[2:]
        first = {"role": "user", "content": f"{system['content']}\n\n{user['content']}"}
        found = tokenizer.apply_chat_template([first, *others], **options)
    return str(found)


def tool_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Score 1 if the call is right, else 0, in total (`acc`) and by length, and the share of right `arguments`."""
    wanted, said = json.loads(doc["target"]), first_object(results[0])
    given = said.get("arguments") if said.get("name") == wanted["name"] else None
    given = given if isinstance(given, dict) else {}
    right = [key in given and given[key] == value for key, value in wanted["arguments"].items()]
    exact = float(said == wanted)
    return {"acc": exact, "arguments": sum(right) / len(right), f"tokens_{doc['length']}": exact}


def first_object(text: str) -> dict[str, Any]:
    """Return the first JSON object in a text, or an empty dict."""
    start = text.find("{")
    if start < 0:
        return {}
    try:
        found = json.JSONDecoder().raw_decode(text, start)[0]
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
